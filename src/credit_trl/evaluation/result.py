"""Result of an evaluation: per-prompt scores and the statistics over them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pandas import DataFrame, Series

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
            f"avg@{self.k}": self.score,
            "greedy": 1.0 if self.greedy else math.nan,
            f"avg@{self.k}_low": self.low,
            f"avg@{self.k}_high": self.high,
            f"pass@{self.k}": self.pass_at[self.k],
            "mean_length": self.mean_length,
            "truncated": self.truncated,
            **self.metrics,
        }
        for name, interval in self.groups.items():
            logs[f"{name}/avg@{self.k}"] = interval.mean
        return Series(logs).add_prefix("eval_").dropna().to_dict()

    def __str__(self) -> str:
        prompts = pluralized(len(self.prompts), "prompt")
        samples = pluralized(self.k, "sample")
        lines = [f"{self.task}: {self.model}, {prompts} × {samples}", f"  {score_text(vars(self))}"]
        for k, value in self.pass_at.items():
            if k > 1:
                lines.append(f"  {f'pass@{k}':<10}{100 * value:5.1f} %")
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
    table = DataFrame(list(map(vars, samples)))
    table["success"] = is_successful(table["reward"], 1.0)
    metrics = DataFrame(table["metrics"].tolist(), index=table["prompt"]).sort_index(axis=1)
    grouped = table.groupby("prompt", sort=False)
    by_prompt = grouped.agg(score=("reward", "mean"), successes=("success", "sum"))
    prompts = []
    for name, score, successes in by_prompt.itertuples():
        prompts.append(PromptScore(name, groups[name], score, successes, _means(metrics.loc[[name]])))
    pass_at = {}
    for power in range(k.bit_length() + 1):
        j = min(2**power, k)
        pass_at[j] = float(pass_at_k(by_prompt["successes"], k, j).mean())
    intervals = {}
    group_metrics = {}
    by_group = by_prompt["score"].groupby(by_prompt.index.map(groups))
    for name, scores in by_group if by_group.ngroups > 1 else ():
        intervals[name] = bootstrap_ci(scores)
        group_metrics[name] = _means(metrics.loc[scores.index])
    mean, low, high = bootstrap_ci(by_prompt["score"])
    return Evaluation(
        task=settings["task"],
        model=model,
        settings=dict(settings),
        k=k,
        prompts=prompts,
        score=mean,
        low=low,
        high=high,
        pass_at=pass_at,
        mean_length=float(table["length"].mean()),
        truncated=float(table["truncated"].mean()),
        metrics=_means(metrics),
        groups=intervals,
        group_metrics=group_metrics,
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


def _means(metrics: DataFrame) -> dict[str, float]:
    """Means over the samples that have a metric."""
    return metrics.mean().dropna().to_dict()
