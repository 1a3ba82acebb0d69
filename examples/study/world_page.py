"""Write results/worlds.md from results/worlds.csv: the outcome of the worlds that were predicted before training."""

from __future__ import annotations

import argparse
import io
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from report import figure, table
from world_cues import CueRows, cue_rows_of_runs, read_cue_rows, resampled, write_cue_rows
from world_runs import Row, read_rows

from credit_trl.lab.comparison.figures import COLOURS, THEMES, Theme
from credit_trl.training.run_directory import write_atomically

HERE = Path(__file__).parent
MIN_FIDELITY, MIN_FORMAT = 0.95, 0.9  # of a run that is compared
MIN_BASES = 3  # of an interval
SDPO, CREDIT = "SDPO", "CREDIT λ=0.1"
RATE, ACCURACY = "thought_unknown", "accuracy_unknown"
LABELS = {
    "temper-only λ=0.1": "temper-only, λ = 0.1",
    "CREDIT form=guide λ=0.2": "guide, λ = 0.2",
    "hint-contrast λ=0.1": "hint-contrast, λ = 0.1",
}


class Cell(NamedTuple):
    """Mean over bases with its 95 % interval over bases and cues, which is NaN for less than three bases."""

    values: Sequence[float]
    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        if math.isnan(self.low):
            return ", ".join(f"{100 * value:.1f}" for value in self.values)
        return f"{100 * self.mean:.1f} [{100 * self.low:.1f}, {100 * self.high:.1f}]"


@dataclass(frozen=True)
class Outcome:
    """Rows of one arm by step and seed, for the bases on which it has finished, and their rates by cue."""

    arm: str
    rows: Mapping[int, Mapping[int, Row]]
    cues: Mapping[int, Mapping[int, Mapping[str, float]]]

    def values(self, step: int, name: str) -> list[float]:
        return [row[name] for row in self.rows[step].values()]

    def mean(self, step: int, name: str) -> Cell:
        return cell(self.values(step, name), [self.cues[step][seed] for seed in self.rows[step]], [], name)

    def is_sound(self, step: int) -> bool:
        """Whether no run has collapsed and every teacher still reads the feedback."""
        return all(is_sound(row) for row in self.rows[step].values())


@dataclass(frozen=True)
class World:
    """Finished arms of a world in the order of the table, and the steps that were evaluated."""

    outcomes: Sequence[Outcome]
    steps: Sequence[int]

    def arm(self, name: str) -> Outcome | None:
        return next((one for one in self.outcomes if one.arm == name), None)

    @property
    def seeds(self) -> list[int]:
        return sorted({seed for one in self.outcomes for seed in one.rows[self.steps[-1]]})

    @property
    def compared(self) -> int:
        """The last step at which all runs are sound, or the first one."""
        return max((s for s in self.steps if all(one.is_sound(s) for one in self.outcomes)), default=self.steps[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", type=Path, default=HERE / "results" / "worlds.csv", help="table of run.py --world")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/study"), help="that of run.py, for rates by cue")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder of the page and its figures")
    parser.add_argument("--note", default="", help="machine and version of the runs, for the page")
    args = parser.parse_args()
    file = args.csv.with_name(f"{args.csv.stem}_cues.csv")
    cues = read_cue_rows(file) | cue_rows_of_runs(args.output_dir / "weak", "weak")
    if cues:
        write_cue_rows(file, cues)
    world = world_of(read_rows(args.csv), cues, "weak")
    if not world.outcomes:
        sys.exit(f"{args.csv} has no finished run of the world 'weak': start `python run.py --world weak`.")
    for theme in THEMES:
        (args.results / f"weak-{theme.name}.png").write_bytes(rates_figure(world, theme))
    write_atomically(args.results / "worlds.md", page(world, args.note))
    print(args.results / "worlds.md")


def world_of(rows: Mapping[tuple[str, int, str, int], Row], cues: CueRows, name: str) -> World:
    """The finished runs of a world, which have a row for the last step and rates by cue."""
    own = {key[1:]: row for key, row in rows.items() if key[0] == name}
    steps = sorted({step for _, _, step in own if step > 0})
    found = []
    for arm in dict.fromkeys(arm for _, arm, _ in own):
        seeds = sorted(
            seed
            for seed, other, step in own
            if steps and (other, step) == (arm, steps[-1]) and (name, seed, arm, step) in cues
        )
        if seeds:
            by_step = {step: {seed: own[seed, arm, step] for seed in seeds} for step in (0, *steps)}
            by_cue = {step: {seed: cues[name, seed, arm, step] for seed in seeds} for step in steps}
            found.append(Outcome(arm, by_step, by_cue))
    return World(found, steps)


def page(world: World, note: str) -> str:
    parts = [
        "# A weak bias, predicted before training",
        introduction(world, note),
        figure("weak"),
        f"Planted thought on unknown cues after {world.compared} steps, the last evaluation at which no run had "
        "collapsed: a dot per base, a diamond for the mean with its 95 % interval, a bar for predicted end points.",
        arms_table(world),
        f"Per cent, mean over bases with its 95 % interval, which resamples bases and cues{few(world)}. "
        "Predicted: σ(ℓ\\*), the range over bases. It is the end point, and a far one is not reached in so few steps. "
        f"*Collapsed*: less than 90 % of the responses in the format. {fidelity(world)} All arms have the "
        "same learning rate, so SDPO and guide are at each other's.",
        differences_table(world),
        f"Differences in points after {world.compared} steps, paired by base.",
        criteria(world),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def introduction(world: World, note: str) -> str:
    rows = [row for one in world.outcomes if one.arm in (SDPO, CREDIT) for row in one.rows[0].values()]
    delta, s = ([row[name] for row in rows] for name in ("delta", "s"))
    critical = [d / (d + own) for d, own in zip(delta, s, strict=True)]
    seeds = ", ".join(map(str, world.seeds))
    return (
        "`examples/study/world_page.py` writes this page from [worlds.csv](worlds.csv), which has a row per base, arm "
        "and evaluated step, and from [worlds_cues.csv](worlds_cues.csv), which has their rates by cue. Pretraining "
        "plants `Thought: sure, this is simple.` in 5 % of the responses, and in 10 % "
        "of those to a prompt with the task's feedback. At the first token of the thought, δ is what the feedback "
        "adds to the log-odds of the planted thought against the cue, and s what a contrast prompt adds on top. Both "
        "are measured on each base before training. [Theory](../../../docs/theory.md): with a teacher that follows "
        "the policy, the log-odds end at ℓ\\* = δ(1 − λ)/λ − s; for SDPO and guide they have no limit, and the sign "
        "of δ − λ s decides.\n\n"
        f"Seeds {seeds}, each with its own base. Over bases: δ {span(delta, 2)}, s {span(s)}, λ_c = δ/(δ + s) "
        f"{span(critical, 3)}; {span([100 * row[RATE] for row in rows])} % of the base's responses to unknown cues "
        f"have the thought. {world.steps[-1]} steps of 64 rollouts, learning rate 7e-4, averaged teacher at rate "
        "0.05, feedback alone as privileged context. Rates are avg@4 at temperature 1, since the prediction is the "
        "policy's own rate." + (f" {note}" if note else "")
    )


def arms_table(world: World) -> str:
    last = world.steps[-1]
    steps = list(dict.fromkeys((world.compared, last)))
    head = ["arm", "bases", "predicted", *(f"thought, unknown, step {step}" for step in steps)]
    head += [f"known, {last}", f"hold-out, {last}", f"accuracy, unknown, {world.compared}", "collapsed"]
    lines = []
    for one in world.outcomes:
        rates = [str(one.mean(step, RATE)) for step in steps]
        rates += [str(one.mean(last, f"thought_{group}")) for group in ("known", "holdout")]
        collapsed = sum(row["format"] < MIN_FORMAT for row in one.rows[last].values())
        count = str(len(one.rows[last]))
        lines.append([label(one.arm), count, predicted(one), *rates, str(one.mean(world.compared, ACCURACY))])
        lines[-1].append(f"{collapsed} of {count}")
    return table(head, lines)


def differences_table(world: World) -> str:
    """Paired differences of every arm from SDPO, and of the controls from CREDIT at λ = 0.1."""
    arms = [one.arm for one in world.outcomes]
    pairs = [(arm, SDPO) for arm in arms if arm != SDPO]
    pairs += [(arm, CREDIT) for arm in arms if arm.startswith(("temper", "hint"))]
    names = [f"thought_{group}" for group in ("known", "unknown", "holdout")] + [ACCURACY]
    lines = []
    for first, second in pairs:
        one, other = world.arm(first), world.arm(second)
        if one and other and (seeds := shared(one, other, world.compared)):
            cells = [str(difference(one, other, world.compared, name)) for name in names]
            lines.append([f"{label(first)} − {label(second)}", str(len(seeds)), *cells])
    titles = ("thought, known", "thought, unknown", "thought, hold-out", "accuracy, unknown")
    return table(("arms", "bases", *titles), lines) if lines else ""


def criteria(world: World) -> str:
    """The criteria that were set before the runs, at the compared step and at the last one."""
    steps = list(dict.fromkeys((world.compared, world.steps[-1])))
    lines = []
    if (sdpo := world.arm(SDPO)) and (credit := world.arm(CREDIT)):
        lines.append(
            ["λ = 0.1 at a quarter or less of SDPO's rate"]
            + [counted(r <= o / 4 for r, o in paired(step, credit, sdpo)) for step in steps]
        )
        loss = [f"{difference(credit, sdpo, step, ACCURACY)} points" for step in steps]
        lines.append(["λ = 0.1: accuracy on unknown cues no lower by 3 points", *loss])
        if small := world.arm("CREDIT λ=0.05"):
            ordered = [counted(c < m < o for c, m, o in paired(step, credit, small, sdpo)) for step in steps]
            lines.append(["λ = 0.05 between λ = 0.1 and SDPO", *ordered])
    for name, title in ((CREDIT, "λ = 0.1"), ("CREDIT λ=0.2", "λ = 0.2")):
        if one := world.arm(name):
            inside = [counted(map(is_within, one.rows[step].values())) for step in steps]
            lines.append([f"{title}: rate inside the predicted 95 % band of its base", *inside])
            lines.append(
                [f"{title}: log-odds at the branch minus ℓ\\*, nats", *(from_fixed_point(one, s) for s in steps)]
            )
    if large := world.arm("CREDIT λ=0.2"):
        lines.append(
            ["λ = 0.2: rate at most 5 %", *(counted(r <= 0.05 for r in large.values(s, RATE)) for s in steps)]
        )
    head = ("criterion, for the rate on unknown cues", *(f"step {step}" for step in steps))
    return table(head, lines) if lines else ""


def is_sound(row: Row) -> bool:
    return row["format"] >= MIN_FORMAT and (row["teacher_fidelity"] is None or row["teacher_fidelity"] >= MIN_FIDELITY)


def is_within(row: Row) -> bool:
    return row["predicted_low"] <= row[RATE] <= row["predicted_high"]


def from_fixed_point(one: Outcome, step: int) -> str:
    """Range over bases of the log-odds minus their predicted end point."""
    return span([row["log_odds"] - row["predicted_log_odds"] for row in one.rows[step].values()])


def shared(one: Outcome, other: Outcome, step: int) -> list[int]:
    return [seed for seed in one.rows[step] if seed in other.rows[step]]


def paired(step: int, *outcomes: Outcome) -> list[tuple[float, ...]]:
    """Rates of the arms on each base that all of them have."""
    seeds = set.intersection(*(set(one.rows[step]) for one in outcomes))
    return [tuple(one.rows[step][seed][RATE] for one in outcomes) for seed in sorted(seeds)]


def difference(one: Outcome, other: Outcome, step: int, name: str) -> Cell:
    seeds = shared(one, other, step)
    values = [one.rows[step][seed][name] - other.rows[step][seed][name] for seed in seeds]
    return cell(values, [one.cues[step][seed] for seed in seeds], [other.cues[step][seed] for seed in seeds], name)


def cell(
    values: Sequence[float], cues: Sequence[Mapping[str, float]], others: Sequence[Mapping[str, float]], name: str
) -> Cell:
    """Cell of the values of each base, from their rates by cue and those to subtract, if any."""
    mean, low, high = resampled(cues, others, name)
    return Cell(values, mean, *((low, high) if len(values) >= MIN_BASES else (math.nan, math.nan)))


def few(world: World) -> str:
    fewest = min(len(one.rows[world.steps[-1]]) for one in world.outcomes)
    return "" if fewest >= MIN_BASES else f" (of less than {MIN_BASES} bases: the values)"


def counted(results: Iterable[bool]) -> str:
    found = list(results)
    return f"{sum(found)} of {len(found)} bases"


def fidelity(world: World) -> str:
    """Range of the teachers' fidelity at every step, and the comparison that it allows."""
    ranges, allowed = [], world.steps[0]
    for step in world.steps:
        found = [row["teacher_fidelity"] for one in world.outcomes for row in one.rows[step].values()]
        values = [value for value in found if value is not None]
        ranges.append(f"{span(values, 2)} after {step} steps")
        allowed = step if min(values) >= MIN_FIDELITY else allowed
    return (
        f"The averaged teacher's fidelity was {', '.join(ranges)}; the rule that every teacher reads at least "
        f"{100 * MIN_FIDELITY:.0f} % of the feedback right would end the comparison after {allowed} steps."
    )


def predicted(outcome: Outcome) -> str:
    found = [100 * row["predicted_rate"] for row in outcome.rows[0].values() if row["predicted_rate"] is not None]
    return span(found) if found else ""


def span(values: Sequence[float], digits: int = 1) -> str:
    low, high = (f"{value:.{digits}f}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def label(arm: str) -> str:
    return LABELS.get(arm, arm.replace("=", " = ").replace("CREDIT", "subtract,"))


def rates_figure(world: World, theme: Theme) -> bytes:
    """PNG of the thought's rate by arm at the compared step, with the predicted end points."""
    drawn = Figure(figsize=(7.6, 1.0 + 0.42 * len(world.outcomes)), facecolor=theme.background, layout="constrained")
    FigureCanvasAgg(drawn)
    axis = drawn.subplots()
    axis.set_facecolor(theme.background)
    for position, one in enumerate(world.outcomes):
        colour, rates = COLOURS[position % len(COLOURS)], [100 * rate for rate in one.values(world.compared, RATE)]
        found = [100 * row["predicted_rate"] for row in one.rows[0].values() if row["predicted_rate"] is not None]
        if found:
            width = max(max(found) - min(found), 0.8)
            left = min(min(found), 100 - width)
            axis.barh(position, width, left=left, height=0.75, color=theme.ink, alpha=0.3)
        axis.plot(rates, [position] * len(rates), "o", color=colour, alpha=0.5, ms=5, mew=0)
        mean, low, high = (100 * value for value in one.mean(world.compared, RATE)[1:])
        if not math.isnan(low):
            axis.plot([max(low, 0), min(high, 100)], [position, position], color=colour, lw=2)
        axis.plot(mean, position, "D", color=colour, ms=6)
    axis.set_yticks(range(len(world.outcomes)), [label(one.arm) for one in world.outcomes])
    axis.invert_yaxis()
    axis.set_xlim(-2, 102)
    axis.set_xlabel("rate of the planted thought on unknown cues, %", color=theme.ink, fontsize=9)
    axis.tick_params(colors=theme.ink, labelsize=8.5)
    axis.grid(True, axis="x", color=theme.grid, lw=0.6)
    for spine in axis.spines.values():
        spine.set_color(theme.grid)
    buffer = io.BytesIO()
    drawn.savefig(buffer, format="png", dpi=130, metadata={"Software": None})  # reproducible bytes
    return buffer.getvalue()


if __name__ == "__main__":
    main()
