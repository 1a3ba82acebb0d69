"""Print the table of a world: means over bases, with Student's 95 % intervals, and differences from a baseline.

    python page.py weak                            # the last step that every arm has
    python page.py tables --step 60 --baseline SDPO --measure accuracy_unknown

A run has collapsed if less than 90 % of its responses are in the format. Collapsed runs count in the means.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from run import HERE, Row, read_rows
from scipy import stats

MEASURES = ("thought_known", "thought_unknown", "accuracy_known", "accuracy_unknown", "accuracy_holdout")
COLLAPSED = 0.9  # share of responses in the format


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("world", help="name of a table in results/, or its path")
    parser.add_argument("--step", type=int, help="step of the rows (default: the last one that every arm has)")
    parser.add_argument("--baseline", default="SDPO")
    parser.add_argument("--measure", default="accuracy_unknown", help="column of the differences")
    args = parser.parse_args()
    file = Path(args.world)
    file = file if file.suffix else HERE / "results" / f"{args.world}.csv"
    rows = list(read_rows(file).values())
    if not rows:
        parser.error(f"{file} has no rows.")
    step = common_step(rows) if args.step is None else args.step
    print("\n".join(table([row for row in rows if row["step"] == step], step, args.baseline, args.measure)))


def common_step(rows: Sequence[Row]) -> int:
    """The last step with rows of every arm."""
    steps = [{int(row["step"]) for row in rows if row["arm"] == arm} for arm in arms_of(rows)]
    return max(set.intersection(*steps))


def arms_of(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["arm"] for row in rows))


def table(rows: Sequence[Row], step: int, baseline: str, measure: str) -> list[str]:
    """Lines of the Markdown table of the rows of one step, in percent."""
    columns = ("arm", "bases", "collapsed", *MEASURES, f"{measure}, minus {baseline}")
    lines = [f"After {step} steps, in %:", "", f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|"]
    reference = {row["seed"]: row[measure] for row in rows if row["arm"] == baseline}
    for arm in arms_of(rows):
        own = [row for row in rows if row["arm"] == arm]
        collapsed = sum(row["format"] < COLLAPSED for row in own)
        differences = [row[measure] - reference[row["seed"]] for row in own if row["seed"] in reference]
        cells = [mean_text([row[name] for row in own]) for name in MEASURES]
        paired = "" if arm == baseline else mean_text(differences)
        lines.append(f"| {' | '.join([arm, str(len(own)), str(collapsed), *cells, paired])} |")
    return lines


def mean_text(values: Sequence[float]) -> str:
    """Mean in percent, with its interval where there are two values or more."""
    array = 100 * np.array(values, dtype=float)
    if len(array) < 2:
        return f"{array[0]:.1f}" if len(array) else ""
    half = stats.t.ppf(0.975, len(array) - 1) * stats.sem(array)
    return f"{array.mean():.1f} [{array.mean() - half:.1f}, {array.mean() + half:.1f}]"


if __name__ == "__main__":
    main()
