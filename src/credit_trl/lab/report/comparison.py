"""Scores of arms with intervals, their paired differences from the first arm, and what their training took."""

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

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
        series = [{"arm": i, "points": _points(name, runs)} for i, runs in enumerate(arms.values())]
        series = [line for line in series if line["points"]]
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
    steps = sorted(set.intersection(*map(set, values)))
    of_step = {step: [series[step] for series in values] for step in steps}
    if len(runs) == 1:
        return [[step, step_values[0], None, None] for step, step_values in of_step.items()]
    return [
        [step, float(np.mean(step_values)), min(step_values), max(step_values)]
        for step, step_values in of_step.items()
    ]


def compare_arms(arms: Mapping[str, Sequence[Run]]) -> list[dict[str, Any]]:
    """One row for each task and arm: avg@k of the last evaluation, and its difference from the task's first arm.

    Scores are compared on the prompts that all last evaluations of the task have. A row has `task`, `arm`, `runs`,
    `prompts`, `k`, `greedy`, `step`, `before` (avg@k at step 0), `score`, `low`, `high`, `best` (the largest of the
    run, biased upwards), and for every arm but the first `difference`, `difference_low`, `difference_high`, `p` and
    `p_holm`. Missing values are None.
    """
    rows: list[dict[str, Any]] = []
    tasks = dict.fromkeys(run.task for runs in arms.values() for run in runs if run.evaluations)
    for task in tasks:
        evaluated = {
            name: [run for run in runs if run.evaluations and run.task == task] for name, runs in arms.items()
        }
        rows += _compare_on_task(task, {name: runs for name, runs in evaluated.items() if runs})
    return rows


def _compare_on_task(task: str, arms: Mapping[str, Sequence[Run]]) -> list[dict[str, Any]]:
    final = {name: [run.scores(run.evaluations[-1]["step"]) for run in runs] for name, runs in arms.items()}
    of_runs = [scores for of_arm in final.values() for scores in of_arm]
    shared = [prompt for prompt in of_runs[0] if all(prompt in scores for scores in of_runs)]
    settings = [run.settings(run.evaluations[-1]["step"]) for runs in arms.values() for run in runs]
    differing = [
        name for name in SETTINGS if len({json.dumps(setting[name]) for setting in settings if name in setting}) > 1
    ]
    if differing:
        names = ", ".join(differing)
        logger.warning(f"The scores of {task} are not comparable: the evaluations differ in {names}.")
    matrices = {name: np.array([[s[i] for i in shared] for s in scores]) for name, scores in final.items()}
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
    for row, adjusted in zip(tested, holm([row["p"] for row in tested]) if tested else (), strict=True):
        row["p_holm"] = adjusted
    return rows


def _scores(runs: Sequence[Run], matrix: NDArray[np.float64], shared: Sequence[str]) -> dict[str, Any]:
    """Scores of one arm; `matrix` has shape (runs, shared prompts)."""
    final = [run.evaluations[-1] for run in runs]
    scores = [{row["step"]: _score_on(run, row, shared) for row in run.evaluations} for run in runs]
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
        # over prompts, and over seeds where there are several
        several = len(matrix) > 1
        interval = paired_bootstrap(matrix, np.zeros_like(matrix[0])) if several else bootstrap_ci(matrix[0])
        row |= {"low": interval.low, "high": interval.high}
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
    return dict(zip(("difference", "difference_low", "difference_high", "p"), statistics, strict=True))
