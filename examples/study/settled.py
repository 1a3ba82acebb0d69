"""Hold-out cues without the luck of their labels, where learning has settled and before.

Writes docs/settled_study.md, and the numbers of every run beside it, from the runs of the sweeps `settled` and
`long_relabelled`.
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
COLUMNS = (*GROUPS, GROUP, "format unknown", "format holdout", f"format {GROUP}", "shortcut")
SWEEPS = {"settled": "Until learning has settled", "long_relabelled": "After 100 steps at twice the rate"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output_dir", type=Path, default=Path("runs/study"))
    parser.add_argument("--docs", type=Path, default=HERE.parents[1] / "docs")
    args = parser.parse_args()
    sweeps = {sweep: read_sweep(args.output_dir, sweep) for sweep in SWEEPS}
    write_atomically(args.docs / "settled_study.md", page(sweeps))
    write_atomically(args.docs / "study" / "settled.csv", every_run(sweeps))
    print(args.docs / "settled_study.md")


def read_sweep(root: Path, sweep: str) -> dict[str, World]:
    """The worlds that a sweep was run in."""
    folders = {name: root / f"{name}-{sweep}" for name in WORLDS}
    return {name: read_world(name, folder, task=NAME) for name, folder in folders.items() if folder.is_dir()}


def page(sweeps: Mapping[str, Mapping[str, World]]) -> str:
    parts = ["# Hold-out cues without luck", introduction()]
    for sweep, worlds in sweeps.items():
        if worlds:
            parts += [f"## {SWEEPS[sweep]}", recipe_of(*worlds.values()), *told(worlds)]
    return "\n\n".join(parts) + "\n"


def told(worlds: Mapping[str, World]) -> list[str]:
    """The bar for every setting of the contrast, and what each seed did."""
    settings = dict.fromkeys(arm for world in worlds.values() for arm in arms_of(world) if arm.startswith("CREDIT"))
    having = [(world, arm) for arm in settings for world in worlds.values() if arm in arms_of(world)]
    return [
        *(bar(world, arm) for world, arm in having),
        *(bar_where_standing(world, arm) for world, arm in having if fallen_seeds(world)),
        *(seeds_table(world) for world in worlds.values()),
        fallen(worlds),
    ]


def introduction() -> str:
    return (
        "Written by `examples/study/settled.py` from the run directories; no measured number in it was typed by hand. "
        "In [Forms of the contrast, measured](forms_study.md#at-the-end-of-learning) the twelve hold-out cues are "
        "right or wrong by luck, for all prompts of a cue alike, and intervals are wide. Here a group of prompts is "
        f"added, `{GROUP}`: every hold-out cue under each of the twelve topics in turn, four prompts each. What a "
        "hold-out cue is about is a label that nothing was trained on, so the expectation is that of the hold-out "
        "prompts; the luck of twelve draws is gone.\n\n"
        "SDPO has the frozen teacher of the settings beside it, so that they differ in the contrast alone (and in the "
        "rate, where it is named). avg@4 at temperature 0.6; 64 rollouts a step for every arm. The numbers of every "
        "run are in [settled.csv](study/settled.csv)."
    )


def fallen_seeds(world: World) -> list[int]:
    """The seeds on which a run of SDPO ended without what its base knew."""
    runs = [run for arm in baselines_of(world) for run in world.of(arm)]
    return sorted({run.seed for run in runs if final_mean(run, "known") < FALLEN})


def bar_where_standing(world: World, arm: str) -> str:
    lost = fallen_seeds(world)
    rest = world_of(world.name, [run for run in world.runs if run.seed not in lost], world.task)
    return (
        f"In the {world.name} world SDPO fell apart on {len(lost)} of the seeds ({', '.join(map(str, lost))}): the "
        "mean gains by them, and the interval widens. Without them, which can only be harder for the setting:\n\n"
        f"{bar(rest, arm)}"
    )


def fallen(worlds: Mapping[str, World]) -> str:
    """How many runs of every arm ended without what the base knew."""
    lines = []
    for arm in dict.fromkeys(arm for world in worlds.values() for arm in arms_of(world)):
        runs = [run for world in worlds.values() for run in world.of(arm)]
        lost = sum(final_mean(run, "known") < FALLEN for run in runs)
        lines.append([arm, KINDS[runs[0].config["teacher_model_kind"]], str(len(runs)), str(lost)])
    told = f"Runs whose accuracy on known cues ended below {100 * FALLEN:g} %:"
    return f"{told}\n\n{table(('arm', 'teacher', 'runs', 'fell apart'), lines)}"


def every_run(sweeps: Mapping[str, Mapping[str, World]]) -> str:
    """A row a run, as CSV: sweep, world, arm, seed and its final means."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(("sweep", "world", "arm", "seed", *COLUMNS))
    for sweep, worlds in sweeps.items():
        runs = [(world, run) for world in worlds.values() for arm in arms_of(world) for run in world.of(arm)]
        for world, run in runs:
            rows.writerow((sweep, world.name, run.arm, run.seed, *(f"{final_mean(run, c):.4f}" for c in COLUMNS)))
    return text.getvalue()


if __name__ == "__main__":
    main()
