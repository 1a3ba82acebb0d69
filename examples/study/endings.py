"""Runs to the end of learning: a setting chosen on seeds of its own, held to the bar on others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from bars import against_sdpo, arms_of, bar, final_mean, interval, meets, seeds_table
from report import table
from results import GROUPS, WORLDS, World, of_sweep, world_at

CLOSE = 0.01
FALLEN = 0.5
KINDS = {"ema": "averaged", "base": "frozen"}  # teacher_model_kind
TOLD = {"SDPO": "SDPO", "CREDIT": "guide"}  # every CREDIT arm of these sweeps is a guide


@dataclass(frozen=True)
class Ending:
    """One recipe: the runs that a setting was chosen on, and those that are reported."""

    title: str
    remark: str  # what was known when the rule and the arms were set
    choice: Mapping[str, World]  # to its own end, which may lie after that of the reported runs
    reported: Mapping[str, World]

    @property
    def steps(self) -> int:
        """The length of the reported runs; the rule reads those of the choice at this step."""
        return next(iter(self.reported.values())).runs[0].config["max_steps"]

    @property
    def chosen_on(self) -> dict[str, World]:
        return {name: world_at(world, self.steps) for name, world in self.choice.items()}


# Sweep, title and remark; the sweep of its choice has the same name and "_choice".
SWEEPS = (
    (
        "long",
        "At the end of learning",
        "SDPO with the frozen teacher is here as a second measure because of what the shorter recipe below had shown. "
        "The rule was written down before the first run of this choice had ended. That it reads those runs at step "
        "100, up to which their rate is constant, came of what they show at their own end: what hold-out cues lose "
        "late. The reported seeds were not looked at before. What hold-out cues lose without the luck of their twelve "
        "labels is measured in [another sweep](settled_study.md).",
    ),
    (
        "end",
        "A shorter recipe",
        "The rule was written down when the first runs of the choice were known, and the frozen teacher was added to "
        "the choice after guide had lost its form there. The reported seeds were not looked at before.",
    ),
)


def read_endings(root: Path) -> list[Ending]:
    """The recipes whose reported runs are there."""
    found = [
        Ending(title, remark, of_sweep(root, f"{sweep}_choice"), of_sweep(root, sweep))
        for sweep, title, remark in SWEEPS
    ]
    return [ending for ending in found if ending.reported]


def recipe_of(*worlds: World) -> str:
    """Seeds, steps and learning rate of a sweep."""
    runs = [run for world in worlds for run in world.runs]
    seeds, config = ", ".join(map(str, sorted({run.seed for run in runs}))), runs[0].config
    return (
        f"Seeds {seeds}, each with a base of its own; {config['max_steps']} steps, learning rate "
        f"{config['learning_rate']:g}, {schedule_of(config)} after {config['warmup_steps']} warm-up steps."
    )


def schedule_of(config: Mapping) -> str:
    if config["lr_scheduler_type"] == "warmup_stable_decay":
        return f"constant up to a decay in the last {config['lr_scheduler_kwargs']['num_decay_steps']} steps,"
    return "decaying linearly" if config["lr_scheduler_type"] == "linear" else "constant"


def told(ending: Ending) -> list[str]:
    """What was chosen, and the bar on other seeds."""
    reported, choice = ending.reported, ending.chosen_on
    arm = chosen(choice)
    return [
        f"## {ending.title}",
        f"{recipe_of(*reported.values())} For the choice: {recipe_of(*ending.choice.values())}",
        f"Rule: of the arms whose means meet every line of the bar in both worlds, those within {100 * CLOSE:g} point "
        "of the best accuracy on unknown cues (mean of both worlds), and of these the one with the lowest rate of the "
        f"planted thought over all cues. Arms that meet every line, and their accuracy: {listed(able(choice))}. "
        f"Chosen: `{arm}`.",
        ending.remark,
        *(bar(reported[name], arm) for name in WORLDS if arm in arms_of(reported[name])),
        *(seeds_table(reported[name]) for name in WORLDS),
        *(against_sdpo(reported[name]) for name in WORLDS),
        f"The seeds of the choice, after {ending.steps} steps:",
        *(seeds_table(choice[name]) for name in WORLDS),
        *told_later(ending),
    ]


def told_later(ending: Ending) -> list[str]:
    """The runs of the choice at their own end, where that lies after the reported runs'."""
    steps = ending.choice["plain"].runs[0].config["max_steps"]
    if steps == ending.steps:
        return []
    return [
        f"The same runs after {steps} steps. Arms that meet every line then: {listed(able(ending.choice))}.",
        *(seeds_table(ending.choice[name]) for name in WORLDS),
    ]


def listed(scores: Mapping[str, float]) -> str:
    return ", ".join(f"`{name}` {100 * score:.1f}" for name, score in scores.items()) or "none"


def told_fallen(endings: Sequence[Ending]) -> list[str]:
    """How many of all these runs fell apart, by the kind of teacher."""
    worlds = [world for ending in endings for group in (ending.choice, ending.reported) for world in group.values()]
    lines = []
    for method, kind in product(TOLD, KINDS):
        of_method = [run for world in worlds for run in world.runs if run.arm.split()[0] == method]
        runs = [run for run in of_method if run.config["teacher_model_kind"] == kind]
        fallen = sum(final_mean(run, "known") < FALLEN for run in runs)
        lines.append([TOLD[method], KINDS[kind], str(len(runs)), str(fallen)])
    return [
        "## Runs that fell apart",
        f"Of all runs of the recipes above, choices included, those whose accuracy on known cues ended below "
        f"{100 * FALLEN:g} %:",
        table(("method", "teacher", "runs", "fell apart"), lines),
    ]


def able(choice: Mapping[str, World]) -> dict[str, float]:
    """The arms that meet every line of the bar in all worlds, and their mean accuracy on unknown cues."""
    arms = [arm for arm in arms_of(choice["shortcut"]) if arm.startswith("CREDIT")]
    return {arm: mean_unknown(choice, arm) for arm in arms if all(meets(world, arm) for world in choice.values())}


def chosen(choice: Mapping[str, World]) -> str | None:
    """The arm that the rule picks."""
    scores = able(choice)
    close = [arm for arm, score in scores.items() if score >= max(scores.values()) - CLOSE]
    planted = {a: sum(choice["shortcut"].mean(a, group, "shortcut") for group in GROUPS) for a in close}
    return min(close, key=lambda arm: (planted[arm], len(arm), arm), default=None)


def mean_unknown(choice: Mapping[str, World], arm: str) -> float:
    return sum(interval(world, arm, "unknown")[0] for world in choice.values()) / len(choice)
