"""Checks of prompts: what the teacher would read otherwise than the student, or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from accelerate import Accelerator
from datasets import Dataset

from credit_trl.contexts.builder import ContextBuilder
from credit_trl.contexts.prompts import images_of, is_prompt, row_prompt, user_text
from credit_trl.contexts.tokens import PrivilegedContext
from credit_trl.rollout.batch import Prompt
from credit_trl.teacher.sharding import is_zero3


def check_image_options(accelerator: Accelerator, has_processor: bool) -> None:
    """Raise a `ValueError` where a run cannot train on prompts with images."""
    if not has_processor:
        raise ValueError(
            "The prompts have images, and `processing_class` is a tokenizer. Pass the processor of a vision-language "
            "model, or remove the images."
        )
    if accelerator.distributed_type == "FSDP" or is_zero3(accelerator):
        raise ValueError(
            "FSDP2 and ZeRO-3 do not support prompts with images: a pass without images would not gather the vision "
            "tower's weights as the others do. Use DDP or ZeRO-2, with LoRA if memory is short."
        )


def check_prompts(trainer: Any, datasets: dict[str, Any], *, distills: bool) -> None:
    """Check the form of all prompts, and more of the first of each dataset; of streams only the columns.

    Prompts that environments or a `rollout_func` change are not checked. Warns where one ends in an EOS id.

    Raises:
        ValueError: a prompt cannot be encoded, the chat template does not take its content parts, or the teacher
            cannot read it: it has no user turn, or images that the configuration does not support.
    """
    builder = trainer.context_builder
    is_changed = trainer.environment_factories is not None or trainer.rollout_func is not None
    for name, dataset in datasets.items():
        columns = getattr(dataset, "column_names", None) or ()
        has_prompts = isinstance(dataset, Dataset) and len(dataset) > 0 and "prompt" in columns
        if has_prompts and not is_changed and "Image(" not in str(dataset.features["prompt"]):  # not to decode all
            _check_rows(name, dataset)
        row = dataset[0] if has_prompts else {"prompt": ""}
        prompt = row_prompt(row) if distills else row["prompt"]
        has_images = "image" in columns or "images" in columns or bool(images_of(prompt))
        if distills and has_images:
            check_image_options(trainer.accelerator, trainer._is_vlm)
        builder.read_images(prompt)
        if is_changed or not has_prompts or (has_images and not distills):
            continue
        if distills:
            user_text(prompt)
        [ids] = trainer._tokenize_prompts([prompt])[0]
        if images_of(prompt):
            _check_prompt(f"The first prompt of `{name}`", prompt, ids, builder, trainer.tools or None, True)
        elif not trainer._is_vlm:
            _check_parts(f"The first prompt of `{name}`", prompt, builder.student_text(prompt))
        last = ids[-1] if ids else None
        trainer.alarms.raise_if(last in trainer.eos_token_ids, "prompt_ends", name=name, last=last)


def _check_rows(name: str, dataset: Dataset) -> None:
    """Check that all prompts are texts or messages, which a run may reach only after hours."""
    prompts = (prompt for rows in dataset.select_columns("prompt").iter(1000) for prompt in rows["prompt"])
    for row, prompt in enumerate(prompts):
        if not is_prompt(prompt):
            raise ValueError(f"Row {row} of `{name}` is the prompt {prompt!r:.60}. Give text, or messages with roles.")


def _check_parts(name: str, prompt: Prompt, text: str) -> None:
    """Check that the rendered text of a prompt has its content parts as text."""
    parts = [] if isinstance(prompt, str) else [m["content"] for m in prompt if isinstance(m.get("content"), list)]
    if any(str(part) in text or user_text(prompt).strip() not in text for part in parts):
        raise ValueError(
            f"{name} has the content {parts[0]}, which the chat template renders as {text[-80:]!r}. Give `content` as "
            "a string, or set a `chat_template` that renders parts."
        )


def check_rollout_images(
    tool_images: Sequence[Any],
    prompt_ids: Sequence[Sequence[int]],
    prompts: Sequence[Prompt],
    builder: ContextBuilder,
    tools: Sequence[list[Any] | None],
    *,
    is_first: bool,
) -> None:
    """Check that only prompts have images, that the teacher reads the same ids, and at first that z has room."""
    if any(tool_images):
        raise ValueError(
            "A tool returned an image. With distillation only prompts may have images: return text, or set "
            "`distillation_weight=0` (GRPO)."
        )
    samples = zip(prompt_ids, prompts, tools or [None] * len(prompts), strict=True)
    distinct = {tuple(ids): (prompt, own) for ids, prompt, own in samples if images_of(prompt)}
    for ids, (prompt, own) in distinct.items():  # later ones without room count in `credit/frac_without_teacher`
        _check_prompt("A prompt", prompt, ids, builder, own, is_first)


def _check_prompt(
    name: str, prompt: Prompt, ids: Sequence[int], builder: ContextBuilder, tools: list[Any] | None, needs_room: bool
) -> None:
    """Check that the student's ids of a prompt are the teacher's without z, and that they leave room for z."""
    own = builder.encode(prompt, PrivilegedContext(), tools)
    if own != list(ids):
        raise ValueError(
            f"{name} has {len(ids)} tokens for the student and {len(own)} for the teacher, or other ones: the "
            "processor changes the text around its images. Use a processor that replaces the placeholders only."
        )
    budget = builder.config.max_reprompt_len
    if needs_room and len(ids) >= budget:
        raise ValueError(
            f"{name} has {len(ids)} tokens with its images, which leaves no room for z in "
            f"`max_reprompt_len={budget}`. Increase it, or lower the resolution of the processor (`max_pixels`)."
        )
