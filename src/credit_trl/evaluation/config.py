"""Settings of an evaluation: how completions are sampled, which rows are used and what is reported."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from credit_trl.mistakes import refuse_unknown
from credit_trl.rollout.verdict import VerifierPolicy

if TYPE_CHECKING:
    from datasets import Dataset

# What holds for the options, and their names.
RANGES: dict[str, tuple[Callable[[Any], bool], tuple[str, ...]]] = {
    "at least 0": (lambda value: 0 <= value < math.inf, ("temperature", "top_k")),
    "in (0, 1]": (lambda value: 0.0 < value <= 1.0, ("top_p",)),
    "at least 1": (lambda value: value >= 1, ("max_completion_length", "k", "max_prompts", "batch_size")),
    "'transformers' or 'vllm'": (lambda value: value in ("transformers", "vllm"), ("engine",)),
}


@dataclass(frozen=True)
class SamplingConfig:
    """Sampling settings; the defaults are the paper's evaluation settings.

    Raises:
        ValueError: a value is out of range.
    """

    temperature: float = 0.6  # of the softmax; 0 is greedy decoding
    top_p: float = 0.95  # probability mass of the nucleus, in (0, 1]
    top_k: int = 0  # number of most likely tokens to sample from; 0 for no limit
    max_completion_length: int = 4096  # tokens, end of turn included
    seed: int = 0  # base seed of the samples' random streams

    def __post_init__(self) -> None:
        for words, (holds, names) in RANGES.items():
            for name in names:
                value = getattr(self, name, None)
                if value is None and (name in ("max_prompts", "batch_size") or not hasattr(self, name)):
                    continue
                if value is None or (isinstance(value, str) and name != "engine") or not holds(value):
                    raise ValueError(f"`{name}` must be {words}, got {value!r}.")


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig(SamplingConfig):
    """Options of `evaluate`, besides the model and the task.

    Args:
        k: samples per prompt.
        split, path: arguments of `Task.build`.
        dataset: rows to use instead of `Task.build`, with the same columns.
        max_prompts: use only the first rows; None for all.
        group_by: column by whose values scores are also reported; by default `task`, if there are several tasks.
        tokenizer: required if the model is a `PreTrainedModel`.
        engine: `"transformers"` or `"vllm"`, for a model given by name.
        engine_options: arguments of the engine, such as `{"chat_template_kwargs": {"enable_thinking": False}}`.
        batch_size: completions generated per batch; None for the engine's default.
        output_dir: directory of settings, samples and result, from which an interrupted evaluation continues; None
            writes no files.
        policy: error and timeout policy for the verifier; by default errors are raised and there is no timeout.
        progress: show a progress bar.

    Raises:
        ValueError: a value is out of range.
    """

    k: int = 16
    split: str = "test"
    path: str | Path | None = None
    dataset: Dataset | Sequence[Mapping[str, Any]] | None = None
    max_prompts: int | None = None
    group_by: str | None = None
    tokenizer: Any = None
    engine: str = "transformers"
    engine_options: Mapping[str, Any] | None = None
    batch_size: int | None = None
    output_dir: str | Path | None = None
    policy: VerifierPolicy | None = None
    progress: bool = True


def evaluation_config(owner: str, **options: Any) -> EvaluationConfig:
    """Options of `owner`, which the error of an unknown one names with its remedy."""
    refuse_unknown(owner, "option", options, [option.name for option in fields(EvaluationConfig)])
    return EvaluationConfig(**options)
