"""Forms of the contrast: what was chosen on seeds of its own, and what came of it on the seeds that are reported.

Writes docs/forms_study.md from the run directories: the sweeps `methods`, `choice`, `forms`, `end_choice` and `end` of
the first two worlds and `methods` of the two that were made for this question.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

from bars import SHORTCUT_LIMIT, against_sdpo, arms_of, arms_table, bar, interval, meets, seeds_table
from report import LONGER, table
from results import GROUPS, TASK, WORLDS, World

from credit_trl.comparison import compare
from credit_trl.run_directory import write_atomically

HERE = Path(__file__).parent
GUIDE = "CREDIT form=guide λ=1"
RUNNER_UP = f"{GUIDE} plausibility=0.01"

# Ranges over seeds that a prototype of another code saw after its choice was made, rounded to two digits.
PROTOTYPE = HERE / "prototype.csv"
ROUNDING = 0.005
CLOSE = 0.01


# The worlds that no prototype has seen: their tasks, and what "shortcut" counts there.
NEW_WORLDS = {
    "style": (
        "quickstart",
        "The tool calls again. After feedback the base opens its thought with `sure,`, under any input. The thought "
        "stays whole and the call too, so **no reward is against it**; “shortcut” is the rate of the opening.",
    ),
    "programs": (
        "programs.task:TASK",
        "Small programs with a unit test as feedback (`examples/study/programs`). Shown the test, the base takes the "
        "first operation on offer in four cases of ten, whatever the test says: a position bias of the answer, which "
        "costs reward. “shortcut” is the rate of programs that take the first operation where that is wrong. "
        "Three earlier designs of this task were given up: in one the feedback meant nearly the same under any "
        "prompt, in two the base did not learn to look it up. No arm was trained on them.",
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output_dir", type=Path, default=Path("runs/study"))
    parser.add_argument("--docs", type=Path, default=HERE.parents[1] / "docs")
    args = parser.parse_args()
    root = args.output_dir
    folders = {name: filter(Path.is_dir, [root / f"{name}-{sweep}" for sweep in LONGER]) for name in WORLDS}
    reported = {name: read(name, list(of_world)) for name, of_world in folders.items()}
    choice, end_choice, end = (of_sweep(root, sweep) for sweep in ("choice", "end_choice", "end"))
    new = {name: read(name, [root / name], task) for name, (task, _) in NEW_WORLDS.items() if (root / name).is_dir()}
    write_atomically(args.docs / "forms_study.md", page(reported, choice, end_choice, end, new))
    print(args.docs / "forms_study.md")


def of_sweep(root: Path, sweep: str) -> dict[str, World]:
    """The first two worlds' runs of a sweep, as far as there are any."""
    return {name: read(name, [root / f"{name}-{sweep}"]) for name in WORLDS if (root / f"{name}-{sweep}").is_dir()}


def read(name: str, folders: Sequence[Path], task: str = TASK) -> World:
    measures = (compare(folders, measure=one, baseline="SDPO") for one in ("score", "format", "shortcut"))
    return World(name, *measures, task=task)


def page(
    reported: Mapping[str, World],
    choice: Mapping[str, World],
    end_choice: Mapping[str, World],
    end: Mapping[str, World],
    new: Mapping[str, World],
) -> str:
    parts = ["# Forms of the contrast, measured", introduction(reported, choice)]
    if end:
        parts += end_told(end_choice, end)
    if choice:
        parts += ["## A first choice", choice_told(choice), *(seeds_table(world) for world in choice.values())]
    steps, rate = (reported["plain"].runs[0].config[name] for name in ("max_steps", "learning_rate"))
    parts += [
        "## The prototype's confirmed rows, again",
        "A row's number **agrees** when its 95 % interval here meets the range over seeds that the prototype saw, "
        f"and **differs** otherwise. The runs here have {steps} steps at {rate:g} in both worlds, the prototype's 60 "
        "in the shortcut world and 100 in the plain one, so unknown cues are expected to lie lower.",
        *(rows_table(reported[name]) for name in WORLDS),
        "## Half-way through learning",
        f"`{GUIDE}` is what the first rule chose; `{RUNNER_UP}` was eligible too.",
        *(bar(reported[name], arm) for arm in (GUIDE, RUNNER_UP) for name in WORLDS),
        *(arms_table(reported[name]) for name in WORLDS),
        *(against_sdpo(world) for world in reported.values()),
    ]
    if new:
        parts.append("## Two worlds that were not chosen on")
    for name, world in new.items():
        parts += [NEW_WORLDS[name][1], recipe_of(world), arms_table(world), against_sdpo(world)]
    return "\n\n".join(parts) + "\n"


def recipe_of(*worlds: World) -> str:
    """Seeds, steps and learning rate of a sweep."""
    runs = [run for world in worlds for run in world.runs]
    seeds, config = ", ".join(map(str, sorted({run.seed for run in runs}))), runs[0].config
    schedule = "decaying linearly" if config["lr_scheduler_type"] == "linear" else "constant"
    return (
        f"Seeds {seeds}, each with a base of its own; {config['max_steps']} steps, learning rate "
        f"{config['learning_rate']:g}, {schedule} after {config['warmup_steps']} warm-up steps."
    )


def end_told(end_choice: Mapping[str, World], end: Mapping[str, World]) -> list[str]:
    """What was chosen among runs to the end of learning, and the bar on other seeds."""
    listed = ", ".join(f"`{arm}` {100 * score:.1f}" for arm, score in able_at_the_end(end_choice).items())
    arm = chosen_at_the_end(end_choice)
    return [
        "## At the end of learning",
        f"{recipe_of(*end.values())} For the choice: {recipe_of(*end_choice.values())}",
        "Rule: of the arms whose means meet every line of the bar in both worlds, those within "
        f"{100 * CLOSE:g} point of the best accuracy on unknown cues (mean of both worlds), and of these the one "
        f"with the lowest rate of the planted thought over all cues. Arms that meet every line, and their accuracy: "
        f"{listed or 'none'}. Chosen: `{arm}`.",
        "The rule was written down when the first runs of the choice were known, and the frozen teacher was added to "
        "the choice after guide had lost its form there. The reported seeds were not looked at before.",
        *(bar(end[name], arm) for name in WORLDS if arm in arms_of(end[name])),
        *(seeds_table(end[name]) for name in WORLDS),
        *(against_sdpo(end[name]) for name in WORLDS),
        "The seeds of the choice:",
        *(seeds_table(end_choice[name]) for name in WORLDS),
    ]


def able_at_the_end(end_choice: Mapping[str, World]) -> dict[str, float]:
    """The arms that meet every line of the bar, and their mean accuracy on unknown cues."""
    arms = [arm for arm in arms_of(end_choice["shortcut"]) if arm != "SDPO"]
    able = [arm for arm in arms if all(meets(world, arm) for world in end_choice.values())]
    return {arm: mean_unknown(end_choice, arm) for arm in able}


def chosen_at_the_end(end_choice: Mapping[str, World]) -> str | None:
    """The arm that the rule picks among runs to the end of learning."""
    scores = able_at_the_end(end_choice)
    close = [arm for arm, score in scores.items() if score >= max(scores.values()) - CLOSE]
    planted = {a: sum(end_choice["shortcut"].mean(a, group, "shortcut") for group in GROUPS) for a in close}
    return min(close, key=lambda arm: (planted[arm], len(arm), arm), default=None)


def introduction(reported: Mapping[str, World], choice: Mapping[str, World]) -> str:
    text = (
        "Written by `examples/study/forms.py` from the run directories; no measured number in it was typed by hand. "
        "Tasks and evaluation are those of [the study](study.md): avg@4 at temperature 0.6; 64 rollouts a step for "
        f"every arm. Reported beside the study's own arms: {recipe_of(*reported.values())}"
    )
    if choice:
        text += f" First choice: {recipe_of(*choice.values())} Seeds of a choice are in no reported number."
    return text


def choice_told(choice: Mapping[str, World]) -> str:
    """The rule of the choice, and what it picks among the arms that were looked at."""
    scores = {arm: mean_unknown(choice, arm) for arm in eligible(choice)}
    listed = ", ".join(f"`{arm}` {100 * scores[arm]:.1f}" for arm in sorted(scores, key=scores.__getitem__)[::-1])
    return (
        f"Rule: of the arms whose rate of the planted thought is at most {SHORTCUT_LIMIT:g} on unknown cues, those "
        f"within {100 * CLOSE:g} point of the best accuracy on unknown cues (mean of both worlds), and of these the "
        f"one with the fewest options away from `{GUIDE}`. Eligible, in per cent: {listed or 'none'}. "
        f"Chosen: `{chosen(choice)}`."
    )


def chosen(choice: Mapping[str, World]) -> str | None:
    """The arm that the rule picks."""
    scores = {arm: mean_unknown(choice, arm) for arm in eligible(choice)}
    close = [arm for arm, score in scores.items() if score >= max(scores.values()) - CLOSE]
    return min(close, key=lambda arm: (len(set(arm.split()) ^ set(GUIDE.split())), -scores[arm]), default=None)


def eligible(choice: Mapping[str, World]) -> list[str]:
    """Arms of the choice without the shortcut."""
    world = choice["shortcut"]
    return [arm for arm in arms_of(world) if interval(world, arm, "shortcut")[0] <= SHORTCUT_LIMIT]


def mean_unknown(choice: Mapping[str, World], arm: str) -> float:
    return sum(interval(world, arm, "unknown")[0] for world in choice.values()) / len(choice)


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


if __name__ == "__main__":
    main()
