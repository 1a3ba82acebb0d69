"""Write results/forms.md: forms of the contrast, chosen on some seeds and reported on others.

Reads the sweeps `choice`, `forms`, `controls`, `end` and `long` of the first two worlds, `methods` and `long` of the
other two, and `cross` of all four.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from bars import SHORTCUT_LIMIT, against_sdpo, arms_of, arms_table, bar, interval, seeds_table
from crossed import crossed_section, read_crossed
from crossed_figure import cross_figure
from endings import CLOSE, Ending, collapsed_section, ending_section, mean_unknown, read_endings, recipe_of
from report import LONGER
from worlds import TASK, WORLDS, World, read_sweep_worlds, read_world

from credit_trl.lab.comparison.figures import THEMES
from credit_trl.training.run_directory import write_atomically

HERE = Path(__file__).parent
GUIDE = "CREDIT form=guide λ=1"
CHOSEN_AT_THE_END = "CREDIT form=guide λ=1.5 teacher_model_kind=base"  # by the sweep `long_choice`

# Worlds on which nothing was chosen: their task, and what "shortcut" counts there.
NEW_WORLDS = {
    "style": (
        "quickstart",
        "The tool-call task. After feedback the base opens its thought with `sure,` for any input. Thought and call "
        "stay intact, so **the reward does not penalize it**. “shortcut” is the rate of this opening.",
    ),
    "programs": (
        "programs.task:TASK",
        "Small programs with a unit test as feedback (`examples/study/programs`). With the test in its "
        "context, the base uses the first listed operation in four cases of ten, whatever the test expects: a "
        "position bias that costs reward. “shortcut” is the rate of programs that use the first operation where it is "
        "wrong. Three earlier designs of this task were abandoned before any arm was trained: in one the feedback "
        "meant nearly the same for every prompt, in two the base did not learn to look it up.",
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output_dir", type=Path, default=Path("runs/study"))
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder of the page and its figure")
    args = parser.parse_args()
    root = args.output_dir
    reported = {name: read_world(name, *(root / f"{name}-{sweep}" for sweep in LONGER)) for name in WORLDS}
    tasks = {name: task for name, (task, _) in NEW_WORLDS.items() if (root / name).is_dir()}
    new = {name: read_world(name, root / name, task=task) for name, task in tasks.items()}
    long = {name: root / f"{name}-long" for name in tasks}
    later = {name: read_world(name, there, task=tasks[name]) for name, there in long.items() if there.is_dir()}
    crossed = read_crossed(root, dict.fromkeys(WORLDS, TASK) | tasks)
    text = page(reported, read_sweep_worlds(root, "choice"), read_endings(root), new, later, crossed)
    write_atomically(args.results / "forms.md", text)
    for theme in THEMES:
        if image := cross_figure(crossed, theme):
            (args.results / f"cross-{theme.name}.png").write_bytes(image)
    print(args.results / "forms.md")


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
        parts += ending_section(ending)
    if endings:
        parts += collapsed_section(endings)
    if choice:
        parts += ["## A first choice", choice_summary(choice), *(seeds_table(world) for world in choice.values())]
    parts += [
        "## Half-way through learning",
        f"The first rule chose `{GUIDE}`.",
        *(bar(reported[name], GUIDE) for name in WORLDS),
        *(arms_table(reported[name]) for name in WORLDS),
        *(against_sdpo(world) for world in reported.values()),
    ]
    if new:
        parts.append("## Two worlds without a choice")
    for name, world in new.items():
        parts += [NEW_WORLDS[name][1], recipe_of(world), arms_table(world), against_sdpo(world)]
    if later:
        parts += [
            "## The new worlds at the end of learning",
            "The recipe and the setting chosen in the first two worlds, against SDPO with either teacher. The "
            "thresholds are those of the first two worlds.",
        ]
    for world in later.values():
        parts += [recipe_of(world), bar(world, CHOSEN_AT_THE_END), seeds_table(world), against_sdpo(world)]
    if crossed:
        parts += crossed_section(crossed)
    return "\n\n".join(parts) + "\n"


def introduction(reported: Mapping[str, World], choice: Mapping[str, World]) -> str:
    text = (
        "`examples/study/forms.py` writes this page from the run directories. Tasks and evaluation are those of "
        "[the embedded study](methods.md): avg@4 at temperature 0.6, 64 rollouts per step for every arm. "
        f"Reported: {recipe_of(*reported.values())}"
    )
    if choice:
        text += f" First choice: {recipe_of(*choice.values())} No reported number uses the seeds of a choice."
    return text


def choice_summary(choice: Mapping[str, World]) -> str:
    """The rule of the first choice, the eligible arms and the chosen one."""
    scores = {arm: mean_unknown(choice, arm) for arm in eligible(choice)}
    listed = ", ".join(f"`{arm}` {100 * scores[arm]:.1f}" for arm in sorted(scores, key=scores.__getitem__)[::-1])
    return (
        f"Rule: of the arms whose rate of the planted thought is at most {SHORTCUT_LIMIT:g} on unknown cues, those "
        f"within {100 * CLOSE:g} point of the best accuracy on unknown cues (mean of both worlds), and of these the "
        f"one with the fewest options away from `{GUIDE}`. Eligible, in per cent: {listed or 'none'}. "
        f"Chosen: `{chosen(choice)}`."
    )


def chosen(choice: Mapping[str, World]) -> str | None:
    """The arm that the first rule chooses, or None."""
    scores = {arm: mean_unknown(choice, arm) for arm in eligible(choice)}
    close = [arm for arm, score in scores.items() if score >= max(scores.values()) - CLOSE]
    return min(close, key=lambda arm: (len(set(arm.split()) ^ set(GUIDE.split())), -scores[arm]), default=None)


def eligible(choice: Mapping[str, World]) -> list[str]:
    """Arms of the choice whose shortcut rate is within the limit."""
    world = choice["shortcut"]
    return [arm for arm in arms_of(world) if interval(world, arm, "shortcut")[0] <= SHORTCUT_LIMIT]


if __name__ == "__main__":
    main()
