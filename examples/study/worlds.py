"""Runs of the study grouped by world, and the numbers computed from them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from scipy import stats

from credit_trl.lab.comparison import Comparison, Run, compare
from credit_trl.lab.comparison.compare import FINAL, Contrast

WORLDS = ("plain", "shortcut")
TASK = "quickstart"
GROUPS = ("known", "unknown", "holdout")
MEASURES = ("score", "format", "shortcut")
LAMBDAS = (0.05, 0.1, 0.2, 0.5)


@dataclass(frozen=True)
class World:
    """Runs of one world, compared by reward, by format and by the rate of the shortcut."""

    name: str
    score: Comparison
    format: Comparison
    shortcut: Comparison
    task: str = TASK

    @property
    def runs(self) -> Sequence[Run]:
        return self.score.runs

    def runs_of(self, arm: str) -> list[Run]:
        return sorted((run for run in self.runs if run.arm == arm), key=lambda run: run.seed or 0)

    def mean(self, arm: str, group: str, measure: str = "score") -> float:
        return getattr(self, measure).cells[arm, f"{self.task}: {group}", FINAL].interval.mean

    def contrast(self, arm: str, group: str, baseline: str = "SDPO", measure: str = "score") -> Contrast:
        comparison = getattr(self, measure)
        if comparison.baseline != baseline:
            comparison = compare(list(self.runs), baseline=baseline, measure=comparison.measure)
        wanted = (arm, f"{self.task}: {group}", FINAL)
        return next(c for c in comparison.contrasts if (c.arm, c.domain, c.when) == wanted)


def read_world(name: str, *folders: Path, task: str = TASK) -> World:
    """Read a world's runs from the folders of its sweeps. Missing folders are skipped."""
    return world_of(name, [folder for folder in folders if folder.is_dir()], task)


def world_of(name: str, runs: Sequence[Path | Run], task: str, baseline: str | None = None) -> World:
    """Build a world from runs or run folders, compared by every measure."""
    measures = (compare(runs, baseline=baseline, measure=measure) for measure in MEASURES)
    return World(name, *measures, task=task)


def world_at(world: World, step: int) -> World:
    """The world with the logs and evaluations up to a step."""

    def until(rows: Sequence[Mapping]) -> list[Mapping]:
        return [row for row in rows if row["step"] <= step]

    runs = [replace(run, log=until(run.log), evaluations=until(run.evaluations)) for run in world.runs]
    return world_of(world.name, runs, world.task)


def read_sweep_worlds(root: Path, sweep: str) -> dict[str, World]:
    """World name → runs of a sweep, for those of the first two worlds that have run it."""
    return {name: read_world(name, root / f"{name}-{sweep}") for name in WORLDS if (root / f"{name}-{sweep}").is_dir()}


def early(run: Run, name: str, steps: int = 5) -> float:
    """Mean of a logged metric over the first steps."""
    return statistics.fmean(run.series(name)[1][:steps])


def late(run: Run, name: str, steps: int = 10) -> float:
    """Mean of a logged metric over the last steps."""
    return statistics.fmean(run.series(name)[1][-steps:])


def seed_difference(world: World, one: str, other: str, number: Callable[[Run], float]) -> str:
    """Mean difference between two arms, paired by seed, with its 95 % t interval."""
    theirs = {run.seed: number(run) for run in world.runs_of(other)}
    differences = np.array([number(run) - theirs[run.seed] for run in world.runs_of(one)])
    mean = float(differences.mean())
    if len(differences) < 2:
        return f"{mean:+.3f} (one seed)"
    half = float(stats.t.ppf(0.975, len(differences) - 1) * stats.sem(differences))
    return f"{mean:+.3f} [{mean - half:+.3f}, {mean + half:+.3f}]"


def s_change(world: World, arm: str) -> float:
    """Relative change of S_t from the first to the last steps, mean over seeds."""
    return statistics.fmean(late(r, "credit/s_mean") / early(r, "credit/s_mean") - 1 for r in world.runs_of(arm))


def step_seconds(run: Run) -> float:
    """Median wall time of a training step."""
    return statistics.median(run.series("step_time")[1])


def class_values(tokens: Mapping[str, Mapping], world: str, quantity: str) -> dict[str, list[float]]:
    bases = [value["classes"] for name, value in tokens.items() if name.startswith(world)]
    return {name: [base[name][quantity] for base in bases] for name in bases[0]}
