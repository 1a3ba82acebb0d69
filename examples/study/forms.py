"""Forms of the contrast: what was chosen on seeds of its own, and what came of it on the seeds that are reported.

Writes docs/forms_study.md from the run directories: the sweeps `methods`, `choice` and `forms` of the first two worlds
and `methods` of the two that were made for this question.
"""

from __future__ import annotations

import argparse
import csv
import statistics
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
RUNNER_UP = f"{GUIDE} plausibility=0.01"
MEASURES = ("shortcut", "known", "unknown", "format unknown", "format holdout")


# Ranges over seeds that a prototype of another code saw after its choice was made, rounded to two digits.
PROTOTYPE = HERE / "prototype.csv"
ROUNDING = 0.005
SHORTCUT_LIMIT, CLOSE = 0.05, 0.01


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
    reported = {name: read(name, [root / name, root / f"{name}-forms"]) for name in WORLDS}
    choice = {name: read(name, [root / f"{name}-choice"]) for name in WORLDS if (root / f"{name}-choice").is_dir()}
    new = {name: read(name, [root / name], task) for name, (task, _) in NEW_WORLDS.items() if (root / name).is_dir()}
    write_atomically(args.docs / "forms_study.md", page(reported, choice, new))
    print(args.docs / "forms_study.md")


def read(name: str, folders: Sequence[Path], task: str = TASK) -> World:
    measures = (compare(folders, measure=one, baseline="SDPO") for one in ("score", "format", "shortcut"))
    return World(name, *measures, task=task)


def page(reported: Mapping[str, World], choice: Mapping[str, World], new: Mapping[str, World]) -> str:
    parts = ["# Forms of the contrast, measured", introduction(reported, choice)]
    if choice:
        parts += ["## The choice", choice_told(choice), *(seeds_table(world) for world in choice.values())]
    parts += [
        "## The prototype's confirmed rows, again",
        "A row's number **agrees** when its 95 % interval here meets the range over seeds that the prototype saw, and "
        "**differs** otherwise. The runs here have 60 steps in both worlds, the prototype's plain world had 100, so "
        "unknown cues there are expected to lie lower.",
        *(rows_table(reported[name]) for name in WORLDS),
        "## The bar",
        f"`{GUIDE}` is what the rule chose. `{RUNNER_UP}` was eligible too; it was run on the reported seeds after "
        "the chosen arm had missed a line there, so its numbers are a second look.",
        *(bar(reported[name], arm) for arm in (GUIDE, RUNNER_UP) for name in WORLDS),
        "## All arms on the reported seeds",
        *(arms_table(reported[name]) for name in WORLDS),
        *(against_sdpo(world) for world in reported.values()),
    ]
    if new:
        parts.append("## Two worlds that were not chosen on")
    for name, world in new.items():
        parts += [NEW_WORLDS[name][1], arms_table(world), against_sdpo(world)]
    return "\n\n".join(parts) + "\n"


def introduction(reported: Mapping[str, World], choice: Mapping[str, World]) -> str:
    def seeds(worlds: Mapping[str, World]) -> str:
        return ", ".join(map(str, sorted({run.seed for world in worlds.values() for run in world.runs})))

    text = (
        "Written by `examples/study/forms.py` from the run directories; no measured number in it was typed by hand. "
        "Tasks, budget and evaluation are those of [the study](study.md): avg@4 at temperature 0.6, 64 rollouts a "
        f"step for every arm. Reported seeds: {seeds(reported)}, each with a base of its own."
    )
    if choice:
        text += f" Seeds of the choice: {seeds(choice)}; they are in no reported number."
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
    arms = sorted({run.arm for run in world.runs})
    return [arm for arm in arms if interval(world, arm, "shortcut")[0] <= SHORTCUT_LIMIT]


def mean_unknown(choice: Mapping[str, World], arm: str) -> float:
    return sum(interval(world, arm, "unknown")[0] for world in choice.values()) / len(choice)


def interval(world: World, arm: str, measure: str) -> tuple[float, float, float]:
    """Mean and 95 % interval of one of MEASURES at the end of training."""
    kind, _, group = measure.rpartition(" ")
    comparison = world.shortcut if measure == "shortcut" else getattr(world, kind or "score")
    domain = f"{world.task}: {'unknown' if measure == 'shortcut' else group}"
    found = comparison.cells[arm, domain, FINAL].interval
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


def bar(world: World, arm: str) -> str:
    """One setting against what it has to reach; differences from SDPO are paired."""
    limits = [("known", ">=", 0.97), ("format unknown", ">=", 0.97), ("format holdout", ">=", 0.90)]
    if world.name == "shortcut":
        limits.insert(0, ("shortcut", "<=", 0.05))
    lines = []
    for measure, relation, limit in limits:
        mean, low, high = interval(world, arm, measure)
        met = mean <= limit if relation == "<=" else mean >= limit
        lines.append([measure, f"{relation} {limit:g}", f"{mean:.3f} [{low:.3f}, {high:.3f}]", told_met(met)])
    for group in GROUPS[1:]:
        found = world.contrast(arm, group)
        met = found.difference.low >= -0.02
        word = told_met(met) if met or found.difference.high < -0.02 else "not decided"
        lines.append([f"{group}, against SDPO", "no lower by more than .02", told(found), word])
    return f"`{arm}`, {world.name} world:\n\n{table(('what', 'bar', 'measured', ''), lines)}"


def told_met(met: bool) -> str:
    return "met" if met else "**missed**"


def measures_of(world: World) -> list[str]:
    return [*MEASURES[1:3], "holdout", *MEASURES[3:]] + ([] if world.name == "plain" else ["shortcut"])


def seeds_table(world: World) -> str:
    """Every arm's mean, with the number of each seed: for few seeds an interval says nothing."""
    names = measures_of(world)
    lines = []
    for arm in sorted({run.arm for run in world.runs}):
        lines.append([arm, *(by_seed(world, arm, name) for name in names)])
    return f"{world.name.capitalize()} world, %, final, mean (each seed):\n\n{table(('arm', *names), lines)}"


def by_seed(world: World, arm: str, measure: str) -> str:
    kind, _, group = measure.rpartition(" ")
    name, group = ("shortcut", "unknown") if measure == "shortcut" else (kind or "score", group)
    values = []
    for run in world.of(arm):
        scores, final = run.per_prompt(run.final_step(), name), run.final_step()
        inside = [prompt["id"] for prompt in run.prompts(final) if prompt["group"] == group]
        values.append(statistics.fmean(scores[prompt] for prompt in inside))
    return f"{100 * statistics.fmean(values):.1f} ({', '.join(f'{100 * value:.0f}' for value in values)})"


def arms_table(world: World) -> str:
    names = measures_of(world)
    lines = []
    for arm in sorted({run.arm for run in world.runs}):
        cells = [interval(world, arm, name) for name in names]
        lines.append([arm, *(f"{100 * mean:.1f} [{100 * low:.1f}, {100 * high:.1f}]" for mean, low, high in cells)])
    return f"{world.name.capitalize()} world, %, final:\n\n{table(('arm', *names), lines)}"


def against_sdpo(world: World) -> str:
    """Paired differences of every arm from SDPO: reward by group, and the shortcut on the unknown ones."""
    rows = [c for c in world.score.contrasts if c.when == FINAL and not c.domain.endswith(": known")]
    parts = [f"{world.name.capitalize()} world, reward against SDPO:", contrasts_table(rows)]
    if world.name != "plain":
        rates = [c for c in world.shortcut.contrasts if c.when == FINAL and c.domain.endswith(": unknown")]
        parts += [f"{world.name.capitalize()} world, shortcut against SDPO:", contrasts_table(rates)]
    return "\n\n".join(parts)


if __name__ == "__main__":
    main()
