"""Scores of arms with intervals, their paired differences from the first arm, and what their training took."""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pandas import DataFrame, Index, Series, concat

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
    means = DataFrame({arm: DataFrame(map(_measured, runs)).mean() for arm, runs in arms.items()}).T
    means["ratio"] = means["seconds"] / means["seconds"].iloc[0]
    rows = []
    for arm, values in means.iterrows():
        row = {"arm": arm, "contrasts": _contrasts(arms[arm][0])}
        for name, value in values.items():
            row[name] = value if math.isfinite(value) else None
        rows.append(row)
    return rows


def _measured(run: Run) -> dict[str, float]:
    """Means of one run, NaN where they are missing."""
    return {
        "score": run.final["score"] if run.evaluations else math.nan,
        "train_score": run.series("reward").max(),
        "seconds": run.mean_over_steps(SECONDS),
        "s_mean": run.mean_over_steps(CURVES["S_t, mean (nats)"]),
        "s_std": run.mean_over_steps("credit/s_std"),
    }


def _contrasts(run: Run) -> int | None:
    """C of a run; 0 without a contrast, None without distillation or where the options are unknown."""
    options = run.options
    if "contrastive_count" not in options or not options.get("distillation_weight"):
        return None
    return options["contrastive_count"] if options["contrastive_coef"] else 0


def _points(name: str, runs: Sequence[Run]) -> list[list[float | None]]:
    if name == SCORE and len(runs) == 1:
        return [[row["step"], row["score"], row.get("low"), row.get("high")] for row in runs[0].evaluations]
    points: list[list[float | None]] = []
    for step, values in _shared([run.series(name) for run in runs]).sort_index().iterrows():
        low, high = (values.min(), values.max()) if len(runs) > 1 else (None, None)
        points.append([int(step), values.mean(), low, high])
    return points


def _shared(columns: Sequence[Series]) -> DataFrame:
    """A column for each series, with the rows that all of them have, in the order of the first."""
    return concat(columns, axis=1, join="inner")


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
    at_start = []
    at_end = []
    for run in runs:
        if len(run.evaluations) < 2 or run.evaluations[0]["step"] != 0:
            return None
        at_start.append(run.scores(0, group))
        at_end.append(run.final_scores(group))
    scores = _shared([*at_start, *at_end]).to_numpy()
    if not len(scores):
        return None
    scores_before, scores_after = np.split(scores.T, 2)
    row: dict[str, Any] = {
        "before": float(scores_before.mean()),
        "after": float(scores_after.mean()),
        "difference": float(scores_after.mean() - scores_before.mean()),
        "prompts": len(scores),
    }
    row |= dict.fromkeys(("low", "high", "difference_low", "difference_high"))
    if len(scores) > 1:
        row |= _interval(scores_after)
        difference = paired_bootstrap(scores_after, scores_before, paired_seeds=True)
        bounds = _possible(difference.low, difference.high, -1.0, scores_after, scores_before)
        row |= {"difference_low": bounds.low, "difference_high": bounds.high}
    return row


class Bounds(NamedTuple):
    """Ends of a 95 % interval."""

    low: float
    high: float


def _possible(low: float, high: float, least: float, *scores: NDArray[np.float64]) -> Bounds:
    """The part of an interval from `least` to 1, where no score lies outside of 0 and 1.

    With two seeds the interval of Student's t reaches far beyond what a mean of such scores can be.
    """
    joined = np.concatenate(scores, axis=None)
    if joined.min() < 0.0 or joined.max() > 1.0:
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
    all_runs = list(chain.from_iterable(arms.values()))
    differing = _differing_settings(all_runs)
    if differing:
        names = ", ".join(differing)
        logger.warning(f"The scores of {task} are not comparable: the evaluations differ in {names}.")
    shared = _shared([run.final_scores() for run in all_runs])
    remaining = iter(shared.to_numpy().T)
    baseline = next(iter(arms))
    matrices: dict[str, NDArray[np.float64]] = {}
    rows = []
    for name, runs in arms.items():
        matrices[name] = np.array(list(islice(remaining, len(runs))))
        row = {"task": task, "arm": name, "runs": len(runs), "prompts": len(shared)}
        row |= _scores(runs, matrices[name], shared.index)
        if name != baseline and len(shared) > 1:
            row |= _difference(runs, arms[baseline], matrices[name], matrices[baseline])
        rows.append(row)
    tested = [row for row in rows if "p" in row]
    p_values = [row["p"] for row in tested]
    for row, adjusted in zip(tested, holm(p_values), strict=True):
        row["p_holm"] = adjusted
    return rows


def _differing_settings(runs: Sequence[Run]) -> list[str]:
    """Settings in which the last evaluations of the runs differ."""
    values: dict[str, set[str]] = {}
    for run in runs:
        settings = run.settings(run.final["step"])
        for name in SETTINGS:
            if name in settings:
                values.setdefault(name, set()).add(json.dumps(settings[name]))
    return [name for name, texts in values.items() if len(texts) > 1]


def _scores(runs: Sequence[Run], matrix: NDArray[np.float64], shared: Index) -> dict[str, Any]:
    """Scores of one arm; `matrix` has shape (runs, shared prompts)."""
    final = DataFrame([run.final for run in runs])
    scores = concat([_scores_on(run, shared) for run in runs], axis=1)
    at_start = scores.reindex([0]).loc[0]
    before = at_start[scores.count() > 1].mean()
    row: dict[str, Any] = {
        "k": runs[0].final.get("k"),
        "greedy": bool(runs[0].final.get("greedy")),
        "step": int(final["step"].max()),
        "before": None if math.isnan(before) else float(before),
        "score": float(final["score"].mean()),
        "best": float(scores.max().mean()),
    }
    if len(shared):
        row["score"] = float(matrix.mean())
    if len(shared) > 1:
        row |= _interval(matrix)
    return row


def _scores_on(run: Run, prompts: Index) -> Series:
    """Score of each evaluation by step: on these prompts, or on all of its own where the result of one is missing."""
    means = run.series(SCORE)
    for step in means.index:
        scores = run.scores(step).reindex(prompts)
        if len(prompts) and scores.notna().all():
            means[step] = scores.mean()
    return means


def _difference(
    runs: Sequence[Run], base_runs: Sequence[Run], scores: NDArray[np.float64], base_scores: NDArray[np.float64]
) -> dict[str, Any]:
    """Difference of an arm from the first one, paired by prompt, and by seed where both have the same seeds."""
    seeds = [run.seed for run in runs]
    row_of_seed = {run.seed: base_scores[i] for i, run in enumerate(base_runs)}
    is_distinct = len({*seeds} - {None}) == len(seeds) == len(base_runs)
    is_paired = is_distinct and set(seeds) == row_of_seed.keys()
    if is_paired:
        base_scores = np.array([row_of_seed[seed] for seed in seeds])
    statistics = paired_bootstrap(scores, base_scores, paired_seeds=is_paired)
    bounds = _possible(statistics.low, statistics.high, -1.0, scores, base_scores)
    return {
        "difference": statistics.difference,
        "difference_low": bounds.low,
        "difference_high": bounds.high,
        "p": statistics.p_value,
    }
