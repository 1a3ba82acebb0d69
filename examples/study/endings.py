"""Sections on runs to the end of learning: a setting is chosen on some seeds and tested on others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from bars import against_sdpo, arms_of, bar, final_mean, interval, meets, seeds_table
from report import table
from worlds import GROUPS, WORLDS, World, read_sweep_worlds, world_at

CLOSE = 0.01  # arms within this of the best accuracy count as equal
COLLAPSED = 0.5  # accuracy on known cues below which a run has collapsed
TEACHERS = {"ema": "averaged", "base": "frozen"}  # teacher_model_kind
METHODS = {"SDPO": "SDPO", "CREDIT": "guide"}  # all CREDIT arms of these sweeps use the guide form


@dataclass(frozen=True)
class Ending:
    """One recipe: the runs on which a setting was chosen, and the reported runs."""

    title: str
    remark: str  # when the rule and the arms were fixed
    choice: Mapping[str, World]  # may be longer than the reported runs
    reported: Mapping[str, World]

    @property
    def steps(self) -> int:
        """Steps of the reported runs. The rule reads the runs of the choice at this step."""
        return next(iter(self.reported.values())).runs[0].config["max_steps"]

    @property
    def chosen_on(self) -> dict[str, World]:
        return {name: world_at(world, self.steps) for name, world in self.choice.items()}


# Sweep, title and remark. The arm is chosen on the sweep with the suffix "_choice".
SWEEPS = (
    (
        "long",
        "At the end of learning",
        "SDPO with the frozen teacher was added as a second baseline after the shorter recipe below. The rule was "
        "fixed before the first run of this choice ended, except for the step at which it reads these runs: at their "
        "own end hold-out accuracy had dropped, so they are read at step 100, up to which their learning rate is "
        "constant. The reported seeds had not been run before. [Another sweep](settled.md) measures hold-out cues "
        "without the noise of their twelve labels.",
    ),
    (
        "end",
        "A shorter recipe",
        "The rule was fixed after the first runs of the choice had ended. The frozen teacher was added to the choice "
        "after guide had lost its format there. The reported seeds had not been run before.",
    ),
)


def read_endings(root: Path) -> list[Ending]:
    """The recipes that have reported runs."""
    found = [
        Ending(title, remark, read_sweep_worlds(root, f"{sweep}_choice"), read_sweep_worlds(root, sweep))
        for sweep, title, remark in SWEEPS
    ]
    return [ending for ending in found if ending.reported]


def recipe_of(*worlds: World) -> str:
    """One sentence with seeds, steps and learning rate of a sweep."""
    runs = [run for world in worlds for run in world.runs]
    seeds, config = ", ".join(map(str, sorted({run.seed for run in runs}))), runs[0].config
    return (
        f"Seeds {seeds}, each with its own base model; {config['max_steps']} steps, learning rate "
        f"{config['learning_rate']:g}, {schedule_of(config)} after {config['warmup_steps']} warm-up steps."
    )


def schedule_of(config: Mapping) -> str:
    if config["lr_scheduler_type"] == "warmup_stable_decay":
        return f"constant up to a decay in the last {config['lr_scheduler_kwargs']['num_decay_steps']} steps,"
    return "decaying linearly" if config["lr_scheduler_type"] == "linear" else "constant"


def ending_section(ending: Ending) -> list[str]:
    """The rule, the arm that it chooses, and this arm's results on the reported seeds."""
    reported, choice = ending.reported, ending.chosen_on
    arm = chosen(choice)
    return [
        f"## {ending.title}",
        f"{recipe_of(*reported.values())} For the choice: {recipe_of(*ending.choice.values())}",
        f"Rule: of the arms whose means meet every line of the bar in both worlds, those within {100 * CLOSE:g} point "
        "of the best accuracy on unknown cues (mean of both worlds), and of these the one with the lowest rate of the "
        f"planted thought over all cues. Arms that meet every line, and their accuracy: {listed(qualified(choice))}. "
        f"Chosen: `{arm}`.",
        ending.remark,
        *(bar(reported[name], arm) for name in WORLDS if arm in arms_of(reported[name])),
        *(seeds_table(reported[name]) for name in WORLDS),
        *(against_sdpo(reported[name]) for name in WORLDS),
        f"The seeds of the choice, after {ending.steps} steps:",
        *(seeds_table(choice[name]) for name in WORLDS),
        *later_section(ending),
    ]


def later_section(ending: Ending) -> list[str]:
    """The runs of the choice at their own end, if they are longer than the reported runs."""
    steps = ending.choice["plain"].runs[0].config["max_steps"]
    if steps == ending.steps:
        return []
    return [
        f"The same runs after {steps} steps. Arms that meet every line then: {listed(qualified(ending.choice))}.",
        *(seeds_table(ending.choice[name]) for name in WORLDS),
    ]


def listed(scores: Mapping[str, float]) -> str:
    return ", ".join(f"`{name}` {100 * score:.1f}" for name, score in scores.items()) or "none"


def collapsed_section(endings: Sequence[Ending]) -> list[str]:
    """Number of collapsed runs by method and teacher."""
    worlds = [world for ending in endings for group in (ending.choice, ending.reported) for world in group.values()]
    lines = []
    for method, kind in product(METHODS, TEACHERS):
        of_method = [run for world in worlds for run in world.runs if run.arm.split()[0] == method]
        runs = [run for run in of_method if run.config["teacher_model_kind"] == kind]
        collapsed = sum(final_mean(run, "known") < COLLAPSED for run in runs)
        lines.append([METHODS[method], TEACHERS[kind], str(len(runs)), str(collapsed)])
    return [
        "## Collapsed runs",
        f"Runs of the recipes above, including those of the choices, whose accuracy on known cues ended below "
        f"{100 * COLLAPSED:g} %:",
        table(("method", "teacher", "runs", "collapsed"), lines),
    ]


def qualified(choice: Mapping[str, World]) -> dict[str, float]:
    """Mean accuracy on unknown cues of the arms that meet every threshold in all worlds."""
    arms = [arm for arm in arms_of(choice["shortcut"]) if arm.startswith("CREDIT")]
    return {arm: mean_unknown(choice, arm) for arm in arms if all(meets(world, arm) for world in choice.values())}


def chosen(choice: Mapping[str, World]) -> str | None:
    """The arm that the rule chooses, or None."""
    scores = qualified(choice)
    close = [arm for arm, score in scores.items() if score >= max(scores.values()) - CLOSE]
    planted = {a: sum(choice["shortcut"].mean(a, group, "shortcut") for group in GROUPS) for a in close}
    return min(close, key=lambda arm: (planted[arm], len(arm), arm), default=None)


def mean_unknown(choice: Mapping[str, World], arm: str) -> float:
    return sum(interval(world, arm, "unknown")[0] for world in choice.values()) / len(choice)
