"""What a run leaves in its directory, and how it is written so that a kill at any moment leaves nothing half done.

    run.json                     what was run: method, settings, seed
    log.jsonl                    every log of the trainer, one object a line
    evaluations.jsonl            every evaluation during training, one object a line
    evaluations/step-000005/     one evaluation: settings.json, samples.jsonl, result.json
    best.json                    which step's model is kept as the best, and where
    summary.json                 best-during-training and final scores, written when training ends

`credit_trl.lab.comparison` reads these files and nothing else, so it works offline and for every `report_to`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

RUN_FILE = "run.json"
LOG_FILE = "log.jsonl"
EVALUATIONS_FILE = "evaluations.jsonl"
EVALUATIONS_FOLDER = "evaluations"
BEST_FILE = "best.json"
SUMMARY_FILE = "summary.json"
JOB_FILE = "job.json"  # of a sweep, before there is a run


def write_atomically(path: str | Path, text: str) -> None:
    """Write a file so that a reader sees the old content or the new, whole; on disk when this returns."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with scratch.open("w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, path)


def write_json(path: str | Path, value: Any) -> None:
    """`write_atomically` of JSON; NaN and infinities become null, which every reader of JSON takes."""
    write_atomically(path, json.dumps(without_nan(value), indent=2, ensure_ascii=False, sort_keys=True) + "\n")


def json_line(value: Any) -> str:
    """One line of a JSONL file, with its newline."""
    return json.dumps(without_nan(value), ensure_ascii=False, separators=(",", ":")) + "\n"


def append_line(path: str | Path, value: Any) -> None:
    """Append one object to a JSONL file; the line is on disk when this returns."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8", newline="\n") as file:
        file.write(json_line(value))
        file.flush()
        os.fsync(file.fileno())


def read_lines(path: str | Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file. A last line without an end was being written when its writer died: it is left out.

    Raises:
        ValueError: another line is not a JSON object; the message names file and line.
    """
    path = Path(path)
    if not path.is_file():
        return []
    *whole, _unfinished = path.read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(whole, 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}, line {number} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number} is not a JSON object.")
        rows.append(row)
    return rows


def write_lines(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Replace a JSONL file."""
    write_atomically(path, "".join(json_line(row) for row in rows))


def keep_up_to(path: str | Path, step: int) -> None:
    """Drop what an interrupted run wrote to a JSONL file after the step that it now resumes from."""
    if Path(path).is_file():
        write_lines(path, [row for row in read_lines(path) if row.get("step", 0) <= step])


def without_nan(value: Any) -> Any:
    """The same value with None for every float that JSON has no word for."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return value
