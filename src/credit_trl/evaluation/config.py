"""Settings of an evaluation: how completions are sampled, which rows are used and what is reported."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from credit_trl.evaluation.statistics import N_RESAMPLES
from credit_trl.rollout.verdict import VerifierPolicy

if TYPE_CHECKING:
    from datasets import Dataset

ENGINES = ("transformers", "vllm")


@dataclass(frozen=True)
class SamplingConfig:
    """Sampling settings; the defaults are the paper's evaluation settings.

    Args:
        temperature: softmax temperature; 0 is greedy decoding.
        top_p: probability mass of the nucleus, in (0, 1].
        top_k: number of most likely tokens to sample from; 0 for no limit.
        max_completion_length: maximum tokens of a completion, end of turn included.
        seed: base seed of the samples' random streams.

    Raises:
        ValueError: a value is out of range.
    """

    temperature: float = 0.6
    top_p: float = 0.95
    top_k: int = 0
    max_completion_length: int = 4096
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < math.inf:
            raise ValueError(f"`temperature` must be at least 0, got {self.temperature}.")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"`top_p` must be in (0, 1], got {self.top_p}.")
        if self.top_k < 0:
            raise ValueError(f"`top_k` must be at least 0 (0: no limit), got {self.top_k}.")
        if self.max_completion_length < 1:
            raise ValueError(f"`max_completion_length` must be at least 1, got {self.max_completion_length}.")


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
        success_threshold: reward from which a sample is a success in pass@k.
        answer_of: extracts the answer from a completion, for maj@k, which compares it as text with the column
            `answer`; by default the text between `<answer>` tags, if all gold answers are single capital letters.
        policy: error and timeout policy for the verifier; by default errors are raised and there is no timeout.
        n_resamples: bootstrap resamples of the intervals.
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
    success_threshold: float = 1.0
    answer_of: Callable[[str], str | None] | None = None
    policy: VerifierPolicy | None = None
    n_resamples: int = N_RESAMPLES
    progress: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("k", "max_prompts", "batch_size", "n_resamples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"`{name}` must be at least 1, got {value}.")
        if self.engine not in ENGINES:
            raise ValueError(f"`engine` must be 'transformers' or 'vllm', got {self.engine!r}.")

    @classmethod
    def from_options(cls, options: Mapping[str, Any], others: Sequence[str] = ()) -> EvaluationConfig:
        """Build the settings from keyword arguments.

        `others` are names that the caller takes itself, for the message.
        """
        known = [field.name for field in fields(cls)]
        for name in options:
            if name not in known:
                close = difflib.get_close_matches(name, [*known, *others], n=1)
                suggestion = f"; did you mean `{close[0]}`?" if close else "."
                raise TypeError(f"Unknown option `{name}`{suggestion} Options: {', '.join([*known, *others])}.")
        return cls(**options)
