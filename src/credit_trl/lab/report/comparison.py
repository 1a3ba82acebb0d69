"""Scores of arms with intervals, their paired differences from the first arm, and what their training took."""

import json
import logging
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from credit_trl.evaluation.statistics import bootstrap_ci, holm, paired_bootstrap
from credit_trl.lab.report.runs import SCORE, Run

logger = logging.getLogger(__name__)

# Title and name in the log, or of an evaluation.
CURVES = {
    "avg@k of the evaluations": SCORE,
    "Reward of the rollouts": "reward",
    "Response length (tokens)": "completions/mean_length",
    "S_t, mean (nats)": "credit/s_mean",
    "ΔV_t, mean (nats)": "credit/delta_v_mean",
    "R_t, mean (nats)": "credit/advantage_mean",
    "Fidelity of the teacher (nats)": "credit/teacher_fidelity",
    "Entropy of the policy (nats)": "entropy",
}
SETTINGS = ("data", "verifier", "k", "temperature", "top_p", "top_k", "max_completion_length")  # of an evaluation
SECONDS = "credit/seconds_"  # beginning of the names of the seconds by stage


def curves(arms: Mapping[str, Sequence[Run]]) -> list[dict[str, Any]]:
    """Learning curves: `{title, series: [{arm, points: [[step, mean, low, high], …]}]}`, arms by their index.

    The band of avg@k of one run is its 95 % interval over prompts. That of several runs reaches from the lowest to the
    highest of them, at the steps that all of them have.
    """
    figures = []
    for title, name in CURVES.items():
        series = []
        for i, runs in enumerate(arms.values()):
            points = _points(name, runs)
            if points:
                series.append({"arm": i, "points": points})
        if series:
            figures.append({"title": title, "series": series})
    return figures


def training_table(arms: Mapping[str, Sequence[Run]]) -> list[dict[str, Any]]:
    """The columns of the paper's Table 2, and S_t: one row for each arm, means over its runs.

    A row has `arm`, `contrasts` (C; 0 for SDPO), `score` (avg@k of the last evaluation), `train_score` (the largest
    logged reward), `seconds` (of an optimizer step), `ratio` (to the first arm), `s_mean` and `s_std` (of S_t in nats,
    over the run). Missing values are None.
    """
    rows = []
    for arm, runs in arms.items():
        row: dict[str, Any] = {"arm": arm, "contrasts": _contrasts(runs[0])}
        row["score"] = _mean([run.evaluations[-1]["score"] for run in runs if run.evaluations])
        row["train_score"] = _mean([max(run.series("reward").values(), default=None) for run in runs])
        row["seconds"] = _mean([run.mean_over_steps(SECONDS) for run in runs])
        baseline = (rows or [row])[0]["seconds"]
        row["ratio"] = row["seconds"] / baseline if row["seconds"] and baseline else None
        row["s_mean"] = _mean([run.mean_over_steps(CURVES["S_t, mean (nats)"]) for run in runs])
        row["s_std"] = _mean([run.mean_over_steps("credit/s_std") for run in runs])
        rows.append(row)
    return rows


def _contrasts(run: Run) -> int | None:
    """C of a run; 0 without a contrast, None without distillation or where the options are unknown."""
    options = run.options
    if "contrastive_count" not in options or not options.get("distillation_weight"):
        return None
    return options["contrastive_count"] if options["contrastive_coef"] else 0


def _mean(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return float(np.mean(numbers)) if numbers else None


def _points(name: str, runs: Sequence[Run]) -> list[list[float | None]]:
    if name == SCORE and len(runs) == 1:
        return [[row["step"], row["score"], row.get("low"), row.get("high")] for row in runs[0].evaluations]
    values = [run.series(name) for run in runs]
    points: list[list[float | None]] = []
    for step in sorted(set.intersection(*map(set, values))):
        step_values = [series[step] for series in values]
        if len(runs) == 1:
            points.append([step, step_values[0], None, None])
        else:
            points.append([step, float(np.mean(step_values)), min(step_values), max(step_values)])
    return points


def compare_arms(arms: Mapping[str, Sequence[Run]]) -> list[dict[str, Any]]:
    """One row for each task and arm: avg@k of the last evaluation, and its difference from the task's first arm.

    Scores are compared on the prompts that all last evaluations of the task have. A row has `task`, `arm`, `runs`,
    `prompts`, `k`, `greedy`, `step`, `before` (avg@k at step 0), `score`, `low`, `high`, `best` (the largest of the
    run, biased upwards), and for every arm but the first `difference`, `difference_low`, `difference_high`, `p` and
    `p_holm`. Missing values are None.
    """
    by_task: dict[str, dict[str, list[Run]]] = {}
    for name, runs in arms.items():
        for run in runs:
            if run.evaluations:
                by_task.setdefault(run.task, {}).setdefault(name, []).append(run)
    rows: list[dict[str, Any]] = []
    for task, arms_of_task in by_task.items():
        rows += _compare_on_task(task, arms_of_task)
    return rows


def gain(runs: Sequence[Run], group: str | None = None) -> dict[str, Any] | None:
    """avg@k of the runs of an arm before training and at their last evaluation, paired by prompt and seed.

    It has `before`, `after` with `low` and `high`, `difference` with `difference_low` and `difference_high`, and the
    number of `prompts`. With `group` the prompts are those of it. None where no evaluation is at step 0, or no prompt
    is in all of them; the intervals are None for a single prompt.
    """
    if any(len(run.evaluations) < 2 or run.evaluations[0]["step"] != 0 for run in runs):
        return None
    scores_at_start = [run.scores(0, group) for run in runs]
    final_scores = [run.scores(run.evaluations[-1]["step"], group) for run in runs]
    prompts = _shared_prompts([*scores_at_start, *final_scores])
    if not prompts:
        return None
    scores_before = _matrix(scores_at_start, prompts)
    scores_after = _matrix(final_scores, prompts)
    row: dict[str, Any] = {
        "before": float(scores_before.mean()),
        "after": float(scores_after.mean()),
        "difference": float(scores_after.mean() - scores_before.mean()),
        "prompts": len(prompts),
    }
    row |= dict.fromkeys(("low", "high", "difference_low", "difference_high"))
    if len(prompts) > 1:
        row |= _interval(scores_after)
        difference = paired_bootstrap(scores_after, scores_before, paired_seeds=True)
        bounds = _possible(difference.low, difference.high, -1.0, scores_after, scores_before)
        row |= {"difference_low": bounds.low, "difference_high": bounds.high}
    return row


def _shared_prompts(scores: Sequence[Mapping[str, float]]) -> list[str]:
    shared = []
    for prompt in scores[0]:
        if all(prompt in run_scores for run_scores in scores):
            shared.append(prompt)
    return shared


def _matrix(scores: Sequence[Mapping[str, float]], prompts: Sequence[str]) -> NDArray[np.float64]:
    """Scores of shape (runs, prompts)."""
    rows = []
    for run_scores in scores:
        rows.append([run_scores[prompt] for prompt in prompts])
    return np.array(rows)


class Bounds(NamedTuple):
    """Ends of a 95 % interval."""

    low: float
    high: float


def _possible(low: float, high: float, least: float, *scores: NDArray[np.float64]) -> Bounds:
    """The part of an interval from `least` to 1, where no score lies outside of 0 and 1.

    With two seeds the interval of Student's t reaches far beyond what a mean of such scores can be.
    """
    if any(matrix.min() < 0.0 or matrix.max() > 1.0 for matrix in scores):
        return Bounds(low, high)
    return Bounds(max(low, least), min(high, 1.0))


def _interval(matrix: NDArray[np.float64]) -> dict[str, float]:
    """`low` and `high` of the mean of (runs, prompts): over prompts, and over seeds where there are several."""
    if len(matrix) > 1:
        difference = paired_bootstrap(matrix, np.zeros_like(matrix[0]))
        return _possible(difference.low, difference.high, 0.0, matrix)._asdict()
    interval = bootstrap_ci(matrix[0])
    return {"low": interval.low, "high": interval.high}


def _compare_on_task(task: str, arms: Mapping[str, Sequence[Run]]) -> list[dict[str, Any]]:
    final: dict[str, list[dict[str, float]]] = {}
    for name, runs in arms.items():
        final[name] = [run.scores(run.evaluations[-1]["step"]) for run in runs]
    shared = _shared_prompts(list(chain.from_iterable(final.values())))
    differing = _differing_settings(list(chain.from_iterable(arms.values())))
    if differing:
        names = ", ".join(differing)
        logger.warning(f"The scores of {task} are not comparable: the evaluations differ in {names}.")
    matrices = {name: _matrix(scores, shared) for name, scores in final.items()}
    baseline = next(iter(arms))
    rows = []
    for name, runs in arms.items():
        row = {
            "task": task,
            "arm": name,
            "runs": len(runs),
            "prompts": len(shared),
            **_scores(runs, matrices[name], shared),
        }
        if name != baseline and len(shared) > 1:
            row |= _difference(runs, arms[baseline], matrices[name], matrices[baseline])
        rows.append(row)
    tested = [row for row in rows if row.get("p") is not None]
    p_values = [row["p"] for row in tested]
    for row, adjusted in zip(tested, holm(p_values), strict=True):
        row["p_holm"] = adjusted
    return rows


def _differing_settings(runs: Sequence[Run]) -> list[str]:
    """Settings in which the last evaluations of the runs differ."""
    values: dict[str, set[str]] = {}
    for run in runs:
        settings = run.settings(run.evaluations[-1]["step"])
        for name in SETTINGS:
            if name in settings:
                values.setdefault(name, set()).add(json.dumps(settings[name]))
    return [name for name, texts in values.items() if len(texts) > 1]


def _scores(runs: Sequence[Run], matrix: NDArray[np.float64], shared: Sequence[str]) -> dict[str, Any]:
    """Scores of one arm; `matrix` has shape (runs, shared prompts)."""
    final = [run.evaluations[-1] for run in runs]
    scores = []
    for run in runs:
        scores.append({row["step"]: _score_on(run, row, shared) for row in run.evaluations})
    row: dict[str, Any] = {
        "k": final[0].get("k"),
        "greedy": bool(final[0].get("greedy")),
        "step": max(evaluation["step"] for evaluation in final),
        "before": _mean([run_scores.get(0) for run_scores in scores if len(run_scores) > 1]),
        "score": float(np.mean([evaluation["score"] for evaluation in final])),
        "best": float(np.mean([max(run_scores.values()) for run_scores in scores])),
    }
    if shared:
        row["score"] = float(matrix.mean())
    if len(shared) > 1:
        row |= _interval(matrix)
    return row


def _score_on(run: Run, row: Mapping[str, Any], prompts: Sequence[str]) -> float:
    """Score of an evaluation on these prompts, or on all of its own where the results of one are missing."""
    scores = run.scores(row["step"])
    is_known = len(prompts) > 0 and all(prompt in scores for prompt in prompts)
    return float(np.mean([scores[prompt] for prompt in prompts])) if is_known else row["score"]


def _difference(
    runs: Sequence[Run], base_runs: Sequence[Run], scores: NDArray[np.float64], base_scores: NDArray[np.float64]
) -> dict[str, Any]:
    """Difference of an arm from the first one, paired by prompt, and by seed where both have the same seeds."""
    seeds = [run.seed for run in runs]
    base_seeds = [run.seed for run in base_runs]
    is_distinct = None not in seeds and len(set(seeds)) == len(seeds) == len(base_seeds)
    is_paired = is_distinct and set(seeds) == set(base_seeds)
    if is_paired:
        base_scores = base_scores[[base_seeds.index(seed) for seed in seeds]]
    statistics = paired_bootstrap(scores, base_scores, paired_seeds=is_paired)
    bounds = _possible(statistics.low, statistics.high, -1.0, scores, base_scores)
    return {
        "difference": statistics.difference,
        "difference_low": bounds.low,
        "difference_high": bounds.high,
        "p": statistics.p_value,
    }
