"""Write results/uses.md: uses of the credit on the embedded task and on the world `programs`.

    credit-trl credit-sweep uses.yaml
    python -c "from run import make_bases; from pathlib import Path; make_bases(Path('bases'), [('programs', 1)])"
    PYTHONPATH=. credit-trl credit-sweep uses_programs.yaml
    python uses.py

Adds one row per finished run to results/uses.csv and writes the page from this file alone.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from bars import final_mean
from report import table
from settled import as_csv, interval, within_rates

from credit_trl.lab.comparison.runs import find_runs
from credit_trl.lab.sweeps import read_spec
from credit_trl.training.run_directory import write_atomically

HERE = Path(__file__).parent
COLUMNS = ("known", "unknown", "holdout", "format unknown", "shortcut")
WORLDS = {"uses": "Embedded task, shipped base", "uses_programs": "World `programs`, one base"}
BASE = "base"
BASELINES = ("GRPO", "SDPO")


class Key(NamedTuple):
    """The run of a row; the arm `base` is its model before training."""

    sweep: str
    arm: str
    seed: int


Rows = dict[Key, dict[str, float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("runs"), help="folder of the sweeps' folders")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder of the page and the table")
    args = parser.parse_args()
    file = args.results / "uses.csv"
    rows = read_rows(file, COLUMNS) | rows_of_runs(args.output_dir, WORLDS, COLUMNS)
    write_atomically(file, as_csv(rows, Key._fields, COLUMNS))
    write_atomically(file.with_suffix(".md"), page(read_rows(file, COLUMNS)))  # of the rounded values
    print(file.with_suffix(".md"))


def rows_of_runs(root: Path, sweeps: Iterable[str], columns: Sequence[str]) -> Rows:
    """Final means of the finished runs in the folders of some sweeps, and those of their base."""
    rows: Rows = {}
    for sweep in sweeps:
        for run in find_runs([root / sweep]) if any((root / sweep).rglob("run.json")) else ():
            if run.finished:
                base = replace(run, evaluations=run.evaluations[:1])
                for arm, means in ((run.arm, run), (BASE, base)):
                    rows[Key(sweep, arm, run.seed)] = {name: final_mean(means, name) for name in columns}
    return rows


def read_rows(file: Path, columns: Sequence[str]) -> Rows:
    if not file.is_file():
        return {}
    with file.open(encoding="utf-8", newline="") as lines:
        return {
            Key(row["sweep"], row["arm"], int(row["seed"])): {name: float(row[name]) for name in columns}
            for row in csv.DictReader(lines)
        }


def page(rows: Rows) -> str:
    parts = ["# Uses of the credit", introduction(), *(section(rows, sweep) for sweep in WORLDS)]
    return "\n\n".join(parts) + "\n"


def introduction() -> str:
    spec = read_spec(HERE / "uses.yaml")
    config = spec.config
    return (
        "`examples/study/uses.py` writes this page from [uses.csv](uses.csv), which has one row per run. *modulate* "
        "weights GRPO's tokens with ΔV_t, *modulate-s* with S_t against wrong feedback, *route* distils failures "
        "only, CREDIT has λ = 0.1. The teacher is averaged and reads feedback and demonstration. "
        f"{config['max_steps']} steps of {config['per_device_train_batch_size']} rollouts, learning rate "
        f"{config['learning_rate']:g} for every arm; avg@{spec.evaluation['k']} at temperature 0.6, in %, at the end. "
        "All seeds of a world start from the same base, so the intervals (Student's t over seeds, 95 %) cover "
        "training and not pretraining. Differences are paired by seed, in points."
    )


def section(rows: Rows, sweep: str) -> str:
    title = f"## {WORLDS[sweep]}"
    names = [name for name in COLUMNS if name != "shortcut" or sweep == "uses_programs"]
    arms = list(dict.fromkeys(arm.name for arm in read_spec(HERE / f"{sweep}.yaml").arms()))
    own = {arm: by_seed(rows, sweep, arm) for arm in (BASE, *arms)}
    means = [
        [arm, f"{len(runs)}", *(cell([run[name] for run in runs.values()]) for name in names)]
        for arm, runs in own.items()
        if runs
    ]
    if not means:
        return f"{title}\n\nNot run yet."
    differences = [
        [f"{arm} − {other}", *(difference(own[arm], own[other], name) for name in names)]
        for other in BASELINES
        for arm in arms
        if arm != other and not (arm in BASELINES and other == "SDPO") and len(own[arm].keys() & own[other].keys()) > 1
    ]
    parts = [title, table(("arm", "seeds", *names), means)]
    return "\n\n".join([*parts, table(("arms", *names), differences)] if differences else parts)


def by_seed(rows: Rows, sweep: str, arm: str) -> dict[int, dict[str, float]]:
    return {key.seed: row for key, row in sorted(rows.items()) if (key.sweep, key.arm) == (sweep, arm)}


def cell(values: list[float]) -> str:
    mean = f"{100 * statistics.fmean(values):.1f}"
    if len(values) < 2:
        return mean
    low, high = within_rates(interval(values))
    return f"{mean} [{100 * low:.1f}, {100 * high:.1f}]"


def difference(ours: Mapping[int, dict[str, float]], theirs: Mapping[int, dict[str, float]], name: str) -> str:
    found = [ours[seed][name] - theirs[seed][name] for seed in ours if seed in theirs]
    low, high = interval(found)
    return f"{100 * statistics.fmean(found):+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"


if __name__ == "__main__":
    main()
