"""What an evaluation found: per-prompt scores, and the figures made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from credit_trl.evaluation.samples import Sample
from credit_trl.evaluation.statistics import N_RESAMPLES, Interval, bootstrap_ci, majority_at_k, pass_at_k
from credit_trl.tasks.printable import printable


@dataclass(frozen=True)
class PromptScore:
    """One prompt's k samples.

    Args:
        id: the prompt's.
        group: the stratum it belongs to, such as its task; None where there is one only.
        score: mean reward.
        successes: samples whose reward reaches the threshold of success.
        majority: maj@k, None where answers cannot be read off the samples.
        metrics: means of the verdicts' further numbers.
    """

    id: str
    group: str | None
    score: float
    successes: int
    majority: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluation:
    """One model on one task.

    Args:
        task, model: names.
        settings: everything that decides the samples.
        k: samples a prompt.
        prompts: per-prompt scores, in the task's order.
        score, low, high: avg@k and its 95 % bootstrap interval over prompts.
        pass_at: unbiased pass@j for the powers of two up to k, and k.
        majority: maj@k, None where answers cannot be read off the samples.
        mean_length: tokens an answer.
        truncated: share of answers cut at the length limit.
        metrics: means of the verdicts' further numbers, over the samples that carry them.
        groups: avg@k with its interval by stratum, where there is more than one.
        group_metrics: `metrics` by stratum.
    """

    task: str
    model: str
    settings: Mapping[str, Any]
    k: int
    prompts: Sequence[PromptScore]
    score: float
    low: float
    high: float
    pass_at: Mapping[int, float]
    majority: float | None
    mean_length: float
    truncated: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    groups: Mapping[str, Interval] = field(default_factory=dict)
    group_metrics: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def per_prompt_scores(self) -> list[float]:
        """(n,) for `bootstrap_ci` and `paired_bootstrap`."""
        return [prompt.score for prompt in self.prompts]

    def to_dict(self) -> dict[str, Any]:
        """For JSON; `from_dict` reads it back."""
        fields = asdict(self)
        fields["pass_at"] = {str(k): value for k, value in self.pass_at.items()}
        fields["groups"] = {name: interval._asdict() for name, interval in self.groups.items()}
        return fields

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Evaluation:
        fields = dict(fields)
        fields["prompts"] = [PromptScore(**prompt) for prompt in fields["prompts"]]
        fields["pass_at"] = {int(k): value for k, value in fields["pass_at"].items()}
        fields["groups"] = {name: _interval(bounds) for name, bounds in fields["groups"].items()}
        fields["low"], fields["high"] = _interval({"mean": 0.0, **fields})[1:]
        return cls(**fields)

    def log_metrics(self) -> dict[str, float]:
        """Flat numbers for a trainer's log."""
        logs = {
            f"eval_avg@{self.k}": self.score,
            f"eval_avg@{self.k}_low": self.low,
            f"eval_avg@{self.k}_high": self.high,
            f"eval_pass@{self.k}": self.pass_at[self.k],
            "eval_mean_length": self.mean_length,
            "eval_truncated": self.truncated,
            **{f"eval_{name}": value for name, value in self.metrics.items()},
            **{f"eval_{name}/avg@{self.k}": interval.mean for name, interval in self.groups.items()},
        }
        return logs if self.majority is None else {**logs, f"eval_maj@{self.k}": self.majority}

    def __str__(self) -> str:
        lines = [
            f"{self.task}: {self.model}, {len(self.prompts)} prompts × {self.k} samples",
            f"  avg@{self.k}    {100 * self.score:5.1f} %  95 % CI [{100 * self.low:.1f}, {100 * self.high:.1f}]",
            *(f"  pass@{k:<4}  {100 * value:5.1f} %" for k, value in self.pass_at.items() if k > 1),
        ]
        if self.majority is not None:
            lines.append(f"  maj@{self.k}    {100 * self.majority:5.1f} %")
        for name, interval in self.groups.items():
            low, high = 100 * interval.low, 100 * interval.high
            lines.append(f"  {printable(name):<18}{100 * interval.mean:5.1f} %  [{low:.1f}, {high:.1f}]")
        lines.append(f"  length {self.mean_length:.1f} tokens, {100 * self.truncated:.1f} % truncated")
        return "\n".join(lines)


def summarize(
    samples: Sequence[Sample],
    *,
    task: str,
    model: str,
    settings: Mapping[str, Any],
    k: int,
    golds: Mapping[str, str] | None,
    groups: Mapping[str, str | None],
    success_threshold: float,
    n_resamples: int = N_RESAMPLES,
) -> Evaluation:
    """Make the figures of graded samples.

    Args:
        samples: k of each prompt, prompt after prompt.
        task, model, settings, k: as in `Evaluation`.
        golds: prompt id → gold answer, to compare `Sample.answer` with; None for no maj@k.
        groups: prompt id → stratum.
        success_threshold: reward from which a sample counts as a success in pass@k.
        n_resamples: of the intervals.
    """
    prompts = []
    for start in range(0, len(samples), k):
        mine = samples[start : start + k]
        name = mine[0].prompt
        prompts.append(
            PromptScore(
                id=name,
                group=groups[name],
                score=float(np.mean([s.reward for s in mine])),
                successes=sum(s.reward >= success_threshold for s in mine),
                majority=None if golds is None else majority_at_k([s.answer for s in mine], golds[name]),
                metrics=_metric_means(mine),
            )
        )
    scores = [prompt.score for prompt in prompts]
    mean, low, high = bootstrap_ci(scores, n_resamples)
    successes = [prompt.successes for prompt in prompts]
    strata = sorted({group for group in groups.values() if group is not None})
    strata = strata if len(strata) > 1 else []
    return Evaluation(
        task=task,
        model=model,
        settings=dict(settings),
        k=k,
        prompts=prompts,
        score=mean,
        low=low,
        high=high,
        pass_at={j: float(pass_at_k(successes, k, j).mean()) for j in _powers(k)},
        majority=None if golds is None else float(np.mean([prompt.majority for prompt in prompts])),
        mean_length=float(np.mean([s.length for s in samples])),
        truncated=float(np.mean([s.truncated for s in samples])),
        metrics=_metric_means(samples),
        groups={g: bootstrap_ci([p.score for p in prompts if p.group == g], n_resamples) for g in strata},
        group_metrics={g: _metric_means([s for s in samples if groups[s.prompt] == g]) for g in strata},
    )


def _interval(bounds: Mapping[str, Any]) -> Interval:
    """JSON has no NaN: null bounds are those of a single prompt."""
    return Interval(*(float("nan") if bounds[name] is None else bounds[name] for name in ("mean", "low", "high")))


def _powers(k: int) -> list[int]:
    return sorted({2**e for e in range(k.bit_length()) if 2**e <= k} | {k})


def _metric_means(samples: Sequence[Sample]) -> dict[str, float]:
    names = sorted({name for sample in samples for name in sample.metrics})
    return {name: float(np.mean([s.metrics[name] for s in samples if name in s.metrics])) for name in names}
