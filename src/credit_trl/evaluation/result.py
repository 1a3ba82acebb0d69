"""Result of an evaluation: per-prompt scores and the statistics over them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from credit_trl.evaluation.statistics import Interval, bootstrap_ci, pass_at_k
from credit_trl.evaluation.verdicts import Sample
from credit_trl.rollout.batch import is_successful
from credit_trl.tasks.escaping import pluralized, printable


@dataclass(frozen=True)
class PromptScore:
    """Scores of one prompt's k samples."""

    id: str
    group: str | None  # such as its task; None if the rows have no groups
    score: float  # mean reward
    successes: int  # number of samples whose reward reaches 1
    metrics: Mapping[str, float]  # means of the verdicts' metrics


@dataclass(frozen=True)
class Evaluation:
    """Result of evaluating one model on one task."""

    task: str
    model: str
    settings: Mapping[str, Any]  # those that determine the samples
    k: int  # samples per prompt
    prompts: Sequence[PromptScore]  # in the order of the rows
    score: float  # avg@k
    low: float  # of its 95 % bootstrap interval over prompts
    high: float
    pass_at: Mapping[int, float]  # unbiased pass@j by j, for the powers of two up to k, and k
    mean_length: float  # tokens of a completion
    truncated: float  # fraction of completions that reached the length limit
    metrics: Mapping[str, float]  # means of the verdicts' metrics over the samples that have them
    groups: Mapping[str, Interval]  # avg@k and its interval by group, if there are several
    group_metrics: Mapping[str, Mapping[str, float]]  # `metrics` by group
    greedy: bool  # whether decoding was greedy, so that the k samples of a prompt are equal

    def to_dict(self) -> dict[str, Any]:
        """Content of `result.json`."""
        return asdict(self) | {"groups": {name: interval._asdict() for name, interval in self.groups.items()}}

    def log_metrics(self) -> dict[str, float]:
        """Metrics for a trainer's log, without those that are undefined, such as the interval of a single prompt."""
        logs = {
            f"eval_avg@{self.k}": self.score,
            "eval_greedy": 1.0 if self.greedy else math.nan,
            f"eval_avg@{self.k}_low": self.low,
            f"eval_avg@{self.k}_high": self.high,
            f"eval_pass@{self.k}": self.pass_at[self.k],
            "eval_mean_length": self.mean_length,
            "eval_truncated": self.truncated,
            **{f"eval_{name}": value for name, value in self.metrics.items()},
            **{f"eval_{name}/avg@{self.k}": interval.mean for name, interval in self.groups.items()},
        }
        return {name: value for name, value in logs.items() if not math.isnan(value)}

    def __str__(self) -> str:
        sizes = f"{pluralized(len(self.prompts), 'prompt')} × {pluralized(self.k, 'sample')}"
        lines = [
            f"{self.task}: {self.model}, {sizes}",
            f"  {score_text(vars(self))}",
            *(f"  {f'pass@{k}':<10}{100 * value:5.1f} %" for k, value in self.pass_at.items() if k > 1),
        ]
        for name, interval in self.groups.items():
            bounds = _bounds(interval.low, interval.high)
            lines.append(f"  {printable(name):<18}{100 * interval.mean:5.1f} %  {bounds}")
        lines.append(f"  length {self.mean_length:.1f} tokens, {100 * self.truncated:.1f} % truncated")
        return "\n".join(lines)


def summarize(
    samples: Sequence[Sample], model: str, settings: Mapping[str, Any], groups: Mapping[str, str | None]
) -> Evaluation:
    """Compute the result of graded samples.

    Args:
        samples: k per prompt, prompts contiguous.
        model, settings: as in [`Evaluation`]; `settings` has `task`, `k` and `temperature`.
        groups: group by prompt id.
    """
    k = settings["k"]
    prompts = []
    for start in range(0, len(samples), k):
        prompt_samples = samples[start : start + k]
        rewards = [sample.reward for sample in prompt_samples]
        successes = sum(is_successful(rewards, 1.0))
        name = prompt_samples[0].prompt
        prompts.append(
            PromptScore(name, groups[name], float(np.mean(rewards)), successes, _metric_means(prompt_samples))
        )
    mean, low, high = bootstrap_ci([prompt.score for prompt in prompts])
    names = sorted({group for group in groups.values() if group is not None})
    scores = {name: [p.score for p in prompts if p.group == name] for name in names if len(names) > 1}
    return Evaluation(
        task=settings["task"],
        model=model,
        settings=dict(settings),
        k=k,
        prompts=prompts,
        score=mean,
        low=low,
        high=high,
        pass_at={
            j: float(pass_at_k([prompt.successes for prompt in prompts], k, j).mean())
            for j in sorted({2**e for e in range(k.bit_length())} | {k})
        },
        mean_length=float(np.mean([s.length for s in samples])),
        truncated=float(np.mean([s.truncated for s in samples])),
        metrics=_metric_means(samples),
        groups={name: bootstrap_ci(values) for name, values in scores.items()},
        group_metrics={name: _metric_means([s for s in samples if groups[s.prompt] == name]) for name in scores},
        greedy=settings["temperature"] == 0.0,
    )


def score_text(result: Mapping[str, Any]) -> str:
    """avg@k with its interval in percent, and whether decoding was greedy, of the fields of an [`Evaluation`]."""
    name = f"avg@{result['k']}"
    decoding = "greedy  " if result.get("greedy") else ""
    bounds = _bounds(result["low"], result["high"])
    return f"{name:<10}{100 * result['score']:5.1f} %  {decoding}95 % CI {bounds}"


def _bounds(low: float | None, high: float | None) -> str:
    """`[12.5, 40.0]` in percent; a single prompt has no interval."""
    is_known = low is not None and high is not None and not math.isnan(low)
    return f"[{100 * low:.1f}, {100 * high:.1f}]" if is_known else "needs at least two prompts"


def _metric_means(samples: Sequence[Sample]) -> dict[str, float]:
    names = sorted({name for sample in samples for name in sample.metrics})
    return {name: float(np.mean([s.metrics[name] for s in samples if name in s.metrics])) for name in names}
