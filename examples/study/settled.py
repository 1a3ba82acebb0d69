"""Write results/settled.md: the chosen setting at three recipes and the paper's form at two of them.

Hold-out cues are tested under every topic.

Adds one row per run to results/settled.csv and writes the page and its figure from this file alone, so that seeds can
be added later without the earlier run directories.
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
from bars import LOSS_LIMIT, LOWER_LIMITS, SHORTCUT_LIMIT, final_mean, loss_verdict, met_or_missed
from endings import COLLAPSED, schedule_of
from relabelled import GROUP, offered_rate
from report import figure, table
from scipy import stats
from settled_figure import Line, Panel, differences_figure
from worlds import GROUPS, WORLDS

from credit_trl.evaluation.statistics import Difference
from credit_trl.lab.comparison.figures import THEMES
from credit_trl.lab.comparison.runs import find_runs
from credit_trl.lab.sweeps import read_spec
from credit_trl.training.run_directory import write_atomically

HERE = Path(__file__).parent
OFFERED = "offered tool"
COLUMNS = (*GROUPS, GROUP, "format unknown", "format holdout", f"format {GROUP}", "shortcut")  # of the CSV
SHOWN = tuple(OFFERED if name == GROUP else name for name in COLUMNS)
# Allowed losses against SDPO. A quarter of the calls of an offered tool are right.
LOSS_LIMITS = {**dict.fromkeys(GROUPS[1:], LOSS_LIMIT), OFFERED: offered_rate(LOSS_LIMIT)}
SWEEPS = {
    "confirmed": "A separate learning rate, new seeds",
    "settled": "Until learning has settled",
    "long_relabelled": "After 100 steps at a larger rate",
    "subtract_settled": "The paper's form with the frozen teacher",
    "subtract_long": "The paper's form with the averaged teacher, at the larger rate",
}
LISTED_SEEDS = 6  # with more seeds a table cell shows their range


class Key(NamedTuple):
    """The run of a row."""

    sweep: str
    world: str
    arm: str
    seed: int


Measures = dict[str, float]
Rows = dict[Key, Measures]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output_dir", type=Path, default=Path("runs/study"))
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder of the page, table and figure")
    args = parser.parse_args()
    file = args.results / "settled.csv"
    write_atomically(file, as_csv(read_rows(file) | rows_of_runs(args.output_dir)))
    rows = read_rows(file)  # the rounded values
    rows = {key: row | {OFFERED: offered_rate(row[GROUP])} for key, row in rows.items()}
    if panels := panels_of(rows):
        for theme in THEMES:
            (args.results / f"settled-{theme.name}.png").write_bytes(differences_figure(panels, theme))
    write_atomically(args.results / "settled.md", page(rows))
    print(args.results / "settled.md")


def rows_of_runs(root: Path) -> Rows:
    """Final means of every measure, for the finished runs of the sweeps."""
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


def as_csv(rows: Mapping, fields: Sequence[str] = Key._fields, columns: Sequence[str] = COLUMNS) -> str:
    """Rows sorted by their keys, whose `fields` come first; four decimals."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow((*fields, *columns))
    lines.writerows((*key, *(f"{rows[key][name]:.4f}" for name in columns)) for key in sorted(rows))
    return text.getvalue()


def page(rows: Rows) -> str:
    parts = ["# Hold-out cues under every topic", introduction()]
    if panels_of(rows):
        parts += [figure("settled"), caption()]
    for sweep, title in SWEEPS.items():
        own = {key: values for key, values in rows.items() if key.sweep == sweep}
        if own:
            parts += [f"## {title}", recipe(sweep, own), *sweep_tables(own)]
    return "\n\n".join(parts) + "\n"


def introduction() -> str:
    return (
        "`examples/study/settled.py` writes this page from [settled.csv](settled.csv), which has one row per run. In "
        "[Forms of the contrast, measured](forms.md#at-the-end-of-learning) the score of each of the twelve hold-out "
        "cues is chance, shared by all prompts of the cue, and intervals are wide. The group "
        f"`{GROUP}` tests every hold-out cue with each of the twelve topics as its label, four prompts each. The "
        "label is then independent of the prompt, and the score is a quarter of the rate at which a response calls "
        f"one of the four offered tools, whichever, with the city of the prompt. *{OFFERED.capitalize()}* is this "
        "rate, four times the score. The topic of a hold-out cue is never taught, so calling an offered tool is the "
        "most that a model can do.\n\n"
        "SDPO uses the same teacher, which is frozen in all sweeps but the last, so the arms differ only in the "
        "contrast, and in the learning rate where it is named. avg@4 at temperature 0.6, 64 rollouts per step for "
        "every arm. Intervals are Student's t over seeds; differences are paired by seed."
    )


def caption() -> str:
    return (
        "Difference from SDPO with the same seeds, in points: a pale dot per seed, a diamond for the mean with its 95 "
        "% interval, a dashed line for the allowed loss: two points of accuracy, which are eight of calls of an "
        "offered tool. The learning rate is named where it differs "
        "from SDPO's."
    )


def panels_of(rows: Rows) -> dict[str, Panel]:
    """Panels of the figure: a line for every setting of guide and world with at least two seeds."""
    settings = sorted({(key.sweep, key.arm, key.world) for key in rows if "form=guide" in key.arm}, key=in_order)
    titles = {"unknown": "accuracy, unknown cues", OFFERED: "calls of an offered tool, hold-out cues"}
    panels: dict[str, list[Line]] = {name: [] for name in titles}
    for sweep, arm, world in settings:
        own = {key: row for key, row in rows.items() if key.sweep == sweep}
        baseline = min({key.arm for key in own}, key=lambda arm: arm.startswith("CREDIT"))
        ours, theirs = by_seed(own, world, arm), by_seed(own, world, baseline)
        if len(ours.keys() & theirs.keys()) > 1:
            for name, lines in panels.items():
                found = differences_of(ours, theirs, name)
                lines.append(
                    Line(f"{sweep}: {label_of(arm)}, {world}, {len(found)} seeds", world, found, *interval(found))
                )
    return {titles[name]: Panel(lines, LOSS_LIMITS[name]) for name, lines in panels.items() if lines}


def in_order(setting: tuple[str, str, str]) -> tuple[int, str, str]:
    sweep, arm, world = setting
    return list(SWEEPS).index(sweep), world, arm


def label_of(arm: str) -> str:
    """λ of an arm, and its learning rate if the arm sets one."""
    options = dict(part.split("=") for part in arm.split() if "=" in part)
    rate = f" at {options['learning_rate']}" if "learning_rate" in options else ""
    return f"λ = {options['λ']}{rate}"


def recipe(sweep: str, rows: Rows) -> str:
    """One sentence with seeds, steps and learning rate of a sweep."""
    spec = read_spec(HERE / f"{sweep}.yaml")
    config, run = spec.config, {world: seeds_of(rows, world) for world in WORLDS}
    seeds = "; ".join(f"{world} {', '.join(map(str, own))}" for world, own in run.items() if own)
    left = max(len(spec.seeds) - len(own) for own in run.values() if own)
    missing = f" ({left} per world not run yet)" if left else ""
    return (
        f"Sweep `{sweep}`. Seeds, each with its own base model: {seeds}{missing}. "
        f"{config['max_steps']} steps, learning rate {config['learning_rate']:g}, {schedule_of(config)} after "
        f"{config['warmup_steps']} warm-up steps."
    )


def sweep_tables(rows: Rows) -> list[str]:
    """Thresholds for every setting of guide with at least two seeds, or differences from SDPO; then each seed."""
    arms = sorted({key.arm for key in rows}, key=lambda arm: (arm.startswith("CREDIT"), arm))
    worlds = [world for world in WORLDS if seeds_of(rows, world)]
    having = [(world, arm) for arm in arms[1:] for world in worlds if len(by_seed(rows, world, arm)) > 1]
    if any("form=guide" in arm for arm in arms):
        tables = [bar(rows, world, arm, arms[0]) for world, arm in having]
    else:
        tables = [differences_table(rows, world, arms) for world in dict(having)]
    return [*tables, *(seeds_table(rows, world, arms) for world in worlds)]


def differences_table(rows: Rows, world: str, arms: Sequence[str]) -> str:
    """Collapsed runs of every arm, and its differences from the first one over the seeds that collapsed in neither."""
    names = [name for name in (*GROUPS, OFFERED, "shortcut") if name != "shortcut" or world != "plain"]
    runs = {arm: by_seed(rows, world, arm) for arm in arms}
    whole = {arm: {s: row for s, row in own.items() if row["known"] >= COLLAPSED} for arm, own in runs.items()}
    lines = []
    for arm, own in runs.items():
        has_pairs = arm != arms[0] and len(whole[arm].keys() & whole[arms[0]].keys()) > 1
        cells = [in_points(paired(whole[arm], whole[arms[0]], name)) if has_pairs else "" for name in names]
        lines.append([arm, f"{len(own) - len(whole[arm])} of {len(own)}", *cells])
    title = f"{world.capitalize()} world, differences from SDPO in points over the seeds that collapsed in neither"
    return f"{title}:\n\n{table(('arm', 'collapsed', *names), lines)}"


def in_points(found: Difference, unit: str = "") -> str:
    return f"{100 * found.difference:+.1f}{unit} [{100 * found.low:+.1f}, {100 * found.high:+.1f}]"


def bar(rows: Rows, world: str, arm: str, baseline: str) -> str:
    """Table of one setting against every threshold."""
    limits = [(name, ">=", limit) for name, limit in LOWER_LIMITS.items()]
    lines = []
    for name, relation, limit in limits if world == "plain" else [("shortcut", "<=", SHORTCUT_LIMIT), *limits]:
        values = [row[name] for row in by_seed(rows, world, arm).values()]
        mean, low, high = statistics.fmean(values), *within_rates(interval(values))
        met = mean <= limit if relation == "<=" else mean >= limit
        lines.append([name, f"{relation} {limit:g}", f"{mean:.3f} [{low:.3f}, {high:.3f}]", met_or_missed(met)])
    for name, limit in LOSS_LIMITS.items():
        found = paired(by_seed(rows, world, arm), by_seed(rows, world, baseline), name)
        numbers = in_points(found, " points")
        allowed = f"no lower by more than {100 * limit:.0f} points"
        lines.append([f"{name}, against SDPO", allowed, numbers, loss_verdict(found, limit)])
    count = len(by_seed(rows, world, arm))
    return f"`{arm}`, {world} world, {count} seeds:\n\n{table(('what', 'bar', 'measured', ''), lines)}"


def seeds_table(rows: Rows, world: str, arms: Sequence[str]) -> str:
    """Mean of every arm, with the value of each seed or, with many seeds, their range."""
    names = SHOWN if world != "plain" else SHOWN[:-1]
    lines = []
    for arm in arms:
        own = by_seed(rows, world, arm).values()
        cells = ([100 * row[name] for row in own] for name in names)
        if own:
            lines.append([arm, *(mean_of_seeds(list(cell)) for cell in cells)])
    shown = f"mean (each seed; the range with more than {LISTED_SEEDS})"
    return f"{world.capitalize()} world, %, final, {shown}:\n\n{table(('arm', *names), lines)}"


def mean_of_seeds(values: Sequence[float]) -> str:
    """Mean with the value of each seed, or with their range if there are many."""
    few = len(values) <= LISTED_SEEDS
    shown = ", ".join(f"{value:.0f}" for value in values) if few else f"{min(values):.0f} to {max(values):.0f}"
    return f"{statistics.fmean(values):.1f} ({shown})"


def by_seed(rows: Rows, world: str, arm: str) -> dict[int, Measures]:
    """Seed → measures of one arm in one world."""
    return {key.seed: rows[key] for key in sorted(rows) if (key.world, key.arm) == (world, arm)}


def seeds_of(rows: Rows, world: str) -> list[int]:
    return sorted({key.seed for key in rows if key.world == world})


def paired(ours: Mapping[int, Measures], theirs: Mapping[int, Measures], name: str) -> Difference:
    """Mean difference over the shared seeds, with its t interval and p-value."""
    differences = differences_of(ours, theirs, name)
    p_value = float(stats.ttest_1samp(differences, 0.0).pvalue) if np.ptp(differences) > 0 else float("nan")
    return Difference(statistics.fmean(differences), *interval(differences), p_value)


def differences_of(ours: Mapping[int, Measures], theirs: Mapping[int, Measures], name: str) -> list[float]:
    return [ours[seed][name] - theirs[seed][name] for seed in ours if seed in theirs]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Student's 95 % interval of the mean; infinite for a single value."""
    mean = statistics.fmean(values)
    if len(values) == 1:
        return -np.inf, np.inf
    half = float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values))
    return mean - half, mean + half


def within_rates(bounds: tuple[float, float]) -> tuple[float, float]:
    return max(bounds[0], 0.0), min(bounds[1], 1.0)


if __name__ == "__main__":
    main()
