"""Checks of data, prompts and machine, before the first rollout, of what would train on wrong numbers or fail late."""

import inspect
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from datasets import Dataset, IterableDataset
from torch import nn
from transformers import AutoConfig

from credit_trl.config import CreditConfig
from credit_trl.contexts.builder import ContextBuilder
from credit_trl.contexts.contrast import find_source, source_columns
from credit_trl.contexts.images import check_image_columns
from credit_trl.contexts.prompts import check_rows, images_of, row_prompt, user_text
from credit_trl.contexts.tokens import PrivilegedContext
from credit_trl.loss.sampling import SamplingDistribution, unknown_option
from credit_trl.mistakes import check_vocabulary, refusal
from credit_trl.rollout.batch import Prompt
from credit_trl.rollout.verdict import parameters_of, takes
from credit_trl.teacher.external import teacher_place
from credit_trl.teacher.sharding import is_zero3
from credit_trl.training.step import engine_role
from credit_trl.trl_compat import get_callable_name


def check_paths(args: CreditConfig) -> None:
    """Refuse an `output_dir` that is a file, or a link without a target, and a teacher that cannot be loaded.

    Raises:
        ValueError: see above.
    """
    folder = Path(args.output_dir)
    if os.path.lexists(folder) and not folder.is_dir():
        kind = "a link to nothing" if folder.is_symlink() and not folder.exists() else "a file"
        raise ValueError(f"`output_dir={args.output_dir}` is {kind}. Name a folder, which may be new.")
    check_teacher(args)


def check_teacher(args: CreditConfig) -> None:
    """Read the configuration of `teacher_model_name_or_path`, so that a mistyped one fails before the policy loads."""
    name = args.teacher_model_name_or_path
    try:
        if name is not None:
            AutoConfig.from_pretrained(name, **teacher_place(args))
    except OSError as error:
        cause = " ".join(str(error).split())
        raise OSError(f"`teacher_model_name_or_path={name!r}` cannot be loaded: {cause}") from error


def reads_engine(args: CreditConfig) -> bool:
    """Whether log-probabilities that a vLLM engine reports enter the loss."""
    corrects = args.vllm_importance_sampling_correction or engine_role(args) == "old"
    return args.use_vllm and (corrects or args.off_policy_mask_threshold is not None)


def check_engine_options(args: CreditConfig) -> None:
    """Raise a `ValueError` where the engine's log-probabilities cannot be compared with the policy's."""
    if not reads_engine(args):
        return
    if option := unknown_option(args):
        raise refusal("engine_option", name=option)
    if SamplingDistribution.from_config(args).is_policy:
        return
    if args.distillation_weight == 0.0:
        raise refusal("truncated_grpo")
    if args.off_policy_mask_threshold is not None and not args.vllm_importance_sampling_correction:
        raise refusal("truncated_off_policy")


def check_server(trainer: Any) -> None:
    """Raise a `ValueError` where a vLLM server reports log-probabilities of a distribution that it does not sample."""
    generation = trainer.vllm_generation
    if generation.mode != "server" or not trainer.accelerator.is_main_process or not reads_engine(trainer.args):
        return
    mode = generation.vllm_client.get_server_info()["model_config"]["logprobs_mode"]
    is_same = trainer.args.temperature == 1.0 and SamplingDistribution.from_config(trainer.args).is_policy
    if mode != "processed_logprobs" and not (mode == "raw_logprobs" and is_same):
        raise refusal("logprobs_mode", mode=mode)


def named_datasets(train_dataset: Any, eval_dataset: Any) -> dict[str, Any]:
    """The datasets by the name that errors give them; None where there is none."""
    if isinstance(eval_dataset, dict):
        return {"train_dataset": train_dataset} | {f"eval_dataset[{k!r}]": v for k, v in eval_dataset.items()}
    return {"train_dataset": train_dataset, "eval_dataset": eval_dataset}


def _columns(dataset: Any) -> list[str] | None:
    """Columns of the rows of a dataset, which a transform may change; None where it does not tell."""
    if isinstance(dataset, Dataset) and dataset.format["type"] == "custom" and len(dataset) > 0:
        return list(dataset[0])
    row = _row_without_columns(dataset)
    return getattr(dataset, "column_names", None) if row is None else list(row)


@lru_cache(maxsize=4)
def _row_without_columns(dataset: Any) -> dict[str, Any] | None:
    """First row of a stream that does not tell its columns; None of other data."""
    is_silent = isinstance(dataset, IterableDataset) and dataset.column_names is None
    return next(iter(dataset), None) if is_silent else None


def check_stream_rows(name: str, rows: Sequence[dict[str, Any]], *, needs_user: bool) -> None:
    """Check rows of a stream, of which the checks before a run see the first at most.

    Raises:
        ValueError: a row has no prompt, a reserved column or feedback that is no text, or see `check_rows`.
    """
    check_column_names(name, set().union(*rows))
    for row in rows:
        if "prompt" not in row:
            raise refusal("no_prompt", name=name, columns=", ".join(row))
        feedback = row.get("privileged_context")
        if not isinstance(feedback, str | None):
            kind = type(feedback).__name__
            raise ValueError(f"{name} has the column `privileged_context` of {kind}. Write it as text.")
    check_rows(name, (row["prompt"] for row in rows), needs_user=needs_user)


def check_datasets(
    args: CreditConfig, datasets: dict[str, Any], reward_funcs: Any, options: dict[str, Any], *, distills: bool
) -> None:
    """Check that the `named_datasets` have the columns that the configuration and the reward functions need.

    `options` are the trainer's other arguments; `distills` says whether a teacher scores. With a `rollout_func` among
    them reward functions are not checked, because TRL also passes the fields that it returns.

    Raises:
        ValueError: a dataset has no column `prompt` or none for a parameter of a reward function, has a
            column that hides an argument of reward functions, or has no rows or columns to draw contrast prompts
            from, or has an address as an image; or there is no such contrast source.
    """
    draws = distills and args.contrasts
    columns_of_source = source_columns(find_source(args.contrastive_source)) if draws else []
    funcs = reward_funcs if isinstance(reward_funcs, Sequence) else [reward_funcs]
    has_environments = options.get("environment_factory") is not None
    has_rollouts = options.get("rollout_func") is not None
    funcs = [f for f in funcs if callable(f) and not (has_rollouts or isinstance(f, nn.Module))]
    for name, dataset in datasets.items():
        if isinstance(dataset, dict):
            raise ValueError(f"`{name}` is a dictionary of splits: give one, dataset[{next(iter(dataset))!r}].")
        check_image_columns(dataset)
        columns = _columns(dataset)
        if columns is None:
            continue
        if "prompt" not in columns and not has_environments:
            raise refusal("no_prompt", name=name, columns=", ".join(columns))
        check_column_names(f"`{name}`", columns)
        if isinstance(dataset, Dataset) and len(dataset) == 0:
            raise ValueError(f"`{name}` has no rows.")
        passed = set(columns) & _KEPT if args.remove_unused_columns else set(columns)
        if missing := [column for column in columns_of_source if column not in passed]:
            raise refusal("no_column", c=args, missing=missing[0], name=name, passed=", ".join(sorted(passed)))
        passed -= {"prompt", "completion"}  # which TRL calls `prompts` and `completions`
        passed |= RESERVED_COLUMNS if has_environments else _PASSED
        for func in funcs:
            if extra := sorted(one for one in passed - {"truncated"} if not takes(func, one)):
                raise refusal("extra_argument", func=get_callable_name(func), extra=extra[0])
            needed = [p.name for p in parameters_of(func).values() if p.kind in _NAMED and p.default is p.empty]
            if missing := [name for name in needed if name not in passed]:
                called = {"func": get_callable_name(func), "passed": ", ".join(sorted(passed))}
                raise refusal("missing_argument", c=args, missing=missing[0], name=name, **called)
    rows = datasets["train_dataset"]
    has_rows = isinstance(rows, Dataset) and "prompt" in _columns(rows)
    if draws and args.contrastive_source == "dataset" and not has_rows:
        raise refusal("no_rows_to_draw")


def check_truncated(trainer: Any, share: float) -> None:
    """Warn where more than 90 % of a generation batch did not end, naming an end of turn that is no EOS id."""
    if share <= 0.9:
        return
    turn = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "@"}]
    unknown = ""
    with suppress(Exception):  # no template, or one that takes other turns only
        end_text = trainer.context_builder.render(turn, add_generation_prompt=False).rpartition("@")[2].strip()
        end = trainer._tokenizer(end_text, add_special_tokens=False)["input_ids"][:1]
        if end and end[0] not in trainer.eos_token_ids:
            unknown = (
                f" The chat template ends a turn with {trainer._tokenizer.decode(end)!r}, where generation does not "
                f"end: add its id {end[0]} to the `eos_token_id` of the model's `generation_config`."
            )
    trainer.alarms.raise_if(True, "truncated", share=share, unknown=unknown)


_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
# Arguments of a reward function beside the dataset columns; `truncated` only where it is accepted.
_PASSED = frozenset("prompts completions completion_ids trainer_state log_extra log_metric truncated".split())
# Columns of these names would take the place of another argument.
RESERVED_COLUMNS = _PASSED | {"environments"}
# Columns that `remove_unused_columns` keeps.
_KEPT = frozenset("prompt image images privileged_context task".split())


def check_column_names(rows: str, columns: Iterable[str]) -> None:
    """Check that no column takes the place of another argument of reward functions, such as `completions`."""
    if reserved := sorted(RESERVED_COLUMNS.intersection(columns)):
        raise refusal("reserved_column", rows=rows, taken=reserved[0])


def check_image_options(trainer: Any) -> None:
    """Raise a `ValueError` where a run cannot train on prompts with images."""
    if not trainer._is_vlm:
        raise refusal("no_processor")
    if trainer.accelerator.distributed_type == "FSDP" or is_zero3(trainer.accelerator):
        raise refusal("sharded_images")


def check_prompts(trainer: Any, datasets: dict[str, Any], *, distills: bool) -> None:
    """Check the form of all prompts and static feedback, and more of each first prompt; of streams only the columns.

    Prompts that environments or a `rollout_func` change are not checked. Warns where one ends in an EOS id, and where
    an EOS id is ordinary text, so that completions end inside a sentence.

    Raises:
        ValueError: there is no EOS token, a prompt cannot be encoded, the chat template does not take its parts, or
            the teacher cannot read it: it has no user turn, or images that the configuration does not support.
    """
    if None in trainer.eos_token_ids:
        raise ValueError("The tokenizer has no EOS token, which ends a completion: set `tokenizer.eos_token`.")
    added = trainer._tokenizer.added_tokens_decoder
    ordinary = [trainer._tokenizer.decode([i]) for i in trainer.eos_token_ids if added and i not in added]
    trainer.alarms.raise_if(bool(ordinary), "ordinary_end", text=next(iter(ordinary), None))
    builder = trainer.context_builder
    is_changed = trainer.environment_factories is not None or trainer.rollout_func is not None
    for name, dataset in datasets.items():
        columns = _columns(dataset) or ()
        is_formed = isinstance(dataset, Dataset) and dataset.format["type"] == "custom"  # by a function
        features = {} if is_formed else getattr(dataset, "features", None) or {}
        feature = features.get("privileged_context")
        dtype = getattr(feature, "dtype", type(feature).__name__)  # a list or a struct has none
        if dtype not in ("string", "large_string", "null", "NoneType"):
            raise ValueError(f"`{name}` has the column `privileged_context` of {dtype}. Write it as text.")
        has_prompts = isinstance(dataset, Dataset) and len(dataset) > 0 and "prompt" in columns
        streamed = _row_without_columns(dataset)
        row = dataset[0] if has_prompts else streamed or {"prompt": ""}
        if streamed is not None and not is_changed:
            check_stream_rows(f"`{name}`", [streamed], needs_user=distills)
        if has_prompts and not is_changed:
            is_lazy = is_formed or "Image(" in str(features["prompt"])  # not to decode all
            batches = [{"prompt": [row["prompt"]]}] if is_lazy else dataset.select_columns("prompt").iter(1000)
            check_rows(f"`{name}`", (prompt for rows in batches for prompt in rows["prompt"]), needs_user=distills)
        prompt = row_prompt(row) if distills else row.get("prompt", "")
        has_images = bool(images_of(prompt)) or any(row.get(name) for name in ("image", "images"))
        if distills and has_images:
            check_image_options(trainer)
        if has_prompts:
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
        check_vocabulary(trainer, ids)
        last_id = ids[-1] if ids else None
        trainer.alarms.raise_if(last_id in trainer.eos_token_ids, "prompt_ends", name=name, last=last_id)


def _check_parts(name: str, prompt: Prompt, text: str) -> None:
    """Check that the rendered text of a prompt has its content parts as text."""
    parts = [] if isinstance(prompt, str) else [m["content"] for m in prompt if isinstance(m.get("content"), list)]
    if any(str(part) in text or user_text(prompt).strip() not in text for part in parts):
        raise refusal("parts_as_text", name=name, part=parts[0], text=text[-80:])


def check_rollout_images(
    trainer: Any, prompts: list[Prompt], prompt_ids: list[list[int]], tools: list[Any], tool_images: list[Any]
) -> None:
    """Check that only prompts have images, that the teacher reads the same ids, and at first that z has room."""
    if any(tool_images):
        raise refusal("image_of_tool")
    needs_room = trainer.state.global_step == 0  # later ones without room count in `credit/frac_without_teacher`
    checked = set()
    for ids, prompt, sample_tools in zip(prompt_ids, prompts, tools or [None] * len(prompts), strict=True):
        if images_of(prompt) and tuple(ids) not in checked:
            checked.add(tuple(ids))
            _check_prompt("A prompt", prompt, ids, trainer.context_builder, sample_tools, needs_room)


def _check_prompt(
    name: str, prompt: Prompt, ids: Sequence[int], builder: ContextBuilder, tools: list[Any] | None, needs_room: bool
) -> None:
    """Check that the student's ids of a prompt are the teacher's without z, and that they leave room for z."""
    encoded = builder.encode(prompt, PrivilegedContext(), tools)
    if encoded != list(ids):
        raise refusal("other_ids", name=name, student=len(ids), teacher=len(encoded))
    budget = builder.config.max_reprompt_len
    if needs_room and len(ids) >= budget:
        raise refusal("no_room", name=name, tokens=len(ids), budget=budget)
