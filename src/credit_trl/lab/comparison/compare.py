"""Compares arms on the same prompts: scores with intervals, paired differences, steps to a score, learning curves."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from credit_trl.evaluation.statistics import UNBOUNDED, Difference, Interval, holm, paired_bootstrap, two_level_ci
from credit_trl.lab.comparison.runs import SCORE, Run, differing, differing_settings, find_runs, has_one_base
from credit_trl.tasks.printable import printable
from credit_trl.training.run_directory import RESULT_FILE, RUN_FILE

BASE = "Base"
BEST, FINAL = "best", "final"
# With fewer runs of an arm than this, but more than one, the spread between seeds gives no useful interval: a 95 %
# interval from two seeds is about nine times as wide as from many. The seeds are shown as points instead.
MIN_SEEDS = 3
# Error of a mean of equal scores, below which it reaches a target.
_ROUNDING = 1e-9

# Panels of the paper's dynamics figure and the reward: title and name in the log.
CURVES = {
    "Score (avg@k)": SCORE,
    "Reward of the rollouts": "reward",
    "Response length (tokens)": "completions/mean_length",
    "Entropy (nats)": "entropy",
    "Advantage, mean (nats)": "credit/advantage_mean",
    "Advantage, std (nats)": "credit/advantage_std",
    "S_t, mean (nats)": "credit/s_mean",
}


@dataclass(frozen=True)
class Cell:
    """Score of one arm on one domain, at its best or at its final step."""

    # Mean over seeds and prompts with both resampled, clipped to [0, 1] if all scores lie in it. Its ends are NaN for
    # two seeds, see `MIN_SEEDS`.
    interval: Interval
    seeds: int  # number of runs
    steps: Sequence[int]  # evaluated step of each run
    by_seed: Sequence[float]  # mean score of each run


@dataclass(frozen=True)
class Contrast:
    """Difference of one arm from the baseline on one domain."""

    arm: str
    baseline: str
    domain: str
    when: str  # "best" or "final"
    difference: Difference  # arm − baseline, with interval and p-value
    paired_seeds: bool  # whether both arms have the same seeds, which are then resampled together
    adjusted_p: float  # p-value with Holm's correction over the arms of this domain
    by_seed: Sequence[float] = ()  # difference of each seed where they are paired, else empty


@dataclass(frozen=True)
class StepsTo:
    """First evaluated step of each run with a mean score of at least `target`, None for runs that never reach it."""

    arm: str
    domain: str
    target: float
    steps: Sequence[int | None]


@dataclass(frozen=True)
class Curve:
    """A logged number over training: mean, minimum and maximum over the seeds at each step."""

    arm: str
    title: str
    steps: Sequence[int]
    mean: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


@dataclass(frozen=True)
class Comparison:
    """Runs compared on the prompts that all of them share.

    Args:
        runs: compared runs; those without an evaluation have curves only.
        unfinished: runs that are not compared because their training has not ended.
        differing_settings: sampling settings that differ among the evaluations, one line each.
        arms: names in table order, with `BASE` first if step 0 was evaluated and each seed has one model.
        domains: tasks, or groups of one task's prompts.
        prompts: number of prompts per domain.
        measure: the score, maj@k, or a metric of the verdicts.
        baseline: arm that the others are compared with, None for a single arm.
        cells: scores by (arm, domain, "best" | "final").
        contrasts: differences from the baseline.
        steps_to: first steps that reach the targets.
        curves: learning curves.
    """

    runs: Sequence[Run]
    unfinished: Sequence[Run]
    differing_settings: Sequence[str]
    arms: Sequence[str]
    domains: Sequence[str]
    prompts: Mapping[str, int]
    measure: str
    baseline: str | None
    cells: Mapping[tuple[str, str, str], Cell]
    contrasts: Sequence[Contrast]
    steps_to: Sequence[StepsTo]
    curves: Sequence[Curve]

    def mean(self, arm: str, domain: str | None, when: str) -> float:
        """Mean score on a domain, None for all domains; NaN if one is missing."""
        cells = [self.cells.get((arm, name, when)) for name in (self.domains if domain is None else [domain])]
        return math.nan if None in cells else float(np.mean([cell.interval.mean for cell in cells]))

    def ranks(self, domain: str | None, when: str) -> dict[str, int]:
        """Rank of each arm by `mean`, 1 for the best; ties share a rank."""
        means = {arm: self.mean(arm, domain, when) for arm in self.arms}
        rounded = {arm: round(mean, 10) for arm, mean in means.items() if not math.isnan(mean)}
        ordered = sorted(set(rounded.values()), reverse=True)
        return {arm: ordered.index(mean) + 1 for arm, mean in rounded.items()}


def compare(
    runs: Iterable[str | Path | Run],
    *,
    baseline: str | None = None,
    targets: Sequence[float] = (),
    measure: str = SCORE,
    arms: Sequence[str] | None = None,
    include_unfinished: bool = False,
) -> Comparison:
    """Compare runs on the prompts that they share. Runs without an evaluation are compared by their curves.

    Args:
        runs: run directories, directories of run directories, or runs.
        baseline: arm to compare with; None selects SDPO, or the first arm if there is no SDPO.
        targets: scores for which the first step that reaches them is reported.
        measure: `"score"`, `"majority"`, or the name of a verdict metric.
        arms: arms to compare, in this order; None compares all.
        include_unfinished: compare unfinished runs too, with their last evaluation as the final one.

    Raises:
        FileNotFoundError: a path contains no run.
        ValueError: no run with an evaluation or a log, an unknown arm, two runs of one arm with the same seed, or runs
            of one task that share no prompt.
    """
    found = _read(runs)
    unfinished = [] if include_unfinished else [run for run in found if run.evaluations and not run.finished]
    compared = [run for run in found if run not in unfinished and (run.evaluations or run.log)]
    if not compared:
        raise ValueError(
            f"No finished run has an evaluation or a log ({len(unfinished)} unfinished). Add an `EvaluationCallback`, "
            "use `trl credit-eval`, or include unfinished runs: `--include_unfinished` (`include_unfinished=True`)."
        )
    names = _arm_names(compared, arms)
    compared = [run for run in compared if run.arm in names]
    _check_seeds(compared)
    evaluated = [run for run in compared if run.evaluations]
    baseline = _baseline(names, baseline)
    domains = _domains(evaluated, all_steps=bool(targets))
    reader = _ScoreReader(evaluated, measure)
    has_base = has_one_base(evaluated) and all(0 in run.steps and len(run.steps) > 1 for run in evaluated)
    all_arms = [BASE, *names] if has_base and evaluated else names
    keys = product(all_arms, domains, (BEST, FINAL))
    scores = {(arm, d.name, when): s for arm, d, when in keys if (s := reader.scores(arm, d, when)) is not None}
    is_rate = all(one.values.min() >= 0.0 and one.values.max() <= 1.0 for one in scores.values())
    bounds = (0.0, 1.0) if is_rate else UNBOUNDED
    return Comparison(
        runs=compared,
        unfinished=unfinished,
        differing_settings=differing_settings(evaluated),
        arms=all_arms,
        domains=[domain.name for domain in domains],
        prompts={domain.name: len(domain.prompts) for domain in domains},
        measure=measure,
        baseline=baseline if len(names) > 1 else None,
        cells={key: _cell(of_arm, bounds) for key, of_arm in scores.items()},
        contrasts=_contrasts(scores, names, baseline, domains, bounds),
        steps_to=[reader.steps_to(arm, domain, target) for target, domain, arm in product(targets, domains, names)],
        curves=_curves(compared, names),
    )


def _read(runs: Iterable[str | Path | Run]) -> list[Run]:
    runs = list(runs)
    read = [run for run in runs if isinstance(run, Run)]
    return read + find_runs(path for path in runs if not isinstance(path, Run))


@dataclass(frozen=True)
class _Domain:
    """A column of the score table: a task, or one group of its prompts, with the ids of the shared prompts."""

    name: str
    task: str
    prompts: Sequence[str]


@dataclass(frozen=True)
class _Scores:
    """Scores of an arm on a domain, of shape (runs, prompts), with the seed and the step of each run."""

    values: NDArray[np.float64]
    seeds: Sequence[int | None]
    steps: Sequence[int]


@dataclass(frozen=True)
class _ScoreReader:
    runs: Sequence[Run]
    measure: str

    def scores(self, arm: str, domain: _Domain, when: str) -> _Scores | None:
        """Scores of an arm on a domain, None without a run. Every arm evaluates the base; one per model counts."""
        runs = self._runs(arm, domain)
        if arm == BASE:
            runs = list({run.model or run.seed: run for run in reversed(runs)}.values())
            runs, steps = sorted(runs, key=self.runs.index), [0] * len(runs)
        else:
            steps = [run.best_step() if when == BEST else run.final_step() for run in runs]
        if not runs:
            return None
        rows = [self._row(run, domain, step) for run, step in zip(runs, steps, strict=True)]
        return _Scores(np.array(rows), [run.seed for run in runs], steps)

    def steps_to(self, arm: str, domain: _Domain, target: float) -> StepsTo:
        """First step of each run of an arm that reaches a target."""
        reached = []
        for run in self._runs(arm, domain):
            steps = (step for step in run.steps if np.mean(self._row(run, domain, step)) >= target - _ROUNDING)
            reached.append(next(steps, None))
        return StepsTo(arm, domain.name, target, reached)

    def _runs(self, arm: str, domain: _Domain) -> list[Run]:
        return [run for run in self.runs if run.task == domain.task and arm in (run.arm, BASE)]

    def _row(self, run: Run, domain: _Domain, step: int) -> list[float]:
        values = run.per_prompt(step, self.measure)
        return [values[name] for name in domain.prompts]


def _cell(scores: _Scores, bounds: tuple[float, float]) -> Cell:
    """Mean and interval of an arm on a domain; `bounds` is the range of the mean."""
    if has_few_seeds(len(scores.values)):
        interval = Interval(float(scores.values.mean()), math.nan, math.nan)
    else:
        interval = two_level_ci(scores.values, bounds=bounds)
    return Cell(interval, len(scores.values), scores.steps, scores.values.mean(1).tolist())


def _difference(ours: _Scores, theirs: _Scores, bounds: tuple[float, float]) -> tuple[Difference, list[float]]:
    """(difference, that of each seed if both arms have the same seeds): paired by prompt and then by seed.

    Without an interval and a p-value where an arm has two seeds.
    """
    seeds, other_seeds = list(ours.seeds), list(theirs.seeds)
    paired = None not in seeds and len({*seeds}) == len(seeds) == len(other_seeds) and {*seeds} == {*other_seeds}
    values = theirs.values[[other_seeds.index(seed) for seed in seeds]] if paired else theirs.values
    by_seed = (ours.values.mean(1) - values.mean(1)).tolist() if paired else []
    if has_few_seeds(len(ours.values)) or has_few_seeds(len(values)):
        return Difference(float(ours.values.mean() - values.mean()), math.nan, math.nan, math.nan), by_seed
    return paired_bootstrap(ours.values, values, paired_seeds=paired, bounds=bounds), by_seed


def has_few_seeds(seeds: int) -> bool:
    """Whether an arm has several runs, but fewer than `MIN_SEEDS`."""
    return 1 < seeds < MIN_SEEDS


def _arm_names(runs: Sequence[Run], wanted: Sequence[str] | None) -> list[str]:
    found = list(dict.fromkeys(run.arm for run in runs))
    if BASE in found:
        raise ValueError(f"An arm is called {BASE!r}, which names the model before training. Give it another name.")
    if wanted is None:
        order = ["GRPO", "SDPO"]
        return sorted(found, key=lambda arm: (order.index(arm) if arm in order else len(order), _natural(arm)))
    if unknown := [arm for arm in wanted if arm not in found]:
        raise ValueError(printable(f"No run of arm {', '.join(unknown)}; there are {', '.join(found)}."))
    return list(dict.fromkeys(wanted))


def _check_seeds(runs: Sequence[Run]) -> None:
    """Raise if two runs of one arm and task have the same seed."""
    first: dict[tuple[str, str, int | None], Run] = {}
    for run in runs:
        other = first.setdefault((run.arm, run.task, run.seed), run)
        if other is not run:
            difference = f" They differ in {', '.join(options)}." if (options := differing([run, other])) else ""
            raise ValueError(
                f"Two runs are called {run.arm!r} and have the same seed ({run.seed}): {other.folder} and "
                f"{run.folder}.{difference} Runs with one name are compared as seeds of one arm: rename one "
                f"(`arm` in its {RUN_FILE}, or `model` in its {RESULT_FILE}), or compare only one of them."
            )


def _natural(arm: str) -> list[tuple[int, float, str]]:
    """Sort key that compares numbers by value: C=2 before C=16."""
    number = re.compile(r"\d+(\.\d+)?(e-?\d+)?")
    return [(0, float(w), "") if number.fullmatch(w) else (1, 0.0, w) for w in re.split("[ =]", arm)]


def _domains(runs: Sequence[Run], all_steps: bool) -> list[_Domain]:
    """Domains with the prompts that all evaluations of the task share; each group of a task's prompts is a domain.

    The evaluations are the first, best and last of each run, or those of all steps.
    """
    domains = []
    for task in dict.fromkeys(run.task for run in runs):
        evaluated = [
            run.prompts(step)
            for run in runs
            if run.task == task
            for step in (reversed(run.steps) if all_steps else (run.final_step(), run.best_step(), run.steps[0]))
        ]
        shared = set.intersection(*({prompt["id"] for prompt in prompts} for prompts in evaluated))
        if not shared:
            raise ValueError(f"The runs on {task!r} share no prompt, so their scores cannot be paired.")
        groups: dict[str | None, list[str]] = {}
        for prompt in evaluated[0]:
            if prompt["id"] in shared:
                groups.setdefault(prompt["group"], []).append(prompt["id"])
        for group, ids in groups.items():
            name = task if len(groups) == 1 else f"{task}: {'other' if group is None else group}"
            domains.append(_Domain(name, task, ids))
    return domains


def _baseline(arms: Sequence[str], wanted: str | None) -> str:
    if wanted is None:
        return "SDPO" if "SDPO" in arms else arms[0]
    if wanted not in arms:
        raise ValueError(printable(f"No run of the baseline {wanted!r}; there are {', '.join(arms)}."))
    return wanted


def _contrasts(
    scores: Mapping[tuple[str, str, str], _Scores],
    arms: Sequence[str],
    baseline: str,
    domains: Iterable[_Domain],
    bounds: tuple[float, float],
) -> list[Contrast]:
    contrasts = []
    for when, domain in product((FINAL, BEST), [domain.name for domain in domains]):
        theirs = scores.get((baseline, domain, when))
        if theirs is None or theirs.values.shape[1] < 2:
            continue
        others = [arm for arm in arms if arm != baseline and (arm, domain, when) in scores]
        pairs = [_difference(scores[arm, domain, when], theirs, bounds) for arm in others]
        tested = [i for i, (difference, _) in enumerate(pairs) if not math.isnan(difference.p_value)]
        adjusted = dict(zip(tested, holm([pairs[i][0].p_value for i in tested]), strict=True))
        contrasts += [
            Contrast(arm, baseline, domain, when, difference, bool(by_seed), adjusted.get(i, math.nan), by_seed)
            for i, (arm, (difference, by_seed)) in enumerate(zip(others, pairs, strict=True))
        ]
    return contrasts


def _curves(runs: Sequence[Run], arms: Sequence[str]) -> list[Curve]:
    """Curves by title, arm and task, of the steps that all seeds logged: a mean over fewer seeds would jump."""
    tasks = list(dict.fromkeys(run.task for run in runs))
    curves = []
    for title, arm, task in product(CURVES, arms, tasks):
        series = [_series(run, CURVES[title]) for run in runs if run.arm == arm and run.task == task]
        steps = sorted(set.intersection(*map(set, series))) if series else []
        if len(steps) > 1:
            values = np.array([[of_run[step] for step in steps] for of_run in series])
            name = title if len(tasks) == 1 else f"{title}, {task}"
            mean, low, high = (of_seeds(values, axis=0).tolist() for of_seeds in (np.mean, np.min, np.max))
            curves.append(Curve(arm, name, steps, mean, low, high))
    return curves


def _series(run: Run, name: str) -> dict[int, float]:
    if name == SCORE:
        return {row["step"]: float(row[SCORE]) for row in run.evaluations}
    return dict(zip(*run.series(name), strict=True))
