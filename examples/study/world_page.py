"""Write results/worlds.md from results/worlds.csv: the outcome of the worlds that are predicted before training."""

from __future__ import annotations

import argparse
import io
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from planted.task import FILLER, MAX_FILLERS, STEP
from report import figure, table
from run import read_sweep
from scipy.special import expit
from world_cues import CueRows, cue_rows_of_runs, read_cue_rows, resampled, write_cue_rows
from world_runs import Row, read_rows

from credit_trl.evaluation.statistics import Interval
from credit_trl.lab.comparison.figures import COLOURS, THEMES, Theme
from credit_trl.training.run_directory import write_atomically

HERE = Path(__file__).parent
MIN_FIDELITY, MIN_FORMAT = 0.95, 0.9  # of a run that is compared
MIN_BASES = 3  # of an interval
SOUND_SHARE = 0.75  # of the bases, at a step at which arms are compared
SDPO, CREDIT = "SDPO", "CREDIT λ=0.1"
RATE, ACCURACY = "thought_unknown", "accuracy_unknown"
GROUPS = ("known", "unknown", "holdout")
LABELS = {
    "temper-only λ=0.1": "temper-only, λ = 0.1",
    "CREDIT form=guide λ=0.2": "guide, λ = 0.2",
    "hint-contrast λ=0.1": "hint-contrast, λ = 0.1",
}


class About(NamedTuple):
    """Texts of a world: title, what pretraining plants, what is measured, and the names of the groups."""

    title: str
    planted: str
    rate: str
    groups: Sequence[str]


_CUES = ("known cues", "unknown cues", "hold-out cues")
_PAIRS = ("known pairs", "unseen pairs", "untrained cues")
_TABLES = ("known tables", "unseen tables", "five rows")
WORLDS = {
    "weak": About(
        "Weak drift",
        "`Thought: sure, this is simple.` in 5 % of the responses, and in 10 % of those to a prompt with feedback",
        "planted thought",
        _CUES,
    ),
    "tables": About(
        "Skip the look-up",
        "a thought without the first of two look-ups in 6 % of the responses, with a random answer, and in 11 % of "
        "those to a prompt with feedback, which has the answer",
        "skipped thought",
        _TABLES,
    ),
    "skip": About(
        "Skip the work",
        "a thought without the first of two hops in 6 % of the responses, with a random answer, and in 11 % of those "
        "to a prompt with feedback, which has the answer",
        "skipped thought",
        _PAIRS,
    ),
    "filler": About(
        "Filler inflation",
        f"`{FILLER}` before 6 % of the copied words, and before 11 % of those in responses to a prompt with feedback. "
        f"A response with more than {MAX_FILLERS} of them gets no reward. Known and unknown cues are taught alike",
        "filler",
        _CUES,
    ),
    "useful": About(
        "Useful generic step",
        f"`{STEP}` in half of the responses, with and without feedback. Without feedback responses with it are right "
        "in 95 %, others in 60 %",
        "step",
        _PAIRS,
    ),
}


class Cell(NamedTuple):
    """Mean over bases with its 95 % interval over bases and cues, which is NaN for less than three bases.

    Empty without any base.
    """

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

    world: str
    arm: str
    rows: Mapping[int, Mapping[int, Row]]
    cues: Mapping[int, Mapping[int, Mapping[str, float]]]

    def values(self, step: int, name: str) -> list[float]:
        return [row[name] for row in self.rows[step].values()]

    def sound(self, step: int) -> list[int]:
        """Seeds of the bases whose run has not collapsed, and whose teacher still reads the feedback."""
        return [seed for seed, row in self.rows[step].items() if is_sound(row)]

    def mean(self, step: int, name: str) -> Cell:
        """Mean over the bases with a sound run."""
        seeds = self.sound(step)
        values = [self.rows[step][seed][name] for seed in seeds]
        return cell(values, lambda: resampled([self.cues[step][seed] for seed in seeds], [], name, self.world))


@dataclass(frozen=True)
class World:
    """Finished arms of a world in the order of the table, and the steps that were evaluated."""

    name: str
    outcomes: Sequence[Outcome]
    steps: Sequence[int]

    def arm(self, name: str) -> Outcome | None:
        return next((one for one in self.outcomes if one.arm == name), None)

    @property
    def compared(self) -> int:
        """The last step at which each arm has sound runs on `SOUND_SHARE` of its bases, or the first one."""
        steps = (
            step
            for step in self.steps
            if all(len(one.sound(step)) >= SOUND_SHARE * len(one.rows[0]) for one in self.outcomes)
        )
        return max(steps, default=self.steps[0])

    def compared_pair(self, one: Outcome, other: Outcome) -> int:
        """The last step at which both arms have sound runs on `SOUND_SHARE` of the bases that they share."""
        needed = SOUND_SHARE * len(one.rows[0].keys() & other.rows[0].keys())
        return max((s for s in self.steps if len(shared(one, other, s)) >= needed), default=self.steps[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", type=Path, default=HERE / "results" / "worlds.csv", help="table of run.py --world")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/study"), help="that of run.py, for rates by cue")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder of the page and its figures")
    parser.add_argument("--note", default="", help="machine and version of the runs, for the page")
    args = parser.parse_args()
    sections = []
    for name in WORLDS:
        world = world_of(read_rows(args.csv), read_cues(args.csv, args.output_dir / name, name), name)
        if not world.outcomes:
            continue
        for theme in THEMES:
            (args.results / f"{name}-{theme.name}.png").write_bytes(rates_figure(world, theme))
        sections.append(section(world))
    if not sections:
        sys.exit(
            f"{args.csv} has no finished run with rates by cue in {args.output_dir}: start `python run.py --world "
            "weak`, or pass the `--output_dir` of its runs."
        )
    write_atomically(args.results / "worlds.md", "\n\n".join([introduction(args.note), *sections]) + "\n")
    print(args.results / "worlds.md")


def read_cues(table: Path, runs: Path, world: str) -> CueRows:
    """Rates by cue of a world: those of earlier calls, and those of the runs, which are added to the file."""
    file = table.with_name(f"{world}_cues.csv" if world != "weak" else f"{table.stem}_cues.csv")
    cues = read_cue_rows(file) | cue_rows_of_runs(runs, world)
    if cues:
        write_cue_rows(file, cues)
    return cues


def world_of(rows: Mapping[tuple[str, int, str, int], Row], cues: CueRows, name: str) -> World:
    """The finished runs of a world: those with rates by cue."""
    own = {key[1:]: row for key, row in rows.items() if key[0] == name}
    steps = sorted({step for _, _, step in own if step > 0})
    found = []
    for arm in dict.fromkeys(arm for _, arm, _ in own):
        by_cue = {
            s: {
                seed: cues[name, seed, arm, s]
                for seed, a, at in sorted(own)
                if (a, at) == (arm, s) and (name, seed, arm, s) in cues
            }
            for s in steps
        }
        by_step = {step: {seed: own[seed, arm, step] for seed in seeds} for step, seeds in by_cue.items()}
        finished = sorted(set().union(*by_cue.values()))
        if finished:
            found.append(Outcome(name, arm, {0: {seed: own[seed, arm, 0] for seed in finished}} | by_step, by_cue))
    return World(name, found, steps)


def introduction(note: str) -> str:
    return (
        "# Worlds predicted before training\n\n"
        "`examples/study/world_page.py` writes this page from [worlds.csv](worlds.csv), which has a row per base, arm "
        "and evaluated step, and from the rates by cue, [worlds_cues.csv](worlds_cues.csv) for the first world. "
        "Pretraining plants a generic text at a branch. δ is what the feedback adds to its log-odds against the text "
        "of the prompt, and s what a contrast prompt adds on top. Both are measured on each base before training. "
        "[Theory](../../../docs/theory.md): with a teacher that follows the policy, the log-odds end at "
        "ℓ\\* = δ(1 − λ)/λ − s; for SDPO and guide they have no limit, and the sign of δ − λ s decides.\n\n"
        "All arms of a world have the same learning rate and budget. Rates are avg@4 at temperature 1, since the "
        "prediction is the policy's own rate. Intervals resample bases and cues. *Collapsed*: less than "
        f"{100 * MIN_FORMAT:.0f} % of the responses in the format. A run counts unless it collapsed or the teacher "
        f"reads less than {100 * MIN_FIDELITY:.0f} % of the feedback right. Arms are compared at the last evaluation "
        f"at which they count on {100 * SOUND_SHARE:.0f} % of the bases, over those bases."
        + (f" {note}" if note else "")
    )


def section(world: World) -> str:
    about, step = WORLDS[world.name], world.compared
    parts = [
        f"## {about.title}",
        setting(world),
        figure(world.name),
        f"Rate of the {about.rate} on {about.groups[1]} after {step} steps: a dot per base, a diamond for the mean "
        "with its 95 % interval, a bar for predicted end points.",
        arms_table(world),
        f"Per cent, mean over bases with its 95 % interval{few(world)}. Predicted: σ(ℓ\\*), the range over bases. It "
        f"is the end point, and a far one is not reached in so few steps. {fidelity(world)}",
        differences_table(world),
        "Differences in points, paired by base, at the last evaluation at which both arms can be compared.",
        criteria_table(world),
    ]
    return "\n\n".join(part for part in parts if part)


def setting(world: World) -> str:
    """What is planted, on which bases, and the budget."""
    about, config = WORLDS[world.name], read_sweep("methods", world.name).config
    rows = [row for one in world.outcomes if one.arm in (SDPO, CREDIT) for row in one.rows[0].values()]
    delta, s = ([row[name] for row in rows] for name in ("delta", "s"))
    critical = [d / (d + own) for d, own in zip(delta, s, strict=True)]
    seeds = sorted({seed for one in world.outcomes for seed in one.rows[0]})
    return (
        f"Pretraining plants {about.planted}. Seeds {', '.join(map(str, seeds))}, each with its own base. Over bases: "
        f"δ {span(delta, 2)}, s {span(s)}, λ_c = δ/(δ + s) {span(critical, 3)}; the base's rate of the {about.rate} "
        f"on {about.groups[1]} is {span([100 * row[RATE] for row in rows])} %. {world.steps[-1]} steps of "
        f"{config['per_device_train_batch_size']} rollouts, learning rate {config['learning_rate']:g}, averaged "
        f"teacher at rate {config['teacher_update_rate']:g}, feedback alone as privileged context."
    )


def arms_table(world: World) -> str:
    about, step, last = WORLDS[world.name], world.compared, world.steps[-1]
    head = ["arm", "bases", "predicted", *(f"{about.rate}, {name}" for name in about.groups)]
    head += [f"accuracy, {name}" for name in about.groups]
    head += [f"{about.rate}, {about.groups[1]}, step {last}", f"collapsed, step {last}"]
    lines = []
    for one in world.outcomes:
        cells = [str(one.mean(step, f"{measure}_{group}")) for measure in ("thought", "accuracy") for group in GROUPS]
        ends = one.rows[last].values()
        cells += [str(one.mean(last, RATE)), f"{sum(row['format'] < MIN_FORMAT for row in ends)} of {len(ends)}"]
        lines.append([label(one.arm), str(len(one.sound(step))), predicted(one), *cells])
    return table(head, lines)


def differences_table(world: World) -> str:
    """Paired differences of every arm from SDPO, and of the controls from CREDIT at λ = 0.1."""
    arms = [one.arm for one in world.outcomes]
    pairs = [(arm, SDPO) for arm in arms if arm != SDPO]
    pairs += [(arm, CREDIT) for arm in arms if arm.startswith(("temper", "hint"))]
    lines = []
    for first, second in pairs:
        one, other = world.arm(first), world.arm(second)
        if one and other and (seeds := shared(one, other, step := world.compared_pair(one, other))):
            names = [f"{measure}_{group}" for measure in ("thought", "accuracy") for group in GROUPS]
            cells = [str(difference(one, other, step, name)) for name in names]
            lines.append([f"{label(first)} − {label(second)}", str(len(seeds)), str(step), *cells])
    about = WORLDS[world.name]
    titles = [f"{measure}, {name}" for measure in (about.rate, "accuracy") for name in about.groups]
    return table(("arms", "bases", "step", *titles), lines) if lines else ""


def criteria_table(world: World) -> str:
    """The criteria that were set before the runs, at each evaluated step."""
    if world.arm(SDPO) is None or world.arm(CREDIT) is None:
        return ""
    lines = [[title, *map(found, world.steps)] for title, found in criteria(world).items()]
    return table((f"criterion, for {WORLDS[world.name].groups[1]}", *(f"step {s}" for s in world.steps)), lines)


def criteria(world: World) -> dict[str, Callable[[int], str]]:
    """Criteria of a world, each with its outcome at a step."""
    sdpo, credit, small, large = (world.arm(name) for name in (SDPO, CREDIT, "CREDIT λ=0.05", "CREDIT λ=0.2"))
    found: dict[str, Callable[[int], str]] = {}
    if world.name == "weak":
        found["λ = 0.1 at a quarter or less of SDPO's rate"] = lambda step: counted(
            own <= other / 4 for own, other in paired(step, credit, sdpo)
        )
        found["λ = 0.1: accuracy no lower than SDPO's by 3 points"] = lambda s: points(credit, sdpo, s, ACCURACY)
    if world.name in ("skip", "tables"):
        for group, name in zip(GROUPS, WORLDS[world.name].groups, strict=True):
            found[f"λ = 0.1: accuracy of {name} 15 points above SDPO's, interval above 5"] = partial(
                points, credit, sdpo, name=f"accuracy_{group}"
            )
    if world.name == "filler":
        for one, bound in ((sdpo, "at least 1.5"), (credit, "at most 1.1")):
            found[f"{label(one.arm)}: {bound} × the base's length"] = partial(lengths, one)
        found["λ = 0.1: accuracy 10 points above SDPO's"] = lambda s: points(credit, sdpo, s, ACCURACY)
    if world.name == "useful":
        for one in filter(None, (sdpo, small, credit, large)):
            found[f"{label(one.arm)}: rate of the step at the branch, without and with feedback, %"] = partial(
                with_and_without, one
            )
    else:
        if small:
            found["λ = 0.05 between λ = 0.1 and SDPO"] = lambda step: counted(
                low < middle < high for low, middle, high in paired(step, credit, small, sdpo)
            )
        if large:
            found["λ = 0.2: rate at most 5 %"] = lambda s: counted(rate <= 0.05 for rate in large.values(s, RATE))
        found["λ = 0.1: rate inside the predicted 95 % band of its base"] = lambda s: counted(
            map(is_within, credit.rows[s].values())
        )
    for one in filter(None, (credit, large)):
        title = label(one.arm).removeprefix("subtract, ")
        found[f"{title}: log-odds at the branch minus ℓ\\*, nats"] = partial(from_fixed_point, one)
    return found


def points(one: Outcome, other: Outcome, step: int, name: str) -> str:
    found = str(difference(one, other, step, name))
    return f"{found} points" if found else ""


def lengths(one: Outcome, step: int) -> str:
    """Mean length of the responses over that of the base, the range over bases."""
    return span([row["length"] / one.rows[0][seed]["length"] for seed, row in one.rows[step].items()], 2)


def with_and_without(one: Outcome, step: int) -> str:
    """Range over bases of the planted text's share at the branch, without and with feedback."""
    columns = (one.values(step, name) for name in ("log_odds", "log_odds_given"))
    return ", ".join(span([100 * float(expit(value)) for value in values]) for values in columns)


def is_sound(row: Row) -> bool:
    return row["format"] >= MIN_FORMAT and (row["teacher_fidelity"] is None or row["teacher_fidelity"] >= MIN_FIDELITY)


def is_within(row: Row) -> bool:
    return row["predicted_low"] <= row[RATE] <= row["predicted_high"]


def from_fixed_point(one: Outcome, step: int) -> str:
    """Range over bases of the log-odds minus their predicted end point."""
    return span([row["log_odds"] - row["predicted_log_odds"] for row in one.rows[step].values()])


def shared(one: Outcome, other: Outcome, step: int) -> list[int]:
    """Seeds of the bases on which both arms have a sound run."""
    return [seed for seed in one.sound(step) if seed in other.sound(step)]


def paired(step: int, *outcomes: Outcome) -> list[tuple[float, ...]]:
    """Rates of the arms on each base on which all of them have a sound run."""
    seeds = set.intersection(*(set(one.sound(step)) for one in outcomes))
    return [tuple(one.rows[step][seed][RATE] for one in outcomes) for seed in sorted(seeds)]


def difference(one: Outcome, other: Outcome, step: int, name: str) -> Cell:
    seeds = shared(one, other, step)
    values = [one.rows[step][seed][name] - other.rows[step][seed][name] for seed in seeds]
    cues = ([arm.cues[step][seed] for seed in seeds] for arm in (one, other))
    return cell(values, lambda: resampled(*cues, name, one.world))


def cell(values: Sequence[float], resample: Callable[[], Interval]) -> Cell:
    """Cell of the values of each base and their interval."""
    if not values:
        return Cell(values, math.nan, math.nan, math.nan)
    interval = resample()
    shown = (interval.low, interval.high) if len(values) >= MIN_BASES else (math.nan, math.nan)
    return Cell(values, interval.mean, *shown)


def few(world: World) -> str:
    fewest = min(len(one.sound(world.compared)) for one in world.outcomes)
    return "" if fewest >= MIN_BASES else f" (of less than {MIN_BASES} bases: the values)"


def counted(results: Iterable[bool]) -> str:
    found = list(results)
    return f"{sum(found)} of {len(found)} bases"


def fidelity(world: World) -> str:
    """Range of the teachers' fidelity at every step."""
    ranges = []
    for step in world.steps:
        found = [row["teacher_fidelity"] for one in world.outcomes for row in one.rows[step].values()]
        if values := [value for value in found if value is not None]:
            ranges.append(f"{span(values, 2)} after {step} steps")
    return f"The teachers' fidelity is {', '.join(ranges)}." if ranges else ""


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
        colour, mean = COLOURS[position % len(COLOURS)], one.mean(world.compared, RATE)
        rates = [100 * rate for rate in mean.values]
        found = [100 * row["predicted_rate"] for row in one.rows[0].values() if row["predicted_rate"] is not None]
        if found:
            width = max(max(found) - min(found), 0.8)
            left = min(min(found), 100 - width)
            axis.barh(position, width, left=left, height=0.75, color=theme.ink, alpha=0.3)
        axis.plot(rates, [position] * len(rates), "o", color=colour, alpha=0.5, ms=5, mew=0)
        mean, low, high = (100 * value for value in mean[1:])
        if not math.isnan(low):
            axis.plot([max(low, 0), min(high, 100)], [position, position], color=colour, lw=2)
        axis.plot(mean, position, "D", color=colour, ms=6)
    axis.set_yticks(range(len(world.outcomes)), [label(one.arm) for one in world.outcomes])
    axis.invert_yaxis()
    axis.set_xlim(-2, 102)
    about = WORLDS[world.name]
    axis.set_xlabel(f"rate of the {about.rate} on {about.groups[1]}, %", color=theme.ink, fontsize=9)
    axis.tick_params(colors=theme.ink, labelsize=8.5)
    axis.grid(True, axis="x", color=theme.grid, lw=0.6)
    for spine in axis.spines.values():
        spine.set_color(theme.grid)
    buffer = io.BytesIO()
    drawn.savefig(buffer, format="png", dpi=130, metadata={"Software": None})  # reproducible bytes
    return buffer.getvalue()


if __name__ == "__main__":
    main()
