"""Hold-out cues without the luck of their labels: the chosen setting again, at three recipes.

Adds the runs that it finds to docs/study/settled.csv, a row a run, and writes docs/settled_study.md with its figure
from these rows alone. So seeds can be added by and by, and nobody needs all the runs to write the page anew.
"""

from __future__ import annotations

import argparse
import csv
import io
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from bars import LOWER_LIMITS, SHORTCUT_LIMIT, final_mean, told_loss, told_met
from endings import schedule_of
from relabelled import GROUP
from report import table
from results import GROUPS, WORLDS
from scipy import stats
from settled_figure import Line, differences_figure

from credit_trl.evaluation.statistics import Difference
from credit_trl.lab.comparison.figures import THEMES
from credit_trl.lab.comparison.runs import find_runs
from credit_trl.lab.sweeps import read_spec
from credit_trl.training.run_directory import write_atomically

HERE = Path(__file__).parent
COMPARED = (*GROUPS[1:], GROUP)
COLUMNS = (*GROUPS, GROUP, "format unknown", "format holdout", f"format {GROUP}", "shortcut")
SWEEPS = {
    "confirmed": "A rate of its own, on fresh seeds",
    "settled": "Until learning has settled",
    "long_relabelled": "After 100 steps at a larger rate",
}
LISTED_SEEDS = 6  # more of them are not listed in a table's cells


class Key(NamedTuple):
    """Which run a row is of."""

    sweep: str
    world: str
    arm: str
    seed: int


Measures = dict[str, float]
Rows = dict[Key, Measures]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output_dir", type=Path, default=Path("runs/study"))
    parser.add_argument("--docs", type=Path, default=HERE.parents[1] / "docs")
    args = parser.parse_args()
    file = args.docs / "study" / "settled.csv"
    rows = read_rows(file) | rows_of_runs(args.output_dir)
    write_atomically(file, as_csv(rows))
    if panels := panels_of(rows):
        for theme in THEMES:
            (args.docs / "study" / f"settled-{theme.name}.png").write_bytes(differences_figure(panels, theme))
    write_atomically(args.docs / "settled_study.md", page(rows))
    print(args.docs / "settled_study.md")


def rows_of_runs(root: Path) -> Rows:
    """The finished runs of these sweeps, with the mean of each measure at their end."""
    folders = {(sweep, world): root / f"{world}-{sweep}" for sweep in SWEEPS for world in WORLDS}
    return {
        Key(sweep, world, run.arm, run.seed): {name: final_mean(run, name) for name in COLUMNS}
        for (sweep, world), folder in folders.items()
        if folder.is_dir()
        for run in find_runs([folder])
        if run.finished
    }


def read_rows(file: Path) -> Rows:
    if not file.is_file():
        return {}
    with file.open(encoding="utf-8", newline="") as lines:
        return {
            Key(row["sweep"], row["world"], row["arm"], int(row["seed"])): {name: float(row[name]) for name in COLUMNS}
            for row in csv.DictReader(lines)
        }


def as_csv(rows: Rows) -> str:
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow((*Key._fields, *COLUMNS))
    lines.writerows((*key, *(f"{rows[key][name]:.4f}" for name in COLUMNS)) for key in sorted(rows))
    return text.getvalue()


# ------------------------------------------------------------------ the page


def page(rows: Rows) -> str:
    parts = ["# Hold-out cues without luck", introduction()]
    if panels_of(rows):
        parts += ["\n".join(f"![differences](study/settled-{t.name}.png#only-{t.name})" for t in THEMES), caption()]
    for sweep, title in SWEEPS.items():
        own = {key: values for key, values in rows.items() if key.sweep == sweep}
        if own:
            parts += [f"## {title}", recipe(sweep, own), *told(own)]
    return "\n\n".join(parts) + "\n"


def introduction() -> str:
    return (
        "Written by `examples/study/settled.py`; no measured number in it was typed by hand. In [Forms of the "
        "contrast, measured](forms_study.md#at-the-end-of-learning) the twelve hold-out cues are right or wrong by "
        f"luck, for all prompts of a cue alike, and intervals are wide. Here a group of prompts is added, `{GROUP}`: "
        "every hold-out cue under each of the twelve topics in turn, four prompts each. What a hold-out cue is about "
        "is a label that nothing was trained on, so the expectation is that of the hold-out prompts; the luck of "
        "twelve draws is gone.\n\n"
        "SDPO has the frozen teacher of the settings beside it, so that they differ in the contrast alone, and in the "
        "learning rate where it is named. avg@4 at temperature 0.6; 64 rollouts a step for every arm. Intervals are "
        "Student's, over seeds; differences are paired by seed. The numbers of every run are in "
        "[settled.csv](study/settled.csv)."
    )


def caption() -> str:
    return (
        "Points that a setting of the contrast is above SDPO of the same seeds: a pale dot a seed, the diamond their "
        "mean with its 95 % interval, dashed the loss of two points that the bar allows. Sweeps and settings are "
        "those of the tables; a rate is named where it is not SDPO's."
    )


def panels_of(rows: Rows) -> dict[str, list[Line]]:
    """What the figure shows: every setting and world with two seeds, for the groups that the bar is about."""
    settings = sorted({(key.sweep, key.arm, key.world) for key in rows if key.arm.startswith("CREDIT")}, key=in_order)
    panels: dict[str, list[Line]] = {"unknown cues": [], "hold-out cues, every topic": []}
    for sweep, arm, world in settings:
        own = {key: row for key, row in rows.items() if key.sweep == sweep}
        baseline = min({key.arm for key in own}, key=lambda arm: arm.startswith("CREDIT"))
        ours, theirs = of(own, world, arm), of(own, world, baseline)
        if len(ours.keys() & theirs.keys()) > 1:
            for name, lines in zip(("unknown", GROUP), panels.values(), strict=True):
                found = differences_of(ours, theirs, name)
                lines.append(
                    Line(f"{sweep}: {label_of(arm)}, {world}, {len(found)} seeds", world, found, *interval(found))
                )
    return panels if any(panels.values()) else {}


def in_order(setting: tuple[str, str, str]) -> tuple[int, str, str]:
    sweep, arm, world = setting
    return list(SWEEPS).index(sweep), world, arm


def label_of(arm: str) -> str:
    """The setting's λ, and its rate where it has one of its own."""
    options = dict(part.split("=") for part in arm.split() if "=" in part)
    rate = f" at {options['learning_rate']}" if "learning_rate" in options else ""
    return f"λ = {options['λ']}{rate}"


def recipe(sweep: str, rows: Rows) -> str:
    """Seeds, steps and learning rate."""
    spec = read_spec(HERE / f"{sweep}.yaml")
    config, run = spec.config, {world: seeds_of(rows, world) for world in WORLDS}
    seeds = "; ".join(f"{world} {', '.join(map(str, own))}" for world, own in run.items() if own)
    left = max(len(spec.seeds) - len(own) for own in run.values() if own)
    missing = f" ({left} of a world are not run yet)" if left else ""
    return (
        f"Sweep `{sweep}`. Seeds, each with a base of its own: {seeds}{missing}. "
        f"{config['max_steps']} steps, learning rate {config['learning_rate']:g}, {schedule_of(config)} after "
        f"{config['warmup_steps']} warm-up steps."
    )


def told(rows: Rows) -> list[str]:
    """The bar for every setting of the contrast that has two seeds, and what each seed did."""
    arms = sorted({key.arm for key in rows}, key=lambda arm: (arm.startswith("CREDIT"), arm))
    worlds = [world for world in WORLDS if seeds_of(rows, world)]
    having = [(world, arm) for arm in arms[1:] for world in worlds if len(of(rows, world, arm)) > 1]
    return [*(bar(rows, world, arm, arms[0]) for world, arm in having), *(seeds_table(rows, w, arms) for w in worlds)]


def bar(rows: Rows, world: str, arm: str, baseline: str) -> str:
    """One setting against what it has to reach."""
    limits = [(name, ">=", limit) for name, limit in LOWER_LIMITS.items()]
    lines = []
    for name, relation, limit in limits if world == "plain" else [("shortcut", "<=", SHORTCUT_LIMIT), *limits]:
        values = [row[name] for row in of(rows, world, arm).values()]
        mean, low, high = statistics.fmean(values), *within_rates(interval(values))
        met = mean <= limit if relation == "<=" else mean >= limit
        lines.append([name, f"{relation} {limit:g}", f"{mean:.3f} [{low:.3f}, {high:.3f}]", told_met(met)])
    for name in COMPARED:
        found = paired(of(rows, world, arm), of(rows, world, baseline), name)
        numbers = f"{100 * found.difference:+.1f} points [{100 * found.low:+.1f}, {100 * found.high:+.1f}]"
        lines.append([f"{name}, against SDPO", "no lower by more than .02", numbers, told_loss(found)])
    count = len(of(rows, world, arm))
    return f"`{arm}`, {world} world, {count} seeds:\n\n{table(('what', 'bar', 'measured', ''), lines)}"


def seeds_table(rows: Rows, world: str, arms: Sequence[str]) -> str:
    """Every arm's mean, with the number of each seed while they are few."""
    names = COLUMNS if world != "plain" else COLUMNS[:-1]
    lines = []
    for arm in arms:
        own = of(rows, world, arm).values()
        cells = ([100 * row[name] for row in own] for name in names)
        if own:
            lines.append([arm, *(mean_of_seeds(list(cell)) for cell in cells)])
    shown = f"mean (each seed, from {LISTED_SEEDS + 1} on their range)"
    return f"{world.capitalize()} world, %, final, {shown}:\n\n{table(('arm', *names), lines)}"


def mean_of_seeds(values: Sequence[float]) -> str:
    """Mean, and each seed's value, or the least and the greatest of many."""
    few = len(values) <= LISTED_SEEDS
    shown = ", ".join(f"{value:.0f}" for value in values) if few else f"{min(values):.0f} to {max(values):.0f}"
    return f"{statistics.fmean(values):.1f} ({shown})"


# ------------------------------------------------------------------ numbers


def of(rows: Rows, world: str, arm: str) -> dict[int, Measures]:
    """Seed → measures, by seed."""
    return {key.seed: rows[key] for key in sorted(rows) if (key.world, key.arm) == (world, arm)}


def seeds_of(rows: Rows, world: str) -> list[int]:
    return sorted({key.seed for key in rows if key.world == world})


def paired(ours: Mapping[int, Measures], theirs: Mapping[int, Measures], name: str) -> Difference:
    """Mean difference over the seeds that both have, with its t interval."""
    differences = differences_of(ours, theirs, name)
    p_value = float(stats.ttest_1samp(differences, 0.0).pvalue) if np.ptp(differences) > 0 else float("nan")
    return Difference(statistics.fmean(differences), *interval(differences), p_value)


def differences_of(ours: Mapping[int, Measures], theirs: Mapping[int, Measures], name: str) -> list[float]:
    return [ours[seed][name] - theirs[seed][name] for seed in ours if seed in theirs]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Student's 95 % interval of the mean; of no width where nothing varies, without bounds for a single value."""
    mean = statistics.fmean(values)
    if len(values) == 1:
        return -np.inf, np.inf
    half = float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values))
    return mean - half, mean + half


def within_rates(bounds: tuple[float, float]) -> tuple[float, float]:
    return max(bounds[0], 0.0), min(bounds[1], 1.0)


if __name__ == "__main__":
    main()
