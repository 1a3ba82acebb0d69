"""Lock of a run directory, so that two trainers do not mix their logs and delete each other's checkpoints."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil

LOCK_FILE = ".run_lock"
# Seconds between two signs of life of a lock's holder, and without one after which a holder on another host is dead:
# longer than network file systems keep the time of a file.
BEAT = 20.0
STALE = 120.0


class RunLockedError(RuntimeError):
    """Another trainer uses the run directory."""


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a run directory inside the block.

    The lock of a process that was killed is taken over: at once if it ran on this host, otherwise after `STALE`
    seconds without a sign of life. One process of a run calls it.

    Raises:
        RunLockedError: another process holds it; the message names its host, process and start.
    """
    path = folder / LOCK_FILE
    folder.mkdir(parents=True, exist_ok=True)
    own = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": psutil.Process().create_time(),
        "token": uuid4().hex,
    }
    while not _create(path, own):
        holder = _read(path)
        if holder is not None and _is_alive(path, holder):
            started = datetime.fromtimestamp(holder["started"]).isoformat(" ", "seconds")
            raise RunLockedError(
                f"{folder} is used by another trainer: process {holder['pid']} on {holder['host']}, started {started}."
                f" Wait for it, end it, or set another `output_dir`. If it no longer runs, remove {path}."
            )
        _remove_stale(path, holder)
    released = threading.Event()
    beat = threading.Thread(target=_beat, args=(path, released), daemon=True)
    beat.start()
    try:
        yield
    finally:
        released.set()
        beat.join()
        if _read(path) == own:
            path.unlink(missing_ok=True)


def _create(path: Path, own: dict[str, Any]) -> bool:
    """Create the lock, which only one process can; False if there is one."""
    try:
        with path.open("x") as file:
            file.write(json.dumps(own))
    except FileExistsError:
        return False
    return True


def _read(path: Path) -> dict[str, Any] | None:
    """The holder of the lock; None if there is no lock, or one whose process was killed before it wrote its name."""
    for _ in range(3):
        try:
            return json.loads(path.read_text())
        except FileNotFoundError:
            return None
        except ValueError:
            time.sleep(0.1)  # it is being written
    return None


def _is_alive(path: Path, holder: dict[str, Any]) -> bool:
    if holder["host"] == socket.gethostname():
        try:
            process = psutil.Process(holder["pid"])
            is_same = abs(process.create_time() - holder["started"]) < 1.0
            return is_same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False
    first = _last_beat(path)
    deadline = time.monotonic() + STALE
    while time.monotonic() < deadline:
        time.sleep(min(1.0, STALE / 10))
        if _last_beat(path) != first:  # also released or taken over
            return _last_beat(path) is not None
    return False


def _last_beat(path: Path) -> int | None:
    with suppress(FileNotFoundError), path.open("rb") as file:  # opening makes network file systems ask the server
        return os.fstat(file.fileno()).st_mtime_ns
    return None


def _remove_stale(path: Path, holder: dict[str, Any] | None) -> None:
    """Remove the lock of a dead holder, unless another process has taken it over in the meantime."""
    aside = path.with_name(f"{path.name}.{uuid4().hex}.tmp")
    with suppress(FileNotFoundError):
        os.rename(path, aside)
        if _read(aside) == holder:
            aside.unlink()
        else:
            os.rename(aside, path)


def _beat(path: Path, released: threading.Event) -> None:
    while not released.wait(BEAT):
        with suppress(OSError):
            os.utime(path)
