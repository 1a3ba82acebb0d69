"""Write results/collapse.md: how often a run collapses, by teacher.

    credit-trl credit-sweep collapse.yaml --output_dir ../../runs/collapse
    python collapse.py --output_dir ../../runs

Adds one row per finished run to results/collapse.csv and writes the page from this file alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from endings import COLLAPSED
from report import table
from scipy import stats
from settled import as_csv
from uses import Key, Rows, by_seed, cell, read_rows, rows_of_runs

from credit_trl.lab.sweeps import read_spec
from credit_trl.training.run_directory import write_atomically

HERE = Path(__file__).parent
SWEEP = "collapse"
COLUMNS = ("known", "unknown", "holdout", "format unknown")
TEACHERS = {
    "teacher_model_kind=ema": "average of the policy",
    "teacher_model_kind=base": "frozen",
    "teacher_model_kind=trust_region": "trust region",
    "teacher_model_kind=ema teacher_rehearsal=0.25": "average, rehearsal in a quarter of the batches",
}
METHODS = ("SDPO", "CREDIT")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("runs"), help="folder of the sweep's folder")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder of the page and the table")
    args = parser.parse_args()
    file = args.results / f"{SWEEP}.csv"
    rows = read_rows(file, COLUMNS) | rows_of_runs(args.output_dir, [SWEEP], COLUMNS)
    write_atomically(file, as_csv(rows, Key._fields, COLUMNS))
    write_atomically(file.with_suffix(".md"), page(read_rows(file, COLUMNS)))  # of the rounded values
    print(file.with_suffix(".md"))


def page(rows: Rows) -> str:
    arms = {
        (method, title): by_seed(rows, SWEEP, f"{method} {options}")
        for method in METHODS
        for options, title in TEACHERS.items()
    }
    known = {key: [row["known"] for row in runs.values()] for key, runs in arms.items() if runs}
    cells = []
    for (method, title), values in known.items():
        runs = arms[method, title].values()
        others = [cell([row[name] for row in runs]) for name in COLUMNS[1:]]
        cells.append([method, title, collapses(values), p_value(known, method, title), cell(values), *others])
    header = ("method", "teacher", "collapsed", "p against the average", "known", *COLUMNS[1:])
    both = [
        [title, collapses([value for (_, own), values in known.items() if own == title for value in values])]
        for title in TEACHERS.values()
    ]
    parts = ["# Which teachers collapse", introduction(), table(header, cells), "Both methods together:"]
    return "\n\n".join([*parts, table(("teacher", "collapsed"), both)]) + "\n"


def introduction() -> str:
    config = read_spec(HERE / f"{SWEEP}.yaml").config
    return (
        f"`examples/study/collapse.py` writes this page from [{SWEEP}.csv]({SWEEP}.csv), which has one row per run of "
        f"`{SWEEP}.yaml`: the embedded task and its shipped base, {config['max_steps']} steps of "
        f"{config['per_device_train_batch_size']} rollouts, learning rate {config['learning_rate']:g}, rate of the "
        f"average {config['teacher_update_rate']:g}. A run has collapsed if less than {100 * COLLAPSED:.0f} % of the "
        "known cues are right at the end, avg@4; the base has 99 %. Shares have 95 % intervals of Clopper and "
        "Pearson; p is that of Fisher's exact test, two-sided, against the same method with the averaged teacher. "
        "The other columns are means in %, with Student's t intervals over seeds. All seeds start from one base."
    )


def collapses(known: Sequence[float]) -> str:
    """Collapsed runs of all, and their share in %."""
    count = sum(value < COLLAPSED for value in known)
    if not known:
        return "not run"
    low, high = stats.binomtest(count, len(known)).proportion_ci()
    return f"{count} of {len(known)} [{100 * low:.0f}, {100 * high:.0f}]"


def p_value(known: dict[tuple[str, str], list[float]], method: str, title: str) -> str:
    first = next(iter(TEACHERS.values()))
    if title == first or (method, first) not in known:
        return ""
    counts = [
        [sum(v < COLLAPSED for v in values), sum(v >= COLLAPSED for v in values)]
        for values in (known[method, title], known[method, first])
    ]
    return f"{stats.fisher_exact(counts).pvalue:.2g}"


if __name__ == "__main__":
    main()
