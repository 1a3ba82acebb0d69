"""Directories in the user's cache that are made on first use."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock


def cache_directory() -> Path:
    """`$XDG_CACHE_HOME/credit_trl`, or `~/.cache/credit_trl`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "credit_trl"


def cached(directory: Path, make: Callable[[Path], None]) -> Path:
    """The directory, made by `make` if it does not exist.

    `make` gets a new empty directory beside it, which is renamed when `make` returns, so that `directory` is complete
    where it exists. Of several processes one makes it and the others wait; a process that ends releases its lock.
    """
    if directory.is_dir():
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(directory.parent / f".{directory.name}.lock"):
        if not directory.is_dir():
            scratch = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f".{directory.name}."))
            try:
                make(scratch)
                scratch.chmod(0o755)
                scratch.rename(directory)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    return directory
