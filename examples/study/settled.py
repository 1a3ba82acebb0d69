"""The chosen setting where learning has settled, and hold-out cues without the luck of their labels.

Writes docs/settled_study.md, and the numbers of every run beside it, from the runs of the sweep `settled`.
"""

from __future__ import annotations

import argparse
import csv
import io
from collections.abc import Mapping
from pathlib import Path

from bars import arms_of, bar, baselines_of, final_mean, seeds_table
from endings import FALLEN, KINDS, recipe_of
from relabelled import GROUP, NAME
from report import table
from results import GROUPS, WORLDS, World, read_world, world_of

from credit_trl.run_directory import write_atomically

HERE = Path(__file__).parent
SETTING = "CREDIT form=guide λ=1.5 teacher_model_kind=base"  # what long_choice.yaml's runs chose
COLUMNS = (*GROUPS, GROUP, "format unknown", "format holdout", f"format {GROUP}", "shortcut")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output_dir", type=Path, default=Path("runs/study"))
    parser.add_argument("--docs", type=Path, default=HERE.parents[1] / "docs")
    args = parser.parse_args()
    worlds = {name: read_world(name, args.output_dir / f"{name}-settled", task=NAME) for name in WORLDS}
    write_atomically(args.docs / "settled_study.md", page(worlds))
    write_atomically(args.docs / "study" / "settled.csv", every_run(worlds))
    print(args.docs / "settled_study.md")


def page(worlds: Mapping[str, World]) -> str:
    parts = [
        "# The chosen setting, settled",
        introduction(worlds),
        "## The bar",
        *(bar(world, SETTING) for world in worlds.values()),
        *(bar_where_standing(world) for world in worlds.values() if fallen_seeds(world)),
        "## Every seed",
        *(seeds_table(world) for world in worlds.values()),
        fallen(worlds),
    ]
    return "\n\n".join(parts) + "\n"


def introduction(worlds: Mapping[str, World]) -> str:
    return (
        "Written by `examples/study/settled.py` from the run directories; no measured number in it was typed by hand. "
        "The runs of [Forms of the contrast, measured](forms_study.md#at-the-end-of-learning) end while unknown cues "
        "are still being learnt in some seeds, and their twelve hold-out cues are right or wrong by luck: intervals "
        f"are wide. Here learning settles, and a group of prompts is added, `{GROUP}`: every hold-out cue under each "
        "of the twelve topics in turn, four prompts each. What a hold-out cue is about is a label that nothing was "
        "trained on, so the expectation is that of the hold-out prompts; the luck of twelve draws is gone.\n\n"
        f"{recipe_of(*worlds.values())} The setting is the one that the longest runs there chose; SDPO has the same "
        "frozen teacher, so that the two differ in the contrast alone. avg@4 at temperature 0.6; 64 rollouts a step "
        "for every arm. The numbers of every run are in [settled.csv](study/settled.csv)."
    )


def fallen_seeds(world: World) -> list[int]:
    """The seeds on which a run of SDPO ended without what its base knew."""
    runs = [run for arm in baselines_of(world) for run in world.of(arm)]
    return sorted({run.seed for run in runs if final_mean(run, "known") < FALLEN})


def bar_where_standing(world: World) -> str:
    lost = fallen_seeds(world)
    rest = world_of(world.name, [run for run in world.runs if run.seed not in lost], world.task)
    return (
        f"In the {world.name} world SDPO fell apart on {len(lost)} of the seeds ({', '.join(map(str, lost))}): the "
        "mean gains by them, and the interval widens. Without them, which can only be harder for the setting:\n\n"
        f"{bar(rest, SETTING)}"
    )


def fallen(worlds: Mapping[str, World]) -> str:
    """How many runs of every arm ended without what the base knew."""
    lines = []
    for arm in arms_of(next(iter(worlds.values()))):
        runs = [run for world in worlds.values() for run in world.of(arm)]
        lost = sum(final_mean(run, "known") < FALLEN for run in runs)
        lines.append([arm, KINDS[runs[0].config["teacher_model_kind"]], str(len(runs)), str(lost)])
    told = f"Runs whose accuracy on known cues ended below {100 * FALLEN:g} %:"
    return f"{told}\n\n{table(('arm', 'teacher', 'runs', 'fell apart'), lines)}"


def every_run(worlds: Mapping[str, World]) -> str:
    """A row a run, as CSV: world, arm, seed and its final means."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(("world", "arm", "seed", *COLUMNS))
    for world in worlds.values():
        for arm in arms_of(world):
            rows.writerows(
                (world.name, arm, run.seed, *(f"{final_mean(run, name):.4f}" for name in COLUMNS))
                for run in world.of(arm)
            )
    return text.getvalue()


if __name__ == "__main__":
    main()
