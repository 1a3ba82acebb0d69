"""Arms against each other on the same prompts: scores with intervals, paired differences, steps to a score, curves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from credit_trl.evaluation.statistics import N_RESAMPLES, Difference, Interval, holm, paired_bootstrap, two_level_ci
from credit_trl.lab.comparison.runs import RESULT_FILE, SCORE, Run, differing_settings, find_runs, has_one_base
from credit_trl.training.run_directory import RUN_FILE

BASE = "Base"
BEST, FINAL = "best", "final"

# Curves of the paper's dynamics figure: what they are called, and where the log has them.
CURVES = {
    "Score (avg@k)": SCORE,
    "Response length (tokens)": "completions/mean_length",
    "Entropy (nats)": "entropy",
    "Advantage, mean (nats)": "credit/advantage_mean",
    "Advantage, std (nats)": "credit/advantage_std",
    "S_t, mean (nats)": "credit/s_mean",
}


@dataclass(frozen=True)
class Cell:
    """One arm on one domain, at its best or at its final step.

    Args:
        interval: mean over seeds and prompts, with both resampled; cut at 0 and 1 where all scores lie between them.
        seeds: how many runs.
        steps: the step of each.
        by_seed: the mean of each.
    """

    interval: Interval
    seeds: int
    steps: Sequence[int]
    by_seed: Sequence[float]


@dataclass(frozen=True)
class Contrast:
    """One arm against the baseline on one domain.

    Args:
        arm, baseline, domain: names.
        when: "best" or "final".
        difference: arm − baseline, with interval and p-value.
        paired_seeds: whether the two had the same seeds, which were then drawn together.
        adjusted_p: Holm's, over the arms compared on this domain at this time.
    """

    arm: str
    baseline: str
    domain: str
    when: str
    difference: Difference
    paired_seeds: bool
    adjusted_p: float


@dataclass(frozen=True)
class StepsTo:
    """When the runs of an arm first scored at least `target` in an evaluation; None for runs that never did."""

    arm: str
    domain: str
    target: float
    steps: Sequence[int | None]


@dataclass(frozen=True)
class Curve:
    """A number over training, mean and range over the seeds at each step."""

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
        runs: those that are compared.
        unfinished: those that are not, since their training has not come to its end.
        differing_settings: what their evaluations were not sampled alike with, one line each.
        arms: in the order of the tables; `BASE` first, where step 0 was evaluated, of one model a seed.
        domains: tasks, or groups of one task's prompts.
        prompts: domain → how many prompts.
        measure: what is compared: the score, maj@k, or a metric of the verdicts.
        baseline: the arm that the others are compared with, None for a single arm.
        cells: (arm, domain, "best" | "final") → scores.
        contrasts, steps_to, curves: see there.
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

    def average(self, arm: str, when: str) -> float:
        """Mean over domains, NaN where one is missing."""
        cells = [self.cells.get((arm, domain, when)) for domain in self.domains]
        return math.nan if None in cells else float(np.mean([cell.interval.mean for cell in cells]))

    def ranks(self, domain: str | None, when: str) -> dict[str, int]:
        """Arm → 1 for the best of a column, 2 for the second; equals share a rank. No domain is the average."""
        if domain is None:
            means = {arm: self.average(arm, when) for arm in self.arms}
        else:
            means = {
                a: self.cells[a, domain, when].interval.mean for a in self.arms if (a, domain, when) in self.cells
            }
        ordered = sorted({round(mean, 10) for mean in means.values() if not math.isnan(mean)}, reverse=True)
        return {a: ordered.index(round(m, 10)) + 1 for a, m in means.items() if not math.isnan(m)}


def compare(
    runs: Iterable[str | Path | Run],
    *,
    baseline: str | None = None,
    targets: Sequence[float] = (),
    measure: str = SCORE,
    arms: Sequence[str] | None = None,
    include_unfinished: bool = False,
    n_resamples: int = N_RESAMPLES,
) -> Comparison:
    """Compare runs.

    Args:
        runs: run directories (or directories of them), or runs.
        baseline: the arm to compare with; by default SDPO, or the first arm where there is none.
        targets: scores whose first step is told for every run.
        measure: `"score"`, `"majority"`, or the name of a metric.
        arms: only these, in this order.
        include_unfinished: compare runs that are still training too, the last evaluation so far as their final one.
        n_resamples: of all intervals.

    Raises:
        ValueError: no evaluated run, an unknown arm, two runs of one arm with the same seed, or runs of one task that
            share no prompt.
    """
    runs = list(runs)
    read = [run for run in runs if isinstance(run, Run)]
    read += find_runs([path for path in runs if not isinstance(path, Run)])
    unfinished = [] if include_unfinished else [run for run in read if not run.finished]
    evaluated = [run for run in read if run.evaluations and run not in unfinished]
    if not evaluated:
        raise ValueError(
            f"None of these runs was evaluated to its end ({len(unfinished)} unfinished): add an "
            "`EvaluationCallback`, use `trl credit-eval`, or include unfinished runs."
        )
    names = _arm_names(evaluated, arms)
    evaluated = [run for run in evaluated if run.arm in names]
    _check_seeds(evaluated)
    domains = _domains(evaluated)
    baseline = _baseline(names, baseline)
    scores = _Scores(evaluated, domains, measure)
    with_base = [BASE] if has_one_base(evaluated) and all(0 in r.steps and len(r.steps) > 1 for r in evaluated) else []
    all_arms = [*with_base, *names]
    tables = {
        (arm, domain, when): table
        for arm in all_arms
        for domain in domains
        for when in (BEST, FINAL)
        if (table := scores.table(arm, domain, when)) is not None
    }
    bounds = _bounds(tables.values())
    cells = {
        key: Cell(
            two_level_ci(table.matrix, n_resamples, bounds=bounds),
            len(table.matrix),
            [step for _, step in table.steps],
            table.matrix.mean(1).tolist(),
        )
        for key, table in tables.items()
    }
    return Comparison(
        runs=evaluated,
        unfinished=unfinished,
        differing_settings=differing_settings(evaluated),
        arms=all_arms,
        domains=list(domains),
        prompts={domain: len(ids) for domain, (_, ids) in domains.items()},
        measure=measure,
        baseline=baseline if len(names) > 1 else None,
        cells=cells,
        contrasts=_contrasts(tables, names, baseline, domains, n_resamples, bounds),
        steps_to=[_steps_to(scores, arm, domain, t) for t in targets for domain in domains for arm in names],
        curves=[curve for name in CURVES for arm in names for curve in _curve(evaluated, arm, name)],
    )


@dataclass(frozen=True)
class _Table:
    """(seeds, prompts) scores of an arm on a domain, with the seed and the step of each row."""

    matrix: NDArray[np.float64]
    steps: Sequence[tuple[int | None, int]]


class _Scores:
    """Score matrices of arms on domains, prompts in one order."""

    def __init__(self, runs: Sequence[Run], domains: Mapping[str, tuple[str, Sequence[str]]], measure: str) -> None:
        self.runs, self.domains, self.measure = runs, domains, measure

    def of(self, arm: str, domain: str) -> list[Run]:
        task = self.domains[domain][0]
        return [run for run in self.runs if run.task == task and arm in (run.arm, BASE)]

    def row(self, run: Run, domain: str, step: int) -> list[float]:
        values = run.per_prompt(step, self.measure)
        return [values[name] for name in self.domains[domain][1]]

    def table(self, arm: str, domain: str, when: str) -> _Table | None:
        runs = self.of(arm, domain)
        if not runs:
            return None
        if arm == BASE:
            steps = [(run.seed, 0) for run in runs]
            return _one_per_seed(_Table(np.array([self.row(run, domain, 0) for run in runs]), steps))
        chosen = [run.best_step() if when == BEST else run.final_step() for run in runs]
        matrix = np.array([self.row(run, domain, step) for run, step in zip(runs, chosen, strict=True)])
        return _Table(matrix, [(run.seed, step) for run, step in zip(runs, chosen, strict=True)])


def _bounds(tables: Iterable[_Table]) -> tuple[float, float]:
    """What means can be: a measure that no prompt has outside [0, 1] is taken for a rate."""
    is_rate = all(table.matrix.min() >= 0.0 and table.matrix.max() <= 1.0 for table in tables)
    return (0.0, 1.0) if is_rate else (-math.inf, math.inf)


def _one_per_seed(table: _Table) -> _Table:
    """The base was measured once in every arm, all alike for one seed: count it once."""
    first: dict[int | None, int] = {}
    for row, (seed, _) in enumerate(table.steps):
        first.setdefault(seed, row)
    rows = list(first.values())
    return _Table(table.matrix[rows], [table.steps[row] for row in rows])


def _arm_names(runs: Sequence[Run], wanted: Sequence[str] | None) -> list[str]:
    found = list(dict.fromkeys(run.arm for run in runs))
    if BASE in found:
        raise ValueError(f"An arm is called {BASE!r}, as the model before training is: give it another name.")
    if wanted is None:
        order = ["GRPO", "SDPO"]
        return sorted(found, key=lambda arm: (order.index(arm) if arm in order else len(order), _natural(arm)))
    if unknown := [arm for arm in wanted if arm not in found]:
        raise ValueError(f"No run of arm {', '.join(unknown)}; there are {', '.join(found)}.")
    return list(wanted)


def _check_seeds(runs: Sequence[Run]) -> None:
    """Runs of one arm are its seeds; two with the same one are something else."""
    first: dict[tuple[str, str, int | None], Run] = {}
    for run in runs:
        other = first.setdefault((run.arm, run.task, run.seed), run)
        if other is not run:
            apart = sorted(k for k in {*run.config, *other.config} if run.config.get(k) != other.config.get(k))
            options = [name for name in apart if not name.endswith(("_dir", "run_name"))]
            told = f" They differ in {', '.join(options)}." if options else ""
            raise ValueError(
                f"Two runs are called {run.arm!r} and have the same seed ({run.seed}): {other.folder} and "
                f"{run.folder}.{told} Runs of one name are compared as its seeds: give one of them another name "
                f"(`arm` in its {RUN_FILE}, or `model` in its {RESULT_FILE}), or leave it out."
            )


def _natural(arm: str) -> list[tuple[int, float, str]]:
    """So that C=16 follows C=2."""
    parts = []
    for word in arm.replace("=", " ").split():
        try:
            parts.append((0, float(word), ""))
        except ValueError:
            parts.append((1, 0.0, word))
    return parts


def _domains(runs: Sequence[Run]) -> dict[str, tuple[str, list[str]]]:
    """Domain → (task, prompt ids that all its runs share, in order); groups of a task's prompts are domains."""
    domains: dict[str, tuple[str, list[str]]] = {}
    for task in dict.fromkeys(run.task for run in runs):
        listed = [run.prompts(run.final_step()) for run in runs if run.task == task]
        shared = set.intersection(*({prompt["id"] for prompt in prompts} for prompts in listed))
        if not shared:
            raise ValueError(f"The runs on {task!r} share no prompt, so their scores cannot be paired.")
        prompts = [prompt for prompt in listed[0] if prompt["id"] in shared]
        groups = list(dict.fromkeys(prompt["group"] for prompt in prompts))
        for group in groups:
            name = task if len(groups) == 1 else f"{task}: {'other' if group is None else group}"
            domains[name] = (task, [p["id"] for p in prompts if p["group"] == group])
    return domains


def _baseline(arms: Sequence[str], wanted: str | None) -> str:
    if wanted is None:
        return "SDPO" if "SDPO" in arms else arms[0]
    if wanted not in arms:
        raise ValueError(f"No run of the baseline {wanted!r}; there are {', '.join(arms)}.")
    return wanted


def _contrasts(
    tables: Mapping[tuple[str, str, str], _Table],
    arms: Sequence[str],
    baseline: str,
    domains: Iterable[str],
    n_resamples: int,
    bounds: tuple[float, float],
) -> list[Contrast]:
    contrasts = []
    for when in (FINAL, BEST):
        for domain in domains:
            others = [arm for arm in arms if arm != baseline and (arm, domain, when) in tables]
            reference = tables.get((baseline, domain, when))
            if reference is None or reference.matrix.shape[1] < 2:
                continue
            pairs = [_difference(tables[arm, domain, when], reference, n_resamples, bounds) for arm in others]
            adjusted = holm([difference.p_value for difference, _ in pairs])
            contrasts += [
                Contrast(arm, baseline, domain, when, difference, paired, p)
                for arm, (difference, paired), p in zip(others, pairs, adjusted, strict=True)
            ]
    return contrasts


def _difference(
    table: _Table, reference: _Table, n_resamples: int, bounds: tuple[float, float]
) -> tuple[Difference, bool]:
    """Paired by prompts, and by seeds where both arms have the same ones."""
    ours, theirs = ([seed for seed, _ in t.steps] for t in (table, reference))
    paired = None not in ours and len(set(ours)) == len(ours) == len(theirs) and set(ours) == set(theirs)
    left, right = table.matrix, reference.matrix
    if paired:
        right = right[[theirs.index(seed) for seed in ours]]
    return paired_bootstrap(left, right, n_resamples, paired_seeds=paired, bounds=bounds), paired


def _steps_to(scores: _Scores, arm: str, domain: str, target: float) -> StepsTo:
    reached = []
    for run in scores.of(arm, domain):
        steps = (s for s in run.steps if float(np.mean(scores.row(run, domain, s))) >= target)
        reached.append(next(steps, None))
    return StepsTo(arm, domain, target, reached)


def _curve(runs: Sequence[Run], arm: str, title: str) -> list[Curve]:
    """One curve a task, where the runs have the number."""
    curves = []
    for task in dict.fromkeys(run.task for run in runs):
        mine = [run for run in runs if run.arm == arm and run.task == task]
        series = [_series(run, CURVES[title]) for run in mine]
        values: dict[int, list[float]] = {}
        for steps, numbers in series:
            for step, number in zip(steps, numbers, strict=True):
                values.setdefault(step, []).append(number)
        # Where runs end at different steps, a mean over those that are left would jump.
        steps = [step for step in sorted(values) if len(values[step]) == len(mine)]
        if len(steps) > 1:
            columns = [values[step] for step in steps]
            name = title if len({run.task for run in runs}) == 1 else f"{title}, {task}"
            mean = [float(np.mean(c)) for c in columns]
            curves.append(Curve(arm, name, steps, mean, [min(c) for c in columns], [max(c) for c in columns]))
    return curves


def _series(run: Run, name: str) -> tuple[list[int], list[float]]:
    if name == SCORE:
        return list(run.steps), [float(row[SCORE]) for row in run.evaluations]
    return run.series(name)
