"""Write results/worlds.md from results/worlds.csv: the outcome of the worlds that were predicted before training."""

from __future__ import annotations

import argparse
import io
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from report import figure, table
from scipy import stats
from world_runs import Row, read_rows
from worlds import GROUPS

from credit_trl.lab.comparison.figures import COLOURS, THEMES, Theme
from credit_trl.training.run_directory import write_atomically

HERE = Path(__file__).parent
MIN_FIDELITY = 0.95
SDPO, CREDIT = "SDPO", "CREDIT λ=0.1"
LABELS = {
    "temper-only λ=0.1": "temper-only, λ = 0.1",
    "CREDIT form=guide λ=0.2": "guide, λ = 0.2",
    "hint-contrast λ=0.1": "hint swap, λ = 0.1",
}

Rows = Mapping[tuple[str, int, str, int], Row]


class Cell(NamedTuple):
    """Mean over bases with its 95 % interval, NaN for one base."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        bounds = "" if math.isnan(self.low) else f" [{100 * self.low:.1f}, {100 * self.high:.1f}]"
        return f"{100 * self.mean:.1f}{bounds}"


class Outcome(NamedTuple):
    """One arm's rows at the last step, and those of step 0 on the same bases, by seed."""

    arm: str
    last: dict[int, Row]
    first: dict[int, Row]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", type=Path, default=HERE / "results" / "worlds.csv", help="table of run.py --world")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder of the page and its figures")
    parser.add_argument("--note", default="", help="machine and version of the runs, for the page")
    args = parser.parse_args()
    outcomes = outcomes_of(read_rows(args.csv), "weak")
    for theme in THEMES:
        (args.results / f"weak-{theme.name}.png").write_bytes(rates_figure(outcomes, theme))
    write_atomically(args.results / "worlds.md", page(outcomes, args.note))
    print(args.results / "worlds.md")


def outcomes_of(rows: Rows, world: str) -> list[Outcome]:
    """Arms in the order of the table, with the bases on which they have finished."""
    own = {key[1:]: row for key, row in rows.items() if key[0] == world}
    last = max(step for _, _, step in own)
    arms = dict.fromkeys(arm for _, arm, _ in own)
    found = [
        Outcome(
            arm,
            {seed: row for (seed, other, step), row in own.items() if (other, step) == (arm, last)},
            {seed: row for (seed, other, step), row in own.items() if (other, step) == (arm, 0)},
        )
        for arm in arms
    ]
    return [one for one in found if one.last]


def page(outcomes: Sequence[Outcome], note: str) -> str:
    by_arm = {one.arm: one for one in outcomes}
    bases = sorted({seed for one in outcomes for seed in one.last})
    parts = [
        "# A weak bias, predicted before training",
        introduction(outcomes, bases, note),
        "## Weak drift",
        figure("weak"),
        "Rate of the planted thought on unknown cues: a dot per base, a diamond for the mean with its 95 % interval, "
        "a bar for the range of the predicted rates.",
        arms_table(outcomes),
        "Per cent at the last step, mean over bases with Student's 95 % interval. *Fidelity* is the share of probes "
        "whose feedback the averaged teacher still reads right; arms are compared where it is at least "
        f"{MIN_FIDELITY}. Predicted: σ(ℓ\\*), the range over bases. It is where training ends up, not where it is "
        "after these steps: a far fixed point is not reached.",
        differences_table(by_arm),
        "Differences in points, paired by base.",
        verdicts(by_arm),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def introduction(outcomes: Sequence[Outcome], bases: Sequence[int], note: str) -> str:
    first = [row for one in outcomes if one.arm == CREDIT for row in one.first.values()]
    delta, s = ([row[name] for row in first] for name in ("delta", "s"))
    critical = [d / (d + own) for d, own in zip(delta, s, strict=True)]
    rate = cell(row["thought_unknown"] for row in first)
    seeds = ", ".join(map(str, bases))
    return (
        "`examples/study/world_page.py` writes this page from [worlds.csv](worlds.csv), which has a row per base, arm "
        "and evaluated step. Pretraining plants `Thought: sure, this is simple.` in 5 % of the responses, and in 10 % "
        "of those to a prompt with the task's feedback. At the first token of the thought, δ is what the feedback "
        "adds to the log-odds of the planted thought against the cue, and s what a contrast prompt adds on top. Both "
        "are measured on each base before training. [Theory](../../../docs/theory.md): with a teacher that follows "
        "the policy, the log-odds end at ℓ\\* = δ(1 − λ)/λ − s; for SDPO and guide they have no limit, and the sign "
        "of δ − λ s decides.\n\n"
        f"Bases: seeds {seeds}. Range over bases: δ {span(delta)}, s {span(s)}, λ_c = δ/(δ + s) {span(critical, 3)}; "
        f"the thought's rate before training is {rate} % on unknown cues. 90 steps of 64 rollouts, learning rate "
        "7e-4, averaged teacher at rate 0.05, feedback alone as privileged context. Rates are avg@4 at temperature 1, "
        "because the prediction is the policy's own rate." + (f" {note}" if note else "")
    )


def arms_table(outcomes: Sequence[Outcome]) -> str:
    head = ("arm", "bases", "fidelity ≥ .95", "predicted", *(f"thought, {group}" for group in GROUPS))
    head += (*(f"accuracy, {group}" for group in GROUPS[1:]), "format")
    lines = []
    for one in outcomes:
        rows = one.last.values()
        faithful = "" if one.arm == "GRPO" else f"{sum(map(is_faithful, rows))} of {len(rows)}"
        names = [f"thought_{group}" for group in GROUPS] + [f"accuracy_{group}" for group in GROUPS[1:]] + ["format"]
        cells = [str(cell(row[name] for row in rows)) for name in names]
        lines.append([label(one.arm), str(len(rows)), faithful, predicted(one), *cells])
    return table(head, lines)


def differences_table(by_arm: Mapping[str, Outcome]) -> str:
    """Paired differences of every arm from SDPO, and of the controls from CREDIT at λ = 0.1."""
    pairs = [(arm, SDPO) for arm in by_arm if arm != SDPO]
    pairs += [(arm, CREDIT) for arm in by_arm if arm.startswith(("temper", "hint")) and CREDIT in by_arm]
    lines = [
        [f"{label(arm)} − {label(other)}", str(len(shared(by_arm[arm], by_arm[other]))), *cells]
        for arm, other in pairs
        if other in by_arm and shared(by_arm[arm], by_arm[other])
        for cells in [[str(difference(by_arm[arm], by_arm[other], name)) for name in DIFFERENCES]]
    ]
    titles = ("thought, known", "thought, unknown", "thought, hold-out", "accuracy, unknown")
    return table(("arms", "bases", *titles), lines) if lines else ""


DIFFERENCES = ("thought_known", "thought_unknown", "thought_holdout", "accuracy_unknown")


def verdicts(by_arm: Mapping[str, Outcome]) -> str:
    """The criteria that were set before the runs, counted over bases."""
    found = []
    if SDPO in by_arm and CREDIT in by_arm:
        pairs = shared(by_arm[CREDIT], by_arm[SDPO])
        quarter = sum(by_arm[CREDIT].last[s][RATE] <= by_arm[SDPO].last[s][RATE] / 4 for s in pairs)
        found.append(("λ = 0.1 ends at a quarter or less of SDPO's rate", f"{quarter} of {len(pairs)} bases"))
        loss = difference(by_arm[CREDIT], by_arm[SDPO], "accuracy_unknown")
        found.append(("λ = 0.1: accuracy on unknown cues no lower by 3 points", f"{loss} points"))
    if CREDIT in by_arm:
        rows = by_arm[CREDIT].last.values()
        inside = sum(row["predicted_low"] <= row[RATE] <= row["predicted_high"] for row in rows)
        found.append(("λ = 0.1: rate inside the predicted 95 % band of its base", f"{inside} of {len(rows)} bases"))
    if (small := by_arm.get("CREDIT λ=0.05")) and SDPO in by_arm and CREDIT in by_arm:
        pairs = [s for s in small.last if s in by_arm[CREDIT].last and s in by_arm[SDPO].last]
        ordered = sum(by_arm[CREDIT].last[s][RATE] < small.last[s][RATE] < by_arm[SDPO].last[s][RATE] for s in pairs)
        found.append(("λ = 0.05 between λ = 0.1 and SDPO", f"{ordered} of {len(pairs)} bases"))
    if large := by_arm.get("CREDIT λ=0.2"):
        low = sum(row[RATE] <= 0.05 for row in large.last.values())
        found.append(("λ = 0.2: rate at most 5 %", f"{low} of {len(large.last)} bases"))
    return "Criteria, for the rate on unknown cues:\n\n" + table(("criterion", "measured"), [list(f) for f in found])


RATE = "thought_unknown"


def is_faithful(row: Row) -> bool:
    return row["teacher_fidelity"] is not None and row["teacher_fidelity"] >= MIN_FIDELITY


def shared(one: Outcome, other: Outcome) -> list[int]:
    """Bases that both arms have, with a teacher that still reads the feedback."""

    def usable(outcome: Outcome) -> set[int]:
        return {seed for seed, row in outcome.last.items() if outcome.arm == "GRPO" or is_faithful(row)}

    return sorted(usable(one) & usable(other))


def difference(one: Outcome, other: Outcome, name: str) -> Cell:
    return cell(one.last[seed][name] - other.last[seed][name] for seed in shared(one, other))


def cell(values: Iterable[float]) -> Cell:
    numbers = list(values)
    mean = statistics.fmean(numbers)
    if len(numbers) < 2:
        return Cell(mean, math.nan, math.nan)
    half = float(stats.t.ppf(0.975, len(numbers) - 1) * stats.sem(numbers))
    return Cell(mean, mean - half, mean + half)


def predicted(outcome: Outcome) -> str:
    found = [100 * row["predicted_rate"] for row in outcome.last.values() if row["predicted_rate"] is not None]
    return span(found) if found else ""


def span(values: Sequence[float], digits: int = 1) -> str:
    low, high = (f"{value:.{digits}f}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def label(arm: str) -> str:
    return LABELS.get(arm, arm.replace("=", " = ").replace("CREDIT", "subtract,"))


def rates_figure(outcomes: Sequence[Outcome], theme: Theme) -> bytes:
    """PNG of the thought's rate by arm, with the predicted range."""
    drawn = Figure(figsize=(7.6, 1.0 + 0.42 * len(outcomes)), facecolor=theme.background, layout="constrained")
    FigureCanvasAgg(drawn)
    axis = drawn.subplots()
    axis.set_facecolor(theme.background)
    for position, one in enumerate(outcomes):
        rows, colour = list(one.last.values()), COLOURS[position % len(COLOURS)]
        found = [100 * row["predicted_rate"] for row in rows if row["predicted_rate"] is not None]
        if found:
            width = max(max(found) - min(found), 0.8)
            axis.barh(
                position, width, left=min(min(found), 100 - width), height=0.75, color=theme.ink, alpha=0.3, zorder=1
            )
        rates = [100 * row[RATE] for row in rows]
        axis.plot(rates, [position] * len(rates), "o", color=colour, alpha=0.5, ms=5, mew=0)
        mean, low, high = cell(rates)
        if not math.isnan(low):
            axis.plot([max(low, 0), min(high, 100)], [position, position], color=colour, lw=2)
        axis.plot(mean, position, "D", color=colour, ms=6)
    axis.set_yticks(range(len(outcomes)), [label(one.arm) for one in outcomes])
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
