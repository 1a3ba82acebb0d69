"""Predicted against measured drift of a planted phrase: `results/predicted.csv` from the rows of the worlds.

    python law.py    # writes predicted.csv; prints R², errors, rows in the band, signs, and guide's measured targets

`predicted` rests on ℓ_0, δ and s, which were measured on the base before training, on the teacher's rate and the
warm-up of the learning rate, and on nothing fitted (`credit_trl.lab.analysis.drift`). `predicted_finite` has a student
of finite speed: one constant κ, fitted on the runs of SDPO in the world `weak` on other bases than the row's own, and
the exponent `SLOWING`. The band of a row is `predicted` ± the 95 % t interval of the errors of the same world and arm
over other bases that were seen when the law was written (`SEEN`). `version` and `commit` are those of the measured
row, or of the row of step 0 where nothing is measured yet.
"""

import math
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import optimize, stats

from credit_trl.lab.analysis.drift import BranchDrift, holding_coef

RESULTS = Path(__file__).parent / "results"
WORLDS = ("weak", "tables", "skip", "filler", "useful")
SOURCES = [*(f"{world}.csv" for world in WORLDS), *(f"unseen/{world}.csv" for world in WORLDS)]
SEEN = range(12)  # bases whose runs the law was written from
UNSEEN_STEPS = (30, 60)  # of the bases that were predicted before their first step
RATE = 0.05  # of the teacher's average, where an arm does not name another
WARMUP = 10  # optimizer steps over which the learning rate of every arm rises
SLOWING = 0.25  # of 0, ¼, ½ and 1 the one with the least mean error over the rows of all seen bases
LEVEL = 0.95
COLUMNS = (
    *("world", "base", "arm", "rho", "step", "log_odds_0"),
    *("predicted", "measured", "in_band", "seen", "predicted_finite", "version", "commit"),
)
COLLAPSED = 0.9  # share of answers in the format, below which a run has no branch any more


def read_rows(files: Iterable[Path]) -> list[dict[str, str]]:
    """Rows of the tables of worlds that exist."""
    tables = (pd.read_csv(file, dtype=str, keep_default_na=False) for file in files if file.is_file())
    return [row for table in tables for row in table.to_dict("records")]


def rate_of(arm: str) -> float:
    """ρ of an arm: that in its name, 0 for a frozen teacher, else that of the study."""
    words = dict(word.split("=") for word in arm.split() if "=" in word)
    return 0.0 if words.get("teacher_model_kind") == "base" else float(words.get("teacher_update_rate", RATE))


def path_of(row: dict[str, str], steps: int, speed: float = 1.0, slowing: float = 0.0) -> list[float]:
    """Log-odds after every step of an arm, from its row of step 0."""
    form = "guide" if "guide" in row["arm"] else "subtract"
    start, delta, s, coef = (float(row[name] or 0.0) for name in ("log_odds", "delta", "s", "lambda"))
    branch = BranchDrift(start, delta, s, coef, rate_of(row["arm"]), form)
    return branch.path([speed * min(1.0, (step + 1) / WARMUP) for step in range(steps)], slowing)


def predictions(rows: Sequence[dict[str, str]], steps: dict[str, Sequence[int]]) -> pd.DataFrame:
    """Rows of `predicted.csv` for every arm with a teacher; log-odds in nats, NaN where not measured (yet).

    Only runs that reached the step without a collapse have measured log-odds.

    Args:
        steps: steps of each world.
    """
    measured = {
        (row["world"], int(row["seed"]), row["arm"], int(row["step"])): float(row["log_odds"])
        for row in rows
        if row["log_odds"] and float(row["format"]) >= COLLAPSED
    }
    made_by = {key_of(row, int(row["step"])): (row["version"], row["commit"]) for row in rows}
    starts = [row for row in rows if row["step"] == "0" and row["arm"] != "GRPO"]
    fits = {
        int(row["seed"]): [(row, step, value) for step in steps["weak"] if (value := measured.get(key_of(row, step)))]
        for row in starts
        if (row["world"], row["arm"]) == ("weak", "SDPO") and int(row["seed"]) in SEEN
    }

    @cache
    def speed_without(base: int) -> float:
        return fitted_speed(
            [fit for fitted_base, base_fits in fits.items() if fitted_base != base for fit in base_fits]
        )

    table = []
    for row in starts:
        base = int(row["seed"])
        measured_steps = steps[row["world"]] if base in SEEN else UNSEEN_STEPS
        path = path_of(row, max(measured_steps))
        finite = path_of(row, max(measured_steps), speed_without(base if row["world"] == "weak" else -1), SLOWING)
        for step in measured_steps:
            key = (row["world"], base, row["arm"], rate_of(row["arm"]), step, float(row["log_odds"]))
            value = measured.get(key_of(row, step), math.nan)
            version, commit = made_by.get(key_of(row, step)) or made_by[key_of(row, 0)]
            table.append((*key, path[step - 1], value, None, base in SEEN, finite[step - 1], version, commit))
    return with_bands(pd.DataFrame(table, columns=COLUMNS))


def key_of(row: dict[str, str], step: int) -> tuple[str, int, str, int]:
    return row["world"], int(row["seed"]), row["arm"], step


def fitted_speed(rows: Sequence[tuple[dict[str, str], int, float]]) -> float:
    """κ with the least squared error over rows of step 0, later steps, and the log-odds measured there."""

    def error(speed: float) -> float:
        return sum((value - path_of(row, step, speed, SLOWING)[-1]) ** 2 for row, step, value in rows)

    return float(optimize.minimize_scalar(error, bounds=(0.01, 1.0), method="bounded").x)


def with_bands(frame: pd.DataFrame) -> pd.DataFrame:
    """Fill `in_band` where a row is measured, from the errors of two or more seen bases other than the row's own."""
    errors = frame["measured"] - frame["predicted"]
    for _, cell in frame[frame["measured"].notna()].groupby(["world", "arm", "step"]):
        for index, base in cell["base"].items():
            seen_errors = errors[cell.index[cell["seen"] & (cell["base"] != base)]]
            if len(seen_errors) >= 2:
                half = stats.t.ppf((1 + LEVEL) / 2, len(seen_errors)) * math.sqrt(np.mean(np.square(seen_errors)))
                frame.loc[index, "in_band"] = bool(abs(errors[index]) <= half)
    return frame


def fit(rows: pd.DataFrame) -> pd.Series:
    """R² of the change of the log-odds and mean error in nats of both predictions, and rows with a band and in it."""
    change = rows["measured"] - rows["log_odds_0"]
    summary = {"rows": len(rows), "banded": rows["in_band"].notna().sum(), "in band": rows["in_band"].eq(True).sum()}
    for column in ("predicted", "predicted_finite"):
        error = rows["measured"] - rows[column]
        summary[f"R² {column}"] = 1.0 - (error**2).sum() / ((change - change.mean()) ** 2).sum()
        summary[f"error {column}"] = error.abs().mean()
    return pd.Series(summary)


def right_signs(rows: Sequence[dict[str, str]]) -> tuple[int, int]:
    """Number of runs of subtract without a collapse, and of those whose phrase rose exactly if λ was below λ_hold."""
    starts = {key_of(row, 0): row for row in rows if row["step"] == "0"}
    right = []
    for row in rows:
        is_last = row["step"] == ("50" if row["world"] == "filler" else "60")
        if is_last and row["arm"].startswith("CREDIT λ") and float(row["format"]) >= COLLAPSED:
            start = starts[key_of(row, 0)]
            hold = holding_coef(*(float(start[name]) for name in ("log_odds", "delta", "s")))
            right.append((float(start["lambda"]) < hold) == (float(row["log_odds"]) > float(start["log_odds"])))
    return len(right), sum(right)


def measured_targets() -> pd.DataFrame:
    """Rows of guide with the target of the teacher that was measured at the step, in nats."""
    tables = [pd.read_csv(RESULTS / "guide" / f"{world}.csv") for world in ("weak", "skip")]
    rows = pd.concat(tables, ignore_index=True).query("step > 0")
    log_odds, *branch = (rows[name] for name in ("teacher_log_odds", "teacher_delta", "teacher_s", "lambda"))
    return rows.assign(target=BranchDrift(log_odds, *branch, RATE, "guide").target(log_odds))


def main() -> None:
    rows = read_rows(RESULTS / name for name in SOURCES)
    steps: dict[str, list[int]] = {}
    for row in rows:
        if int(row["step"]) > 0 and int(row["seed"]) in SEEN:
            steps[row["world"]] = sorted({*steps.get(row["world"], []), int(row["step"])})
    predicted = predictions(rows, steps)
    flags = {name: predicted[name].map({True: "yes", False: "no"}) for name in ("in_band", "seen")}
    predicted.assign(**flags).to_csv(RESULTS / "predicted.csv", index=False, float_format="%.4f")
    print("runs of subtract {}, sign of the change right in {}".format(*right_signs(rows)))
    frame = predicted.dropna(subset="measured")
    frame["arms"] = frame["arm"].str.extract("(guide|hint)", expand=False).fillna("others")  # hint: of version 0.3.0
    frame = pd.concat([frame, frame.assign(world="all")])
    print(frame.groupby(["seen", "arms", "rho", "world"]).apply(fit, include_groups=False).round(3).to_string())
    columns = ["teacher_delta", "teacher_s", "target", "log_odds"]
    print(measured_targets().groupby(["world", "step"])[columns].mean().round(2).to_string())


if __name__ == "__main__":
    main()
