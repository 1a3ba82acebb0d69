"""Checks of data and machine, before the first rollout, of what would train on wrong numbers or fail late."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from datasets import Dataset
from torch import nn
from transformers import AutoConfig
from trl.trainer.utils import get_callable_name

from credit_trl.config import CreditConfig
from credit_trl.contexts.contrast import find_source, source_columns
from credit_trl.rollout.verdict import parameters_of


def check_teacher(args: CreditConfig) -> None:
    """Read the configuration of `teacher_model_name_or_path`, so that a mistyped one fails before the policy loads."""
    name = args.teacher_model_name_or_path
    options = args.teacher_model_init_kwargs or {}
    try:
        if name is not None:
            places = {key: options[key] for key in ("revision", "subfolder", "token", "cache_dir") if key in options}
            AutoConfig.from_pretrained(name, trust_remote_code=args.trust_remote_code, **places)
    except OSError as error:
        raise OSError(f"`teacher_model_name_or_path={name!r}` cannot be loaded: {error}") from error


def named_datasets(train_dataset: Any, eval_dataset: Any) -> dict[str, Any]:
    """The datasets by the name that errors give them; None where there is none."""
    if isinstance(eval_dataset, dict):
        return {"train_dataset": train_dataset} | {f"eval_dataset[{k!r}]": v for k, v in eval_dataset.items()}
    return {"train_dataset": train_dataset, "eval_dataset": eval_dataset}


def check_datasets(
    args: CreditConfig, datasets: dict[str, Any], reward_funcs: Any, environment_factory: Any, rollout_func: Any
) -> None:
    """Check that the `named_datasets` have the columns that the configuration and the reward functions need.

    With a `rollout_func`, reward functions are not checked, because TRL also passes the fields that it returns.

    Raises:
        ValueError: a dataset has no column `prompt` or none for a parameter of a reward function, has a
            column that hides an argument of reward functions, or has no rows or columns to draw contrast prompts
            from; or there is no such contrast source.
    """
    distills = args.distillation_weight > 0.0
    draws = distills and args.contrasts
    columns_of_source = source_columns(find_source(args.contrastive_source)) if draws else []
    funcs = reward_funcs if isinstance(reward_funcs, Sequence) else [reward_funcs]
    funcs = [f for f in funcs if rollout_func is None and callable(f) and not isinstance(f, nn.Module)]
    for name, dataset in datasets.items():
        if isinstance(dataset, dict):
            raise ValueError(f"`{name}` is a dictionary of splits: give one, dataset[{next(iter(dataset))!r}].")
        columns = getattr(dataset, "column_names", None)
        if columns is None:
            continue
        if "prompt" not in columns and environment_factory is None:
            raise ValueError(
                f"`{name}` has no column `prompt`; its columns are {', '.join(columns)}. Rename the one that holds "
                "the question: dataset.rename_column(..., 'prompt')."
            )
        check_column_names(f"`{name}`", columns)
        if missing := [column for column in columns_of_source if column not in columns]:
            raise ValueError(
                f"`contrastive_source={args.contrastive_source!r}` needs the column `{missing[0]}`, which `{name}` "
                f"does not have; its columns are {', '.join(columns)}."
            )
        passed = set(columns) & _KEPT if args.remove_unused_columns else set(columns)
        passed -= {"prompt", "completion"}  # which TRL calls `prompts` and `completions`
        passed |= _PASSED | ({"environments"} if environment_factory is not None else set())
        for func in funcs:
            needed = [p.name for p in parameters_of(func).values() if p.kind in _NAMED and p.default is p.empty]
            if missing := [name for name in needed if name not in passed]:
                raise ValueError(
                    f"Reward function `{get_callable_name(func)}` has the parameter `{missing[0]}`, with which it is "
                    f"not called; with `{name}` and `remove_unused_columns={args.remove_unused_columns}` it is called "
                    f"with {', '.join(sorted(passed))}. Add the column, rename the parameter, or give it a default."
                )
    rows = datasets["train_dataset"]
    has_rows = isinstance(rows, Dataset) and "prompt" in rows.column_names
    if draws and args.contrastive_source == "dataset" and not has_rows:
        raise ValueError(
            "`contrastive_source='dataset'` draws rows of a `datasets.Dataset` with the column `prompt`. Give one, or "
            "set `contrastive_source='batch'`."
        )


def check_ends(trainer: Any) -> None:
    """Warn about an id at which generation ends that is ordinary text, so that completions end inside a sentence."""
    tokenizer = trainer._tokenizer
    added = tokenizer.added_tokens_decoder
    ordinary = [tokenizer.decode([i]) for i in trainer.eos_token_ids if added and i not in added]
    trainer.alarms.raise_if(bool(ordinary), "ordinary_end", text=next(iter(ordinary), None))


def check_truncated(trainer: Any, share: float) -> None:
    """Warn where more than 90 % of a generation batch did not end, naming an end of turn that is no EOS id."""
    if share <= 0.9:
        return
    turn = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "@"}]
    unknown = ""
    with suppress(Exception):  # no template, or one that takes other turns only
        after = trainer.context_builder.render(turn, add_generation_prompt=False).rpartition("@")[2].strip()
        end = trainer._tokenizer(after, add_special_tokens=False)["input_ids"][:1]
        if end and end[0] not in trainer.eos_token_ids:
            unknown = (
                f" The chat template ends a turn with {trainer._tokenizer.decode(end)!r}, where generation does not "
                f"end: add its id {end[0]} to the `eos_token_id` of the model's `generation_config`."
            )
    trainer.alarms.raise_if(True, "truncated", share=share, unknown=unknown)


def check_enough_rows(args: CreditConfig, train_dataset: Any) -> None:
    """Check that the dataset fills one generation batch, as the sampler drops incomplete ones.

    Raises:
        ValueError: it has too few rows, so that training would end before its first step.
    """
    prompts = args.generation_batch_size // args.num_generations
    if hasattr(train_dataset, "__len__") and len(train_dataset) < prompts:
        raise ValueError(
            f"`train_dataset` has {len(train_dataset)} rows, but a generation batch of {args.generation_batch_size} "
            f"rollouts with `num_generations={args.num_generations}` needs {prompts}. Add rows, or lower "
            "`gradient_accumulation_steps`, `per_device_train_batch_size` or `generation_batch_size`."
        )


_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
# Arguments of a reward function beside the dataset columns; `truncated` only where it is accepted.
_PASSED = frozenset("prompts completions completion_ids trainer_state log_extra log_metric truncated".split())
# Columns of these names would take the place of another argument.
RESERVED_COLUMNS = _PASSED | {"environments"}
# Columns that `remove_unused_columns` keeps.
_KEPT = frozenset("prompt image images privileged_context task".split())


def check_column_names(rows: str, columns: Iterable[str]) -> None:
    """Check that no column takes the place of another argument of reward functions, such as `completions`."""
    if taken := sorted(RESERVED_COLUMNS.intersection(columns)):
        raise ValueError(
            f"{rows} has the column `{taken[0]}`, the name of another argument of reward functions. Rename or remove "
            f"it: dataset.rename_column({taken[0]!r}, 'my_{taken[0]}')."
        )
