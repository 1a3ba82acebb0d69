"""Lock of a run directory, so that two trainers do not mix their logs and delete each other's checkpoints."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

logger = logging.getLogger(__name__)

LOCK_FILE = ".run_lock"


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
