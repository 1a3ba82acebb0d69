"""Checks of data and model against a configuration: a failure is one error that names the fix, before any rollout."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from datasets import Dataset
from torch import nn

from credit_trl.config import CreditConfig
from credit_trl.contexts import has_images
from credit_trl.sharding import full_shape


def check_vocabulary(args: CreditConfig, model: nn.Module) -> int:
    """The size of the vocabulary, which K must not exceed."""
    vocabulary = full_shape(model.get_output_embeddings().weight)[0]
    if "topk" in args.distillation_support and args.distillation_topk > vocabulary:
        raise ValueError(
            f"`distillation_topk={args.distillation_topk}` exceeds the model's vocabulary of {vocabulary}. Lower "
            "it, or use `distillation_support='full'`."
        )
    return vocabulary


def check_kernels(args: CreditConfig, model: nn.Module, device: torch.device) -> None:
    """The kernels that were asked for run where the model is trained.

    Raises:
        ValueError: Triton's were, and there is no GPU, or the model is in fp64.
    """
    if args.distillation_kernels != "triton":
        return
    from credit_trl.kernels import triton_rows

    otherwise = "set `distillation_kernels='torch'`, which runs everywhere"
    if not triton_rows.runs_on(device):
        raise ValueError(
            f"`distillation_kernels='triton'` needs a GPU, and this trains on {device.type!r}. Train on one, or "
            f"{otherwise}. For a test without a GPU, TRITON_INTERPRET=1 in the environment runs them in Triton's "
            "interpreter, slowly."
        )
    if model.dtype == torch.float64:
        raise ValueError(
            "`distillation_kernels='triton'` computes in fp32, and the model is in fp64: load it in another dtype, or "
            f"{otherwise}."
        )


def check_datasets(args: CreditConfig, train_dataset: Any, eval_dataset: Any, environment_factory: Any) -> None:
    """Columns that training needs are there and hold what they should.

    Raises:
        ValueError: no `prompt`, images, `privileged_context` that is not text, or no rows to draw contrasts from.
    """
    evals = eval_dataset if isinstance(eval_dataset, dict) else {"eval_dataset": eval_dataset}
    for name, dataset in {"train_dataset": train_dataset, **evals}.items():
        columns = getattr(dataset, "column_names", None)
        if columns is None:
            continue
        if "prompt" not in columns and environment_factory is None:
            raise ValueError(
                f"`{name}` has no column `prompt`; its columns are {', '.join(columns)}. Rename the column that holds "
                "the question: dataset.rename_column('question', 'prompt')."
            )
        if args.distillation_weight > 0.0 and {"image", "images"} & set(columns):
            raise ValueError(_NO_IMAGES)
        if args.contrastive_source == "same_task" and "task" not in columns:
            raise ValueError(
                f"`contrastive_source='same_task'` needs the column `task`, which `{name}` does not have; its columns "
                f"are {', '.join(columns)}. Add it, or use `contrastive_source='batch'`."
            )
        if "privileged_context" in columns:
            _check_text_column(name, dataset, "privileged_context")
    contrasts = args.distillation_weight > 0.0 and args.contrasts
    has_rows = isinstance(train_dataset, Dataset) and "prompt" in train_dataset.column_names
    if contrasts and args.contrastive_source == "dataset" and not has_rows:
        raise ValueError(
            "`contrastive_source='dataset'` draws other questions by row, which needs a `datasets.Dataset` with a "
            "`prompt` column. Use `contrastive_source='batch'`."
        )


def check_enough_rows(args: CreditConfig, train_dataset: Any) -> None:
    """There is a row for every question of a generation batch: the sampler drops what does not fill one.

    Raises:
        ValueError: not one batch can be filled, so that training would end before its first step.
    """
    questions = args.generation_batch_size // args.num_generations
    if hasattr(train_dataset, "__len__") and len(train_dataset) < questions:
        raise ValueError(
            f"`train_dataset` has {len(train_dataset)} rows, and a generation batch of {args.generation_batch_size} "
            f"rollouts with `num_generations={args.num_generations}` takes {questions}: not one step could be made. "
            "Give more rows, or lower `gradient_accumulation_steps`, `per_device_train_batch_size` or "
            "`generation_batch_size`."
        )


# What TRL and this trainer pass to a reward function beside the columns of the data.
_PASSED = frozenset(
    "prompts completions completion_ids trainer_state log_extra log_metric environments truncated".split()
)


def check_reward_columns(reward_funcs: Any, train_dataset: Any) -> None:
    """Every parameter that a reward function needs is a column of the training data.

    Raises:
        ValueError: it is not; without this check the first call would fail after a generation.
    """
    columns = getattr(train_dataset, "column_names", None)
    if columns is None:
        return
    for func in reward_funcs if isinstance(reward_funcs, Sequence) else [reward_funcs]:
        if not callable(func) or isinstance(func, nn.Module):
            continue
        if missing := [name for name in _required(func) if name not in columns and name not in _PASSED]:
            name = getattr(func, "__name__", type(func).__name__)
            raise ValueError(
                f"Reward function `{name}` reads the column {', '.join(f'`{m}`' for m in missing)}, which "
                f"`train_dataset` lacks; its columns are {', '.join(columns)}. {_remedy(columns, missing[0])}"
            )


def _remedy(columns: Sequence[str], wanted: str) -> str:
    """What gives the data a column of this name, or the function another name for it."""
    spare = [name for name in columns if name not in ("prompt", "id", "task", "privileged_context")]
    if not spare:
        return f"Add it (dataset.add_column({wanted!r}, [...])), or give the parameter a default."
    return (
        f"Rename the column that holds it (dataset.rename_column({spare[0]!r}, {wanted!r})), name the parameter after "
        "that column, or give it a default."
    )


def _required(func: Callable[..., Any]) -> list[str]:
    """Names of the parameters that have to be passed by keyword and have no default."""
    try:
        parameters = inspect.signature(func).parameters.values()
    except (TypeError, ValueError):  # a callable without a signature says nothing of itself
        return []
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in parameters if p.kind in named and p.default is inspect.Parameter.empty]


_NO_IMAGES = (
    "Prompts with images cannot be contrasted or shown to the teacher: another question's text under this question's "
    "image is neither. Use text-only prompts, or `distillation_weight=0` (GRPO)."
)


def check_no_images(inputs: list[dict[str, Any]]) -> None:
    if any("prompt" in row and has_images(row["prompt"]) for row in inputs):
        raise ValueError(_NO_IMAGES)


def _check_text_column(name: str, dataset: Any, column: str) -> None:
    features = getattr(dataset, "features", None)
    dtype = getattr(features.get(column), "dtype", None) if features else "string"
    if dtype not in ("string", "large_string", "null"):
        raise ValueError(f"`{name}` column `{column}` must hold text, it holds {features[column]}.")
