"""Files of a run directory, atomic reading and writing of JSON and JSON Lines, and the description of a run's data.

    run.json                     method, settings and seed of the run
    log.jsonl                    the trainer's logs, one object per line
    evaluations.jsonl            evaluations during training, one object per line
    evaluations/step-000005/     one evaluation: settings.json, samples.jsonl, result.json
    credit_maps/step-000005.json token maps
    _rows/train.parquet          rows that were a `Dataset` object, from which `credit-eval RUN` reads them
    _earlier_1/                  the files of an earlier run in this directory

Uploads to the hub skip what begins with an underscore, as rows may be private.

A process killed at any moment leaves each file complete, or with an unfinished last line that readers ignore.
`credit_trl.lab.report` reads only these files, so it works offline and with every `report_to`. From the description
in `run.json` `credit_trl.tasks.registry` finds data and verifier again.
"""

import errno
import fcntl
import hashlib
import json
import logging
import os
import resource
import shutil
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any
from weakref import WeakSet

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
EARLIER = "_earlier_"
CARD = "README.md"
MAX_STORED_BYTES = 10**9

# Names that a run writes into its directory, besides the saved models, which `run.json` lists, and checkpoints.
_RUN_NAMES = (
    *(LOG_FILE, EVALUATIONS_FILE, EVALUATIONS_FOLDER, ROWS_FOLDER, MAPS_FOLDER, "completions", "credit_eval"),
    *("report.html", "report.md", "report.json", "trainer_state.json", "all_results.json", "eval_results.json"),
)
# Ending of the files that `write_atomically` renames, which a killed process leaves.
_SCRATCH = ".credit_trl.tmp"
# Fields of `run.json` that are read again -> type.
_RUN_FIELDS = {"run": str, "config": dict, "segments": list, "saved": list, "data": dict}


def write_atomically(path: str | Path, text: str) -> None:
    """Replace a file in one step: readers see the old or the new content. It is on disk when this returns."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}{_SCRATCH}")
    scratch.unlink(missing_ok=True)  # and with it a link to another file
    with scratch.open("x", encoding="utf-8", newline="\n") as file:
        file.write(text)
    sync(scratch)
    os.replace(scratch, path)


def remove_scratch(folder: Path) -> None:
    """Remove what `write_atomically` left in a run directory whose process was killed."""
    for place in ("", f"{EVALUATIONS_FOLDER}/*/", f"{MAPS_FOLDER}/"):
        for scratch in folder.glob(f"{place}.*{_SCRATCH}"):
            scratch.unlink(missing_ok=True)


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


def append_lines(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append objects to a JSON Lines file. The lines are on disk when this returns; on an `OSError` none is there."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    length = path.stat().st_size if path.is_file() else 0
    try:
        with open(path, "a", encoding="utf-8", newline="\n", opener=_open_without_link) as file:
            file.write("".join(map(json_line, rows)))
        sync(path)
    except OSError:
        if path.is_file():
            os.truncate(path, length)  # a full disk may have taken a part
        raise


def _open_without_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def read_lines(path: str | Path) -> list[dict[str, Any]]:
    """Read the objects of a JSON Lines file; none if there is no file.

    A last line without a newline was not written completely and is ignored.

    Raises:
        ValueError: another line is not a JSON object; the message names file and line.
    """
    path = Path(path)
    if not path.is_file():
        return []
    *complete_lines, _unfinished = path.read_bytes().split(b"\n")
    return [_json_object(line, f"{path}, line {number}") for number, line in enumerate(complete_lines, 1)]


def read_json(path: str | Path) -> dict[str, Any]:
    """Read the object of a JSON file. The `ValueError` for another content names the file."""
    return _json_object(Path(path).read_bytes(), str(path))


def _json_object(text: bytes, place: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place} is not JSON: {error}. Correct or remove it.") from error
    if not isinstance(value, dict):
        raise ValueError(f"{place} is not a JSON object. Correct or remove it.")
    return value


def read_steps(path: str | Path) -> list[dict[str, Any]]:
    """Read `log.jsonl` or `evaluations.jsonl`, as `read_lines`; each row has its step.

    Raises:
        ValueError: a line is damaged; the message names file and line.
    """
    rows = read_lines(path)
    for number, row in enumerate(rows, 1):
        if not isinstance(row.get("step"), int):
            raise ValueError(f"{path}, line {number}: `step` is {row.get('step')!r}, no number. Remove the line.")
    return rows


def read_run_file(folder: str | Path) -> dict[str, Any]:
    """Read `run.json` of a run directory.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is no JSON, or a field has another type.
    """
    path = Path(folder) / RUN_FILE
    run = read_json(path)
    for name, kind in _RUN_FIELDS.items():
        if not isinstance(run.get(name), kind | None):
            raise ValueError(f"{path}: `{name}` is {run[name]!r}, expected a {kind.__name__}. Restore it from a copy.")
    for segment in run.get("segments") or ():
        if not (isinstance(segment, dict) and isinstance(segment.get("step"), int)):
            raise ValueError(f"{path}: a segment is {segment!r}, expected a `step` with `options`. Restore it.")
    return run


class RunLockedError(RuntimeError):
    """Another trainer uses the run directory, or it is no longer the one that this trainer began to use."""


class RunLock:
    """The lock of a run directory: an exclusive `flock` of the folder and of a file in it.

    The system releases it when its process ends in any way, so that no lock is stale. Where folders have no locks, as
    on NFS, the file has one. A file that is removed or a folder that is moved is noticed by `check`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._descriptors: dict[Path, int] = {}
        _LOCKS.add(self)

    def acquire(self) -> None:
        """Take the lock, as `run_lock`."""
        path = self.folder / LOCK_FILE
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            while not self._is_current():  # a process that ends removes the file that another one has just opened
                self._close()
                self._descriptors[self.folder] = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
                self._lock(self.folder)
                self._descriptors[path] = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
                if not self._lock(path):
                    logger.warning(f"{path} cannot be locked: start no second trainer in {self.folder}.")
        except BlockingIOError as error:
            self._close()
            raise RunLockedError(
                f"{self.folder} is used by another trainer: {_holder(path)}. Wait for it, end that process, or set "
                "another `output_dir`."
            ) from error
        except OSError as error:
            self._close()
            kind = "a symbolic link" if path.is_symlink() else "no file that can be opened"
            place = f"{path} is {kind}" if os.path.lexists(path) else f"{self.folder} is no folder that can be used"
            raise ValueError(f"{place} ({error.strerror}). Remove it, or set another `output_dir`.") from error
        holder = f"process {os.getpid()} on {socket.gethostname()}, started {datetime.now():%Y-%m-%d %H:%M:%S}"
        os.ftruncate(self._descriptors[path], 0)
        os.pwrite(self._descriptors[path], holder.encode(), 0)

    def check(self) -> None:
        """Raise `RunLockedError` where folder or file were moved, removed or replaced since."""
        if not self._is_current():
            raise RunLockedError(
                f"{self.folder} was moved, or {LOCK_FILE} in it was removed, while this run used it, so another "
                "trainer may write there. The run ends and writes nothing more. Resume it from its last checkpoint."
            )

    def release(self) -> None:
        """Remove the file and release the lock."""
        if self._is_current():
            (self.folder / LOCK_FILE).unlink()
        self._close()

    def _lock(self, path: Path) -> bool:
        """Whether the file system has locks for it. Raises `BlockingIOError` where another process holds it."""
        try:
            fcntl.flock(self._descriptors[path], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:
            return False
        return True

    def _is_current(self) -> bool:
        """Whether the lock is taken, and folder and file are those that are locked."""
        try:
            states = [(os.fstat(descriptor), os.stat(path)) for path, descriptor in self._descriptors.items()]
        except OSError:
            return False
        return bool(states) and all(os.path.samestat(*pair) for pair in states)

    def _close(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()


# One hook for all of them, as a hook cannot be removed.
_LOCKS: WeakSet[RunLock] = WeakSet()


def _close_in_child() -> None:
    """Close the locks in a forked process, which would hold them beyond the death of this one."""
    for lock in _LOCKS:
        lock._close()


os.register_at_fork(after_in_child=_close_in_child)


def _holder(path: Path) -> str:
    """Process, host and start of the holder of a lock, which its file has."""
    with suppress(OSError):
        return path.read_text("utf-8", errors="replace")[:200] or "it has just started"
    return f"its {LOCK_FILE} was removed"


@contextmanager
def run_lock(folder: Path) -> Iterator[RunLock]:
    """Hold the lock of a run directory inside the block. One process of a run calls it.

    On a file system without locks the run goes on with a warning.

    Raises:
        RunLockedError: another process holds it; the message names its host, process and start.
        ValueError: the folder cannot be used.
    """
    lock = RunLock(folder)
    lock.acquire()
    try:
        yield lock
    finally:
        lock.release()


def refuse_links(folder: Path, more: Iterable[str] = ()) -> None:
    """Refuse a run directory where a name that the run writes is a symbolic link, as its target would be changed.

    So is a folder in place of a file, and a file in place of a folder. `more` are further paths in it, such as
    checkpoints.

    Raises:
        ValueError: the message names the path.
    """
    for path in [*(folder / name for name in (RUN_FILE, *_RUN_NAMES)), *map(Path, more)]:
        if path.is_symlink():
            raise ValueError(
                f"{path} is a symbolic link, and a run does not write through links. Remove it, or set another "
                "`output_dir`; a checkpoint elsewhere is resumed by its own path."
            )
        if path.exists() and path.is_file() != bool(path.suffix):
            kind, other = ("a folder", "file") if path.suffix else ("a file", "folder")
            raise ValueError(f"{path} is {kind}, and a run writes a {other} there. Remove it.")


def run_id(folder: str | Path) -> str | None:
    """Name of the run in a directory, a new one where a run starts at step 0; None without one that can be read."""
    with suppress(OSError, ValueError):  # the run that resumes warns about it
        return read_run_file(folder).get("run")
    return None


def keep_up_to(path: str | Path, step: int) -> None:
    """Drop the lines of a JSON Lines file whose `step` is above the step that a run resumes from.

    Lines that cannot be read are dropped with a warning.
    """
    path = Path(path)
    if not path.is_file():
        return
    lines = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            row = _json_object(line, f"{path}, line {number}")
            is_early = row.get("step", 0) <= step
        except (ValueError, TypeError) as error:
            logger.warning(f"Line {number} of {path} is dropped: {error}")
            continue
        if is_early:
            lines.append(json_line(row))
    write_atomically(path, "".join(lines))


def holds_run(folder: Path) -> bool:
    """Whether a run has written into a directory."""
    return any((folder / name).exists() for name in (RUN_FILE, LOG_FILE, EVALUATIONS_FILE))


def set_aside(folder: Path, checkpoints: Iterable[str]) -> Path | None:
    """Move the files of an earlier run into `_earlier_<n>` of its directory; None where there is nothing to keep.

    `checkpoints` are its checkpoints. `run.json` lists the files of its models and is moved last, so that a process
    that is killed meanwhile has the next one move the others.
    """
    saved = []
    with suppress(OSError, ValueError):
        saved = read_run_file(folder).get("saved") or []
    names = [
        *_RUN_NAMES,
        *([CARD] if _is_model_card(folder / CARD) else []),
        *(Path(path).name for path in checkpoints),
        *filter(_is_name, saved),
    ]
    present = [name for name in names if os.path.lexists(folder / name)]
    if not (present and holds_run(folder)):
        return None
    count = 1
    while (folder / f"{EARLIER}{count}" / RUN_FILE).exists():
        count += 1
    place = folder / f"{EARLIER}{count}"
    place.mkdir(exist_ok=True)
    for name in dict.fromkeys([*present, RUN_FILE]):
        with suppress(FileNotFoundError):
            os.rename(folder / name, place / name)
    sync(folder)
    return place


def _is_model_card(path: Path) -> bool:
    """Whether TRL wrote a file, as it does with every checkpoint."""
    return path.is_file() and "generated_from_trainer" in path.read_text("utf-8", errors="replace")


def _is_name(name: Any) -> bool:
    """Whether a name that `run.json` lists is that of a file in its folder."""
    return isinstance(name, str) and name not in ("", ".", "..") and Path(name).name == name


def file_versions(folder: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of each file in a folder, by name: both change where a file is written."""
    files = (entry for entry in os.scandir(folder) if entry.is_file()) if folder.is_dir() else ()
    return {file.name: (file.stat().st_ino, file.stat().st_mtime_ns) for file in files if file.name != LOCK_FILE}


def write_advice(error: Exception, folder: Path) -> str:
    """What makes it possible to write a checkpoint; the libraries' errors name the cause in their text only."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    free = shutil.disk_usage(folder).free if folder.is_dir() else 0
    if limit != resource.RLIM_INFINITY and os.strerror(errno.ENOSPC) not in str(error):
        return f"Raise the limit of {limit:,} bytes a file (`ulimit -f unlimited`)"
    if isinstance(error, OSError) and error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return f"Make {folder} a folder that can be written"
    return f"Make space, {free / 2**30:.2f} GiB are free in {folder}"


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
        "reward_funcs": [describe_function(function) for function in functions],
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
