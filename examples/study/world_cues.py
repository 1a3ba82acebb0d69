"""Rates of the runs of a predicted world by cue, in one CSV file: intervals resample bases and cues.

A run's row has one column per measure and cue, the mean over the prompts of the cue and their samples.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from credit_trl.evaluation.statistics import Interval, two_level_ci
from credit_trl.lab.comparison import Run
from credit_trl.lab.comparison.runs import find_runs
from credit_trl.tasks.quickstart import GROUPS, build

KEY = ("world", "seed", "arm", "step")
MEASURES = {"thought": "shortcut", "accuracy": "score"}  # name in the table → name in a run
CUES = tuple(cue for group in GROUPS.values() for cue in group)
COLUMNS = (*KEY, *(f"{measure} {cue}" for measure in MEASURES for cue in CUES))

CueRows = dict[tuple[str, int, str, int], dict[str, float]]


def cue_rows_of_runs(folder: Path, world: str) -> CueRows:
    """Rows of the finished runs in a folder."""
    if not folder.is_dir():
        return {}
    return {
        (world, run.seed, run.arm, step): cue_rates(run, step)
        for run in find_runs([folder])
        if run.finished
        for step in run.steps
    }


def cue_rates(run: Run, step: int) -> dict[str, float]:
    """Mean of every measure over the prompts of each cue."""
    cue_of = {row["id"]: row["cue"] for row in build("test")}
    rates = {}
    for measure, name in MEASURES.items():
        values = defaultdict(list)
        for prompt, value in run.per_prompt(step, name).items():
            values[cue_of[prompt]].append(value)
        rates |= {f"{measure} {cue}": float(np.mean(values[cue])) for cue in CUES}
    return rates


def read_cue_rows(file: Path) -> CueRows:
    if not file.is_file():
        return {}
    with file.open(encoding="utf-8", newline="") as lines:
        return {
            (row["world"], int(row["seed"]), row["arm"], int(row["step"])): {
                n: float(row[n]) for n in COLUMNS[len(KEY) :]
            }
            for row in csv.DictReader(lines)
        }


def write_cue_rows(file: Path, rows: CueRows) -> None:
    with file.open("w", encoding="utf-8", newline="") as lines:
        writer = csv.writer(lines, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows((*key, *(f"{rows[key][name]:.4g}" for name in COLUMNS[len(KEY) :])) for key in sorted(rows))


def cue_matrix(rows: Sequence[Mapping[str, float]], column: str) -> np.ndarray:
    """(bases, cues) of a column of worlds.csv, such as "thought_unknown"."""
    measure, group = column.split("_")
    return np.array([[row[f"{measure} {cue}"] for cue in GROUPS[group]] for row in rows])


def resampled(rows: Sequence[Mapping[str, float]], others: Sequence[Mapping[str, float]], column: str) -> Interval:
    """Mean over bases and cues with an interval that resamples both, of a column or of a paired difference.

    Args:
        rows: rows by cue of an arm, one per base.
        others: rows of another arm on the same bases, to subtract; may be empty.
        column: name in worlds.csv.
    """
    if others:
        return two_level_ci(cue_matrix(rows, column) - cue_matrix(others, column), bounds=(-1.0, 1.0))
    return two_level_ci(cue_matrix(rows, column), bounds=(0.0, 1.0))
