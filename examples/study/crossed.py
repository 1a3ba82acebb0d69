"""Section on forms × λ × sources × gates; the baseline of a cell is its form and λ with source `batch` and no gate."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from bars import arms_table, interval
from endings import recipe_of
from report import figure, table
from worlds import GROUPS, WORLDS, World, late, read_world, world_of

from credit_trl.lab.comparison.tables import contrast_row

SWEEP = "cross"
FORMS = ("CREDIT λ=0.1", "CREDIT λ=0.5", "CREDIT form=guide λ=1", "CREDIT form=guide λ=1.5")
OPTIONS = ("", "source=hard", "source=none", "gate=0.05", "source=hard gate=0.05", "source=none gate=0.05")


def read_crossed(root: Path, tasks: Mapping[str, str]) -> dict[str, World]:
    """The worlds that have run the sweep `cross`, with its arms and SDPO."""
    found = {}
    for name, task in tasks.items():
        if (root / f"{name}-{SWEEP}").is_dir():
            others = root / (f"{name}-forms" if name in WORLDS else name)  # holds SDPO and the baselines
            world = read_world(name, root / f"{name}-{SWEEP}", others, task=task)
            found[name] = world_of(name, [run for run in world.runs if run.arm == "SDPO" or form_of(run.arm)], task)
    return found


def form_of(arm: str) -> str | None:
    """Form and λ of a cell, or None if the arm is not a cell."""
    options = [part for part in arm.split() if not part.startswith(("source=", "gate="))]
    return " ".join(options) if " ".join(options) in FORMS else None


def cells_of(world: World, form: str) -> list[str]:
    """The arms of one form and λ with another source or a gate."""
    return sorted({run.arm for run in world.runs if run.arm != form and form_of(run.arm) == form})


def crossed_section(worlds: Mapping[str, World]) -> list[str]:
    parts = [
        "## Sources and gates",
        "Two forms × two λ each × three sources of contrast prompts (`batch`; `hard`, the nearest of the batch; "
        "`none`, no prompt) × no gate and a gate of 0.05. Nothing was chosen from these cells. Differences are paired "
        "by seed and prompt with the same form and λ, source `batch` and no gate. Each is followed by its 95 % "
        "interval and by Holm's p over the five cells of a form and λ on one group of prompts.",
    ]
    if any(name != "plain" for name in worlds):
        parts.append(figure("cross"))
    for world in worlds.values():
        parts += [recipe_of(world), glance_table(world), arms_table(world)]
        parts += [effects_table(world, form) for form in FORMS]
        parts.append(shares_table(world))
    return parts


def glance_table(world: World) -> str:
    """All cells in one table: a row per source and gate, a column per form and λ."""
    measures = ("unknown",) if world.name == "plain" else ("unknown", "shortcut")
    cells = [[f"{form} {options}".strip() for form in FORMS] for options in OPTIONS]
    lines = [
        [options or "batch, no gate", *(means(world, arm, measures) for arm in row)]
        for options, row in zip(OPTIONS, cells, strict=True)
    ]
    title = f"{world.name.capitalize()} world, %, unknown cues right{' / shortcut' * (len(measures) > 1)}"
    sdpo = f"SDPO: {means(world, 'SDPO', measures)}"
    return f"{title}; {sdpo}:\n\n{table(('source and gate', *FORMS), lines)}"


def means(world: World, arm: str, measures: Sequence[str]) -> str:
    return " / ".join(f"{100 * interval(world, arm, measure)[0]:.1f}" for measure in measures)


def effects_table(world: World, form: str) -> str:
    """Differences in points of each source and gate from the baseline of its form and λ."""
    measures = [("score", group) for group in GROUPS] + [("format", "unknown")]
    measures += [("shortcut", "unknown")] if world.name != "plain" else []
    of_form = world_of(world.name, [run for run in world.runs if form_of(run.arm) == form], world.task, baseline=form)
    lines = [
        [cell, *(effect(of_form, cell, form, measure, group) for measure, group in measures)]
        for cell in cells_of(world, form)
    ]
    head = ("cell", *(group if measure == "score" else f"{measure} {group}" for measure, group in measures))
    return f"{world.name.capitalize()} world, against `{form}`, points:\n\n{table(head, lines)}"


def effect(world: World, cell: str, form: str, measure: str, group: str) -> str:
    _, _, difference, interval, _, adjusted = contrast_row(world.contrast(cell, group, form, measure))
    return f"{difference} {interval}, {adjusted}"


def shares_table(world: World) -> str:
    """Share of positions gated in the last ten steps."""
    arms: Sequence[str] = [cell for form in FORMS for cell in cells_of(world, form) if "gate=" in cell]
    shares = [[late(run, "credit/frac_gated") for run in world.runs_of(arm)] for arm in arms]
    lines = [
        [arm, f"{100 * statistics.fmean(of_arm):.1f}", f"{100 * min(of_arm):.1f} to {100 * max(of_arm):.1f}"]
        for arm, of_arm in zip(arms, shares, strict=True)
    ]
    shown = table(("arm", "mean", "range over seeds"), lines)
    return f"{world.name.capitalize()} world, positions without contrast because of the gate, %:\n\n{shown}"
