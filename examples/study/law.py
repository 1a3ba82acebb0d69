"""Predicted against measured drift of a planted phrase: `results/predicted.csv` from the rows of the worlds.

    python law.py            # writes predicted.csv and prints R², mean error and rows in the band

A prediction rests on ℓ_0, δ and s, which were measured on the base before training, on the teacher's rate and the
warm-up of the learning rate, and on nothing fitted (`credit_trl.lab.analysis.drift`). The band of a row is the
prediction ± the 95 % t interval of the errors of the same world and arm over other bases that were seen when the law
was written (`SEEN`).
"""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import numpy as np
from scipy import stats

from credit_trl.lab.analysis.drift import BranchDrift

RESULTS = Path(__file__).parent / "results"
WORLDS = ("weak", "tables", "skip", "filler", "useful")
SOURCES = [*(f"{world}.csv" for world in WORLDS), *(f"unseen/{world}.csv" for world in WORLDS)]
SEEN = range(12)  # bases whose runs the law was written from
UNSEEN_STEPS = (30, 60)  # of the bases that were predicted before their first step
RATE = 0.05  # of the teacher's average, where an arm does not name another
WARMUP = 10  # optimizer steps over which the learning rate of every arm rises
LEVEL = 0.95
COLLAPSED = 0.9  # share of answers in the format, below which a run has no branch any more


@dataclass(frozen=True)
class Row:
    """One row of `predicted.csv`; log-odds in nats, None where not measured yet."""

    world: str
    base: int
    arm: str
    rho: float
    step: int
    log_odds_0: float
    predicted: float
    measured: float | None = None
    in_band: bool | None = None
    seen: bool = True


def read_rows(files: Iterable[Path]) -> list[dict[str, str]]:
    """Rows of the tables of worlds that exist."""
    found = []
    for file in files:
        if file.is_file():
            with file.open(encoding="utf-8", newline="") as lines:
                found += csv.DictReader(lines)
    return found


def rate_of(arm: str) -> float:
    """ρ of an arm: that in its name, 0 for a frozen teacher, else that of the study."""
    words = dict(word.split("=") for word in arm.split() if "=" in word)
    return 0.0 if words.get("teacher_model_kind") == "base" else float(words.get("teacher_update_rate", RATE))


def predict(row: dict[str, str], steps: Sequence[int]) -> list[Row]:
    """Predictions for the steps of an arm, from its row of step 0."""
    form = "guide" if "guide" in row["arm"] else "subtract"
    rate = rate_of(row["arm"])
    start = float(row["log_odds"])
    branch = BranchDrift(start, float(row["delta"]), float(row["s"]), float(row["lambda"] or 0.0), rate, form)
    path = branch.path([min(1.0, (step + 1) / WARMUP) for step in range(max(steps))])
    base = int(row["seed"])
    return [
        Row(row["world"], base, row["arm"], rate, step, start, path[step - 1], seen=base in SEEN) for step in steps
    ]


def predictions(rows: Sequence[dict[str, str]], steps: dict[str, Sequence[int]]) -> list[Row]:
    """Predictions of every arm with a teacher, with the log-odds of runs that reached the step without a collapse.

    Args:
        steps: steps of each world.
    """
    measured = {
        (row["world"], int(row["seed"]), row["arm"], int(row["step"])): float(row["log_odds"])
        for row in rows
        if row["log_odds"] and float(row["format"]) >= COLLAPSED
    }
    found = []
    for row in rows:
        if row["step"] == "0" and row["arm"] != "GRPO":
            for one in predict(row, steps[row["world"]] if int(row["seed"]) in SEEN else UNSEEN_STEPS):
                found.append(replace(one, measured=measured.get((one.world, one.base, one.arm, one.step))))
    return with_bands(found)


def with_bands(rows: Sequence[Row]) -> list[Row]:
    """Rows with `in_band`, from the errors of seen bases other than the row's own."""
    errors = defaultdict(dict)
    for row in rows:
        if row.seen and row.measured is not None:
            errors[row.world, row.arm, row.step][row.base] = row.measured - row.predicted
    banded = []
    for row in rows:
        others = [error for base, error in errors[row.world, row.arm, row.step].items() if base != row.base]
        if row.measured is None or len(others) < 2:
            banded.append(row)
            continue
        half = stats.t.ppf((1 + LEVEL) / 2, len(others)) * math.sqrt(np.mean(np.square(others)))
        banded.append(replace(row, in_band=bool(abs(row.measured - row.predicted) <= half)))
    return banded


def write_rows(file: Path, rows: Sequence[Row]) -> None:
    """Write `predicted.csv`."""
    with file.open("w", encoding="utf-8", newline="") as lines:
        writer = csv.DictWriter(lines, [field.name for field in fields(Row)], lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({name: _text(value) for name, value in asdict(row).items()})


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def explained(rows: Sequence[Row]) -> tuple[float, float, int]:
    """R² of the change of the log-odds, mean absolute error in nats, and number of measured rows."""
    measured = [row for row in rows if row.measured is not None]
    change = np.array([row.measured - row.log_odds_0 for row in measured])
    error = np.array([row.measured - row.predicted for row in measured])
    r_squared = 1.0 - np.sum(error**2) / np.sum((change - change.mean()) ** 2)
    return float(r_squared), float(np.abs(error).mean()), len(measured)


def main() -> None:
    rows = read_rows(RESULTS / name for name in SOURCES)
    steps: dict[str, list[int]] = {}
    for row in rows:
        if int(row["step"]) > 0:
            steps[row["world"]] = sorted({*steps.get(row["world"], []), int(row["step"])})
    found = predictions(rows, steps)
    write_rows(RESULTS / "predicted.csv", found)
    for world in sorted({row.world for row in found}):
        for seen in (True, False):
            own = [row for row in found if row.world == world and row.seen == seen and row.measured is not None]
            if len(own) > 2:
                r_squared, error, count = explained(own)
                inside = sum(row.in_band is True for row in own)
                print(f"{world:7} seen={_text(seen):3} rows {count:4}  R² {r_squared:.3f}  error {error:.2f} nats"
                      f"  in band {inside}")  # fmt: skip


if __name__ == "__main__":
    main()
