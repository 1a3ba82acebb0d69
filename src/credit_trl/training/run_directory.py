"""Files of a run directory, and atomic reading and writing of JSON and JSON Lines.

    run.json                     method, settings and seed of the run
    log.jsonl                    the trainer's logs, one object per line
    evaluations.jsonl            evaluations during training, one object per line
    evaluations/step-000005/     one evaluation: settings.json, samples.jsonl, result.json
    rows/train.parquet           rows that were a `Dataset` object, from which `credit-eval RUN` reads them

A process killed at any moment leaves each file complete, or with an unfinished last line that readers ignore.
`credit_trl.lab.report` reads only these files, so it works offline and with every `report_to`.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

RUN_FILE = "run.json"
LOG_FILE = "log.jsonl"
EVALUATIONS_FILE = "evaluations.jsonl"
EVALUATIONS_FOLDER = "evaluations"
ROWS_FOLDER = "rows"
SETTINGS_FILE = "settings.json"
RESULT_FILE = "result.json"
LOCK_FILE = ".run_lock"


def write_atomically(path: str | Path, text: str) -> None:
    """Replace a file in one step: readers see the old or the new content. It is on disk when this returns."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    scratch.write_text(text, encoding="utf-8", newline="\n")
    sync(scratch)
    os.replace(scratch, path)


def sync(path: Path) -> None:
    """Wait until a file or folder is on disk. A full disk may only raise an error here."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_scratch_files(folder: Path) -> None:
    """Remove unfinished files of `write_atomically` by killed processes. Called while nothing else writes there."""
    for path in folder.rglob(".*.tmp"):
        path.unlink(missing_ok=True)


def write_json(path: str | Path, value: Any) -> None:
    """Write a value as JSON with `write_atomically`. NaN and infinities become null, as JSON has neither."""
    write_atomically(path, json.dumps(without_nan(value), indent=2, ensure_ascii=False, sort_keys=True) + "\n")


def json_line(value: Any) -> str:
    """Format a value as one line of a JSON Lines file, with its newline."""
    return json.dumps(without_nan(value), ensure_ascii=False, separators=(",", ":")) + "\n"


def append_lines(path: str | Path, *rows: Mapping[str, Any]) -> None:
    """Append objects to a JSON Lines file. The lines are on disk when this returns; on an `OSError` none is there."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    length = path.stat().st_size if path.is_file() else 0
    try:
        with path.open("a", encoding="utf-8", newline="\n") as file:
            file.write("".join(map(json_line, rows)))
        sync(path)
    except OSError:
        if path.is_file():
            os.truncate(path, length)  # a full disk may have taken a part
        raise


def read_lines(path: str | Path) -> list[dict[str, Any]]:
    """Read the objects of a JSON Lines file; none if there is no file.

    A last line without a newline was not written completely and is ignored.

    Raises:
        ValueError: another line is not a JSON object; the message names file and line.
    """
    path = Path(path)
    if not path.is_file():
        return []
    *whole, _unfinished = path.read_bytes().split(b"\n")
    return [_json_object(line, f"{path}, line {number}") for number, line in enumerate(whole, 1)]


def read_json(path: str | Path) -> dict[str, Any]:
    """Read the object of a JSON file. The `ValueError` for another content names the file."""
    return _json_object(Path(path).read_bytes(), str(path))


def _json_object(text: bytes, place: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{place} is not a JSON object.")
    return value


class RunLockedError(RuntimeError):
    """Another trainer uses the run directory."""


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a run directory inside the block. One process of a run calls it.

    The system releases the lock (`flock`, on network file systems too) when its process ends in any way, so that no
    lock is stale. On a file system without locks the run goes on with a warning.

    Raises:
        RunLockedError: another process holds it; the message names its host, process and start.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK_FILE
    with path.open("a+") as file:
        # A child would hold the lock beyond the death of this process.
        os.register_at_fork(after_in_child=file.close)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunLockedError(
                f"{folder} is used by another trainer: {path.read_text()}. Wait for it, end it, or set another "
                f"`output_dir`. If it no longer runs, remove {path}."
            ) from error
        except OSError as error:
            logger.warning(f"{path} cannot be locked ({error}): start no second trainer in {folder}.")
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}, started {datetime.now():%Y-%m-%d %H:%M:%S}")
        file.flush()
        yield
        file.truncate(0)


def keep_up_to(path: str | Path, step: int) -> None:
    """Drop the lines of a JSON Lines file whose `step` is above the step that a run resumes from."""
    if Path(path).is_file():
        write_atomically(path, "".join(json_line(row) for row in read_lines(path) if row.get("step", 0) <= step))


def without_nan(value: Any) -> Any:
    """Copy a JSON value with None in place of NaN and infinities."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return value
