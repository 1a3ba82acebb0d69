"""Rates of the runs of a predicted world by cue, in one CSV file: intervals resample bases and cues.

A run's row has one column per measure and cue, the mean over the prompts of the cue and their samples.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from predicted import PREDICTED

from credit_trl.evaluation.statistics import Interval, two_level_ci
from credit_trl.lab.comparison import Run
from credit_trl.lab.comparison.runs import find_runs

KEY = ("world", "seed", "arm", "step")
MEASURES = {"thought": "shortcut", "accuracy": "score"}  # name in the table → name in a run

CueRows = dict[tuple[str, int, str, int], dict[str, float]]


def columns_of(world: str) -> list[str]:
    """Columns of the rates by cue of a world."""
    return [f"{measure} {cue}" for measure in MEASURES for cues in PREDICTED[world].cues.values() for cue in cues]


def cue_rows_of_runs(folder: Path, world: str) -> CueRows:
    """Rows of the finished runs in a folder."""
    if not folder.is_dir():
        return {}
    return {
        (world, run.seed, run.arm, step): cue_rates(run, step, PREDICTED[world].cue_of)
        for run in find_runs([folder])
        if run.finished
        for step in run.steps
    }


def cue_rates(run: Run, step: int, cue_of: Mapping[str, str]) -> dict[str, float]:
    """Mean of every measure over the prompts of each cue."""
    rates = {}
    for measure, name in MEASURES.items():
        values = defaultdict(list)
        for prompt, value in run.per_prompt(step, name).items():
            values[cue_of[prompt]].append(value)
        rates |= {f"{measure} {cue}": float(np.mean(own)) for cue, own in values.items()}
    return rates


def read_cue_rows(file: Path) -> CueRows:
    if not file.is_file():
        return {}
    with file.open(encoding="utf-8", newline="") as lines:
        return {
            (row["world"], int(row["seed"]), row["arm"], int(row["step"])): {
                name: float(value) for name, value in row.items() if name not in KEY
            }
            for row in csv.DictReader(lines)
        }


def write_cue_rows(file: Path, rows: CueRows) -> None:
    """Write the rows of one world."""
    columns = columns_of(next(iter(rows))[0])
    with file.open("w", encoding="utf-8", newline="") as lines:
        writer = csv.writer(lines, lineterminator="\n")
        writer.writerow((*KEY, *columns))
        writer.writerows((*key, *(f"{rows[key][name]:.4g}" for name in columns)) for key in sorted(rows))


def cue_matrix(rows: Sequence[Mapping[str, float]], column: str, cues: Mapping[str, Sequence[str]]) -> np.ndarray:
    """(bases, cues) of a column of worlds.csv, such as "thought_unknown", from the cues of each group."""
    measure, group = column.split("_")
    return np.array([[row[f"{measure} {cue}"] for cue in cues[group]] for row in rows])


def resampled(
    rows: Sequence[Mapping[str, float]], others: Sequence[Mapping[str, float]], column: str, world: str
) -> Interval:
    """Mean over bases and cues with an interval that resamples both, of a column or of a paired difference.

    Args:
        rows: rows by cue of an arm, one per base.
        others: rows of another arm on the same bases, to subtract; may be empty.
        column: name in worlds.csv.
        world: name of the world.
    """
    cues = PREDICTED[world].cues
    found = cue_matrix(rows, column, cues)
    if others:
        return two_level_ci(found - cue_matrix(others, column, cues), bounds=(-1.0, 1.0))
    return two_level_ci(found, bounds=(0.0, 1.0))
