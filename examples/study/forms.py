"""Forms of the contrast: what was chosen on seeds of its own, and what came of it on the seeds that are reported.

Writes docs/forms_study.md from the run directories: of the first two worlds the sweeps `choice`, `forms`, `controls`
and those to the end of learning, of the two worlds that were made for this question `methods` and `long`, and of all
four `cross`.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

from bars import SHORTCUT_LIMIT, against_sdpo, arms_of, arms_table, bar, interval, seeds_table
from crossed import read_crossed, told_crossed
from crossed_figure import cross_figure
from endings import CLOSE, Ending, mean_unknown, read_endings, recipe_of, told, told_fallen
from report import LONGER, table
from results import TASK, WORLDS, World, of_sweep, read_world

from credit_trl.lab.comparison.figures import THEMES
from credit_trl.training.run_directory import write_atomically

HERE = Path(__file__).parent
GUIDE = "CREDIT form=guide λ=1"
RUNNER_UP = f"{GUIDE} plausibility=0.01"
CHOSEN_AT_THE_END = "CREDIT form=guide λ=1.5 teacher_model_kind=base"  # in the first two worlds, for `long`

# Ranges over seeds that a prototype of another code saw after its choice was made, rounded to two digits.
PROTOTYPE = HERE / "prototype.csv"
ROUNDING = 0.005


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
    reported = {name: read_world(name, *(root / f"{name}-{sweep}" for sweep in LONGER)) for name in WORLDS}
    tasks = {name: task for name, (task, _) in NEW_WORLDS.items() if (root / name).is_dir()}
    new = {name: read_world(name, root / name, task=task) for name, task in tasks.items()}
    long = {name: root / f"{name}-long" for name in tasks}
    later = {name: read_world(name, there, task=tasks[name]) for name, there in long.items() if there.is_dir()}
    crossed = read_crossed(root, dict.fromkeys(WORLDS, TASK) | tasks)
    text = page(reported, of_sweep(root, "choice"), read_endings(root), new, later, crossed)
    write_atomically(args.docs / "forms_study.md", text)
    for theme in THEMES:
        if image := cross_figure(crossed, theme):
            (args.docs / "study").mkdir(exist_ok=True)
            (args.docs / "study" / f"cross-{theme.name}.png").write_bytes(image)
    print(args.docs / "forms_study.md")


def page(
    reported: Mapping[str, World],
    choice: Mapping[str, World],
    endings: Sequence[Ending],
    new: Mapping[str, World],
    later: Mapping[str, World],
    crossed: Mapping[str, World],
) -> str:
    parts = ["# Forms of the contrast, measured", introduction(reported, choice)]
    for ending in endings:
        parts += told(ending)
    if endings:
        parts += told_fallen(endings)
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
    if later:
        parts += [
            "## The new worlds at the end of learning",
            "The recipe and the setting that were chosen in the first two worlds, beside SDPO with either teacher. "
            "The bar is that of those worlds.",
        ]
    for world in later.values():
        parts += [recipe_of(world), bar(world, CHOSEN_AT_THE_END), seeds_table(world), against_sdpo(world)]
    if crossed:
        parts += told_crossed(crossed)
    return "\n\n".join(parts) + "\n"


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
