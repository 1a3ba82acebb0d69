"""Forms of the contrast: what was chosen on seeds of its own, and what came of it on the seeds that are reported.

Writes docs/forms_study.md from the run directories of the sweeps `methods`, `choice` and `forms`.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

from claims import told
from report import contrasts_table, table
from results import GROUPS, TASK, WORLDS, World

from credit_trl.comparison import compare
from credit_trl.comparison.compare import FINAL
from credit_trl.run_directory import write_atomically

HERE = Path(__file__).parent
GUIDE = "CREDIT form=guide λ=1"
MEASURES = ("shortcut", "known", "unknown", "format unknown", "format holdout")


# Ranges over seeds that a prototype of another code saw after its choice was made, rounded to two digits.
PROTOTYPE = HERE / "prototype.csv"
ROUNDING = 0.005


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output_dir", type=Path, default=Path("runs/study"))
    parser.add_argument("--docs", type=Path, default=HERE.parents[1] / "docs")
    args = parser.parse_args()
    reported = {name: read(name, [args.output_dir / name, args.output_dir / f"{name}-forms"]) for name in WORLDS}
    folders = {name: args.output_dir / f"{name}-choice" for name in WORLDS}
    chosen = {name: read(name, [folder]) for name, folder in folders.items() if folder.is_dir()}
    write_atomically(args.docs / "forms_study.md", page(reported, chosen))
    print(args.docs / "forms_study.md")


def read(name: str, folders: Sequence[Path]) -> World:
    return World(
        name, *(compare(folders, measure=measure, baseline="SDPO") for measure in ("score", "format", "shortcut"))
    )


def page(reported: Mapping[str, World], chosen: Mapping[str, World]) -> str:
    parts = [
        "# Forms of the contrast, measured",
        introduction(reported, chosen),
        "## The prototype's confirmed rows, again",
        "A row's number **agrees** when its 95 % interval here meets the range over seeds that the prototype saw, and "
        "**differs** otherwise. The runs here have 60 steps in both worlds, the prototype's plain world had 100, so "
        "unknown cues there are expected to lie lower.",
        *(rows_table(reported[name]) for name in WORLDS),
        "## The bar",
        *(bar(reported[name]) for name in WORLDS),
        "## All arms on the reported seeds",
        *(arms_table(reported[name]) for name in WORLDS),
    ]
    if chosen:
        parts += ["## What was looked at to choose", *(arms_table(world) for world in chosen.values())]
    for world in reported.values():
        rows = [c for c in world.score.contrasts if c.when == FINAL and c.arm == GUIDE]
        parts += [f"Guide against SDPO, {world.name} world (reward, final):", contrasts_table(rows)]
    return "\n\n".join(parts) + "\n"


def introduction(reported: Mapping[str, World], chosen: Mapping[str, World]) -> str:
    def seeds(worlds: Mapping[str, World]) -> str:
        return ", ".join(map(str, sorted({run.seed for world in worlds.values() for run in world.runs})))

    text = (
        "Written by `examples/study/forms.py` from the run directories; no measured number in it was typed by hand. "
        "Tasks, budget and evaluation are those of [the study](study.md): avg@4 at temperature 0.6, 64 rollouts a "
        f"step for every arm. Reported seeds: {seeds(reported)}, each with a base of its own."
    )
    if chosen:
        text += f" Seeds of the choice: {seeds(chosen)}; they are in no reported number."
    return text


def interval(world: World, arm: str, measure: str) -> tuple[float, float, float]:
    """Mean and 95 % interval of one of MEASURES at the end of training."""
    kind, _, group = measure.rpartition(" ")
    comparison = world.shortcut if measure == "shortcut" else getattr(world, kind or "score")
    found = comparison.cells[arm, f"{TASK}: {'unknown' if measure == 'shortcut' else group}", FINAL].interval
    return found.mean, found.low, found.high


def rows_table(world: World) -> str:
    lines = []
    with PROTOTYPE.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["world"] == world.name]
    for row in rows:
        low, high = float(row["low"]), float(row["high"])
        mean, ours_low, ours_high = interval(world, row["arm"], row["measure"])
        word = "agrees" if ours_low <= high + ROUNDING and ours_high >= low - ROUNDING else "**differs**"
        ours = f"{mean:.3f} [{ours_low:.3f}, {ours_high:.3f}]"
        lines.append([row["arm"], row["measure"], f"{low:.2f}–{high:.2f}", ours, word])
    head = ("arm", "what", "prototype", "here", "")
    return f"{world.name.capitalize()} world:\n\n{table(head, lines)}"


def bar(world: World) -> str:
    """The one setting against what it has to reach; differences from SDPO are paired."""
    limits = [("known", ">=", 0.97), ("format unknown", ">=", 0.97), ("format holdout", ">=", 0.90)]
    if world.name == "shortcut":
        limits.insert(0, ("shortcut", "<=", 0.05))
    lines = []
    for measure, relation, limit in limits:
        mean, low, high = interval(world, GUIDE, measure)
        met = mean <= limit if relation == "<=" else mean >= limit
        lines.append([measure, f"{relation} {limit:g}", f"{mean:.3f} [{low:.3f}, {high:.3f}]", told_met(met)])
    for group in GROUPS[1:]:
        found = world.contrast(GUIDE, group)
        met = found.difference.low >= -0.02
        word = told_met(met) if met or found.difference.high < -0.02 else "not decided"
        lines.append([f"{group}, against SDPO", "no lower by more than .02", told(found), word])
    return f"`{GUIDE}`, {world.name} world:\n\n{table(('what', 'bar', 'measured', ''), lines)}"


def told_met(met: bool) -> str:
    return "met" if met else "**missed**"


def arms_table(world: World) -> str:
    names = [*MEASURES[1:3], "holdout", *MEASURES[3:]] + (["shortcut"] if world.name == "shortcut" else [])
    lines = []
    for arm in sorted({run.arm for run in world.runs}):
        cells = [interval(world, arm, name) for name in names]
        lines.append([arm, *(f"{100 * mean:.1f} [{100 * low:.1f}, {100 * high:.1f}]" for mean, low, high in cells)])
    return f"{world.name.capitalize()} world, %, final:\n\n{table(('arm', *names), lines)}"


if __name__ == "__main__":
    main()
