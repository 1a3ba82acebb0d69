"""Files of a run directory, atomic reading and writing of JSON and JSON Lines, and the description of a run's data.

    run.json                     method, settings and seed of the run
    log.jsonl                    the trainer's logs, one object per line
    evaluations.jsonl            evaluations during training, one object per line
    evaluations/step-000005/     one evaluation: settings.json, samples.jsonl, result.json
    credit_maps/step-000005.json token maps
    _rows/train.parquet          rows that were a `Dataset` object, from which `credit-eval RUN` reads them

Uploads to the hub skip what begins with an underscore, as rows may be private.

A process killed at any moment leaves each file complete, or with an unfinished last line that readers ignore.
`credit_trl.lab.report` reads only these files, so it works offline and with every `report_to`. From the description
in `run.json` `credit_trl.tasks.registry` finds data and verifier again.
"""

import fcntl
import hashlib
import json
import logging
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

RUN_FILE = "run.json"
LOG_FILE = "log.jsonl"
EVALUATIONS_FILE = "evaluations.jsonl"
EVALUATIONS_FOLDER = "evaluations"
ROWS_FOLDER = "_rows"
MAPS_FOLDER = "credit_maps"
SETTINGS_FILE = "settings.json"
RESULT_FILE = "result.json"
LOCK_FILE = ".run_lock"
MAX_STORED_BYTES = 10**9


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


def run_id(folder: str | Path) -> str | None:
    """Name of the run in a directory, a new one where a run starts at step 0; None without one."""
    path = Path(folder) / RUN_FILE
    return read_json(path).get("run") if path.is_file() else None


def keep_up_to(path: str | Path, step: int) -> None:
    """Drop the lines of a JSON Lines file whose `step` is above the step that a run resumes from."""
    if Path(path).is_file():
        write_atomically(path, "".join(json_line(row) for row in read_lines(path) if row.get("step", 0) <= step))


def without_nan(value: Any) -> Any:
    """Copy a JSON value with None in place of NaN and infinities."""
    return json.loads(json.dumps(value), parse_constant=lambda name: None)


def describe_data(
    reward_funcs: Sequence[Any] | Any, reward_weights: Sequence[float] | None = None, **places: Any
) -> dict[str, Any]:
    """Field `data` of `run.json`: how the rows and reward functions of a run are found again.

    Args:
        reward_funcs: one reward function or several, as for `GRPOTrainer`; besides the verifier of `task`.
        reward_weights: their weights, by default 1.
        **places: `task`, a name for `load_task`; `train` and `test`, `describe_rows` of the training and of the
            held-out rows, None for `Dataset` objects, which `store_rows` writes; `train_split`, the split that means
            the training rows.
    """
    functions = list(reward_funcs) if isinstance(reward_funcs, list | tuple) else [reward_funcs]
    return {
        **{"task": None, "train": None, "test": None, "train_split": "train", **places},
        "reward_funcs": [describe_function(one) for one in functions],
        "reward_weights": None if reward_weights is None else list(reward_weights),
        "folder": os.getcwd(),
        "versions": {name: version(name) for name in ("credit-trl", "trl", "datasets")},
    }


def describe_rows(
    path: str | Path | None = None, *, name: str | None = None, streaming: bool = False, **hub: str | None
) -> dict[str, Any]:
    """Place of rows: a local file or folder (with the hash of a file), or `name`, `config` and `split` of the hub."""
    if name is not None and Path(name).is_dir():  # a folder in the hub's form
        name = str(Path(name).resolve())
    place = {"path": None, "sha256": None, "name": name, "config": None, "split": None, "streaming": streaming, **hub}
    if path is not None:
        file = Path(path).resolve()
        place["path"] = str(file)
        if file.is_file():
            with file.open("rb") as content:
                place["sha256"] = hashlib.file_digest(content, "sha256").hexdigest()
    return place


def store_rows(folder: Path, data: dict[str, Any], rows: Mapping[str, Any]) -> None:
    """Write `Dataset` objects that neither task, path nor hub name describes as Parquet into a run directory.

    The `train` and `test` of `data`, the field of `run.json`, are set to the files of the `rows` of these names.
    Streams, rows that a function transforms, and those above `MAX_STORED_BYTES` are not written.
    """
    import datasets  # deferred: a report needs none

    for name, dataset in rows.items():
        is_plain = isinstance(dataset, datasets.Dataset) and dataset.format["type"] != "custom"
        is_stored = is_plain and dataset.data.nbytes <= MAX_STORED_BYTES
        if data["task"] is None and data[name] is None and is_stored:
            path = folder / ROWS_FOLDER / f"{name}.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            shows_bars = not datasets.are_progress_bars_disabled()
            datasets.disable_progress_bars()
            try:
                dataset.to_parquet(path)
                data[name] = describe_rows(path)
            except Exception as error:  # Parquet has no empty structs, for example
                path.unlink(missing_ok=True)
                logger.warning(f"The rows are not stored for `credit-eval` and `credit-map` ({error}).")
            if shows_bars:
                datasets.enable_progress_bars()


def describe_function(function: Any) -> dict[str, Any]:
    """Import name and file of a reward function; the name is None where no import finds it."""
    module = getattr(function, "__module__", None)
    name = getattr(function, "__qualname__", None)
    is_found = module not in (None, "__main__") and name is not None and "<" not in name
    file = getattr(sys.modules.get(module or ""), "__file__", None)
    called = name or type(function).__name__
    return {"name": f"{module}:{name}" if is_found else None, "called": called, "file": file}
