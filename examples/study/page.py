"""Print the table of a world: means over bases, with Student's 95 % intervals, and differences from a baseline.

    python page.py weak                            # the last step that every arm has
    python page.py tables --step 60 --baseline SDPO --measure thought_unknown accuracy_known

A run has collapsed if less than 90 % of its responses are in the format. Collapsed runs count in the means; where an
arm has some, the mean of its other runs follows in parentheses. p is that of a paired t test, with Holm's adjustment
over all differences of the table.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from arms import STYLES
from run import HERE, Row, read_rows
from scipy import stats

from credit_trl.evaluation.statistics import holm

MEASURES = ("thought_known", "thought_unknown", "accuracy_known", "accuracy_unknown", "accuracy_holdout")
COLLAPSED = 0.9  # share of responses in the format


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("world", help="name of a table in results/, or its path")
    parser.add_argument("--step", type=int, help="step of the rows (default: the last one that every arm has)")
    parser.add_argument("--baseline", default="SDPO")
    parser.add_argument("--measure", nargs="+", default=["accuracy_unknown"], help="columns of the differences")
    args = parser.parse_args()
    file = Path(args.world)
    file = file if file.suffix else HERE / "results" / f"{args.world}.csv"
    rows = list(read_rows(file).values())
    if not rows:
        parser.error(f"{file} has no rows.")
    step = common_step(rows) if args.step is None else args.step
    print("\n".join(table(rows, step, args.baseline, args.measure)))


def common_step(rows: Sequence[Row]) -> int:
    """The last step with rows of every arm."""
    steps = [{int(row["step"]) for row in rows if row["arm"] == arm} for arm in arms_of(rows)]
    return max(set.intersection(*steps))


def arms_of(rows: Sequence[Row]) -> list[str]:
    """Names of the arms in the order of tables and figures."""

    def place(arm: str) -> tuple[int, str]:
        """Place of an arm in `STYLES`; options may follow its name."""
        names = [name for name in STYLES if f"{arm} ".startswith(f"{name} ")]
        return (list(STYLES).index(names[0]) if names else len(STYLES), arm)

    return sorted({row["arm"] for row in rows}, key=place)


def table(rows: Sequence[Row], step: int, baseline: str, measures: Sequence[str]) -> list[str]:
    """Lines of the Markdown table of the rows of step 0 and one other step, in percent."""
    compared = (name for measure in measures for name in (f"{measure}, minus {baseline}", "p (Holm)"))
    columns = ("arm", "bases", "collapsed", *MEASURES, *compared)
    lines = [f"After {step} steps, in %:", "", f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|"]
    started = [row for row in rows if row["step"] == 0 and row["arm"] == baseline]
    rows = [row for row in rows if row["step"] == step]
    arms = {"base": started} | {arm: [row for row in rows if row["arm"] == arm] for arm in arms_of(rows)}
    differences = {
        (arm, measure): paired(arm_rows, arms[baseline], measure)
        for arm, arm_rows in arms.items()
        for measure in measures
        if arm != baseline
    }
    tested = [key for key, values in differences.items() if key[0] != "base" and len(values) > 1]
    adjusted = dict(zip(tested, holm([stats.ttest_1samp(differences[k], 0.0).pvalue for k in tested]), strict=True))
    for arm, arm_rows in arms.items():
        intact = [row for row in arm_rows if row["format"] >= COLLAPSED]
        cells = [mean_text([row[name] for row in arm_rows]) for name in MEASURES]
        if 0 < len(intact) < len(arm_rows):
            intact_means = [f" ({100 * np.mean([row[name] for row in intact]):.1f})" for name in MEASURES]
            cells = [cell + intact_mean for cell, intact_mean in zip(cells, intact_means, strict=True)]
        for key in ((arm, measure) for measure in measures):
            cells += mean_text(differences.get(key, ())), f"{adjusted[key]:.3f}" if key in adjusted else ""
        lines.append(f"| {' | '.join([arm, str(len(arm_rows)), str(len(arm_rows) - len(intact)), *cells])} |")
    return lines


def paired(rows: Sequence[Row], reference_rows: Sequence[Row], measure: str) -> list[float]:
    """Differences of a measure on the bases that both have."""
    reference = {row["seed"]: row[measure] for row in reference_rows}
    return [row[measure] - reference[row["seed"]] for row in rows if row["seed"] in reference]


def mean_text(values: Sequence[float]) -> str:
    """Mean in percent, with its interval where there are two values or more."""
    array = 100 * np.array(values, dtype=float)
    if len(array) < 2:
        return f"{array[0]:.1f}" if len(array) else ""
    half = stats.t.ppf(0.975, len(array) - 1) * stats.sem(array)
    return f"{array.mean():.1f} [{array.mean() - half:.1f}, {array.mean() + half:.1f}]"


if __name__ == "__main__":
    main()
