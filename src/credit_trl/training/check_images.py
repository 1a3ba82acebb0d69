"""Checks of prompts with images: what the teacher would read otherwise than the student, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from accelerate import Accelerator
from datasets import Dataset

from credit_trl.config import CreditConfig
from credit_trl.contexts.builder import ContextBuilder
from credit_trl.contexts.prompts import images_of, row_prompt
from credit_trl.contexts.tokens import PrivilegedContext
from credit_trl.rollout.batch import Prompt
from credit_trl.teacher.sharding import is_zero3

_GRPO = "or set `distillation_weight=0` (GRPO)"


def check_image_options(args: CreditConfig, accelerator: Accelerator, has_processor: bool) -> None:
    """Check that a run whose prompts have images can train on them.

    Raises:
        ValueError: it has a tokenizer in place of a processor, packed rows, or sharded weights.
    """
    if not has_processor:
        raise ValueError(
            "The prompts have images, and `processing_class` is a tokenizer. Pass the processor of a vision-language "
            "model, or remove the images."
        )
    if args.packed:
        raise ValueError(
            "`packed=True` does not support images: placeholders have the same ids whatever the image. Set "
            "`packed=False`."
        )
    if accelerator.distributed_type == "FSDP" or is_zero3(accelerator):
        raise ValueError(
            "FSDP2 and ZeRO-3 do not support prompts with images: a pass without images would not gather the vision "
            f"tower's weights as the others do. Use DDP or ZeRO-2, with LoRA if memory is short, {_GRPO}."
        )


def check_image_rows(
    args: CreditConfig,
    datasets: dict[str, Any],
    builder: ContextBuilder,
    accelerator: Accelerator,
    tokenize: Callable[[list[Prompt]], Any],
) -> None:
    """Check the options for datasets with images, and the first row of each; streams are not read.

    Args:
        tokenize: prompts to a tuple that begins with the student's ids of each.

    Raises:
        ValueError: see `check_image_options` and `check_ids`.
    """
    for name, dataset in datasets.items():
        columns = {*(getattr(dataset, "column_names", None) or ())}
        prompt: Prompt = ""
        if isinstance(dataset, Dataset) and len(dataset) and "prompt" in columns:
            prompt = row_prompt(dataset.select_columns([*columns & {"prompt", "image", "images"}])[0])
        if columns & {"image", "images"} or images_of(prompt):
            check_image_options(args, accelerator, builder.reader is not None)
        builder.read_images(prompt)
        if images_of(prompt):
            check_ids(f"The first prompt of `{name}`", prompt, tokenize([prompt])[0][0], builder)


def check_rollout_images(
    tool_images: Sequence[Any], prompt_ids: Sequence[Sequence[int]], prompts: Sequence[Prompt], builder: ContextBuilder
) -> None:
    """Check that only prompts have images, and that the student reads them as the teacher does.

    Args:
        tool_images: images in the answers of tools, of each completion.
        prompt_ids: of the student.

    Raises:
        ValueError: a tool returned an image, or see `check_ids`.
    """
    if any(tool_images):
        raise ValueError(
            f"A tool returned an image. With distillation only prompts may have images: return text, {_GRPO}."
        )
    seen: set[tuple[int, ...]] = set()
    for prompt, ids in zip(prompts, map(tuple, prompt_ids), strict=True):
        if images_of(prompt) and ids not in seen:
            seen.add(ids)
            check_ids("A prompt", prompt, ids, builder)


def check_ids(name: str, prompt: Prompt, ids: Sequence[int], builder: ContextBuilder) -> None:
    """Check the ids of a prompt with images.

    Raises:
        ValueError: the student's ids differ from those of the teacher's prompt without z, or leave no room for z.
    """
    own = builder.encode(prompt, PrivilegedContext())
    if own != list(ids):
        raise ValueError(
            f"{name} has {len(ids)} tokens for the student and {len(own)} for the teacher, or other ones: the "
            "processor changes the text around its images. Use a processor that replaces the placeholders only, "
            f"{_GRPO}."
        )
    if len(ids) >= builder.config.max_reprompt_len:
        raise ValueError(
            f"{name} has {len(ids)} tokens with its images, which leaves no room for z in "
            f"`max_reprompt_len={builder.config.max_reprompt_len}`. Increase it, or lower the resolution of the "
            "processor, such as its `max_pixels`."
        )
