"""A user's mistake ends in a message that says what to do; a bug in a traceback.

`CREDIT_TRL_TRACEBACK=1` shows the traceback of a mistake too. Where several processes train, each leaves its reason to
the launcher, which tells one of them last: below it would stand what the others say when their partner is gone.
"""

from __future__ import annotations

import difflib
import os
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from signal import SIGTERM
from typing import TYPE_CHECKING

from yaml import YAMLError

from credit_trl.sandbox import SandboxError

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

TRACEBACK = "CREDIT_TRL_TRACEBACK"

# What a mistake is raised as: a value, a name, a file, a module, a sandbox or YAML that is not as it should be.
MISTAKES = (ValueError, TypeError, OSError, ImportError, SandboxError, YAMLError)

_PACKAGE = Path(__file__).parents[1]
_REFUSING = [_PACKAGE, *(Path(find_spec(name).origin).parent for name in ("trl", "transformers"))]
_INSTALLED = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")]


def tell(command: str, error: BaseException, code: int = 1) -> int:
    """Print a mistake without its traceback, and where in the user's own files it happened, if in any.

    Args:
        command: what was run, such as `trl credit`.
        error: one of `MISTAKES`.
        code: the exit code to return.

    Returns:
        `code`.
    """
    if os.environ.get(TRACEBACK) == "1":
        raise error
    place = _place(error)
    print(f"{command}: error: {error}{f' ({place})' if place else ''}", file=sys.stderr)
    return code


def tell_process(command: str, error: ChildFailedError) -> int:
    """Print why a run of several processes failed: the mistake of one of them, else what failed first.

    Args:
        command: what was run.
        error: the launcher's.

    Returns:
        That process's exit code, or 128 + n where signal n ended it, as a shell has it.
    """

    def place(rank: int) -> tuple[int, float]:
        failure = error.failures[rank]
        kinds = {2: 0, 1: 2, -SIGTERM: 3}  # a mistake, a kill, an exception, what the launcher itself has ended
        file = Path(failure.error_file)
        return kinds.get(failure.exitcode, 1), file.stat().st_mtime if file.is_file() else failure.timestamp

    rank = min(error.failures, key=place)
    failure = error.failures[rank]
    reason = failure.message["message"] if isinstance(failure.message, dict) else failure.message
    print(f"{command}: error: process {rank} failed: {reason}", file=sys.stderr)
    return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode


def nearest(name: str, known: Iterable[str]) -> str:
    """` Did you mean --steps?`, or nothing where no name is like this one."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f" Did you mean {close[0]}?" if close else ""


def ignore_renamings() -> None:
    """Leave out what transformers warns of names that TRL uses: nobody who runs a command could act on it."""
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"transformers\.")


def is_mistake(error: BaseException) -> bool:
    """Whether it is about the world, or a `raise` of this package, TRL or transformers, which says what is wrong.

    What other code raises, a verifier, say, and what fails without a `raise`, is a bug somewhere.
    """
    if isinstance(error, OSError | SandboxError | YAMLError):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or not (frames[-1].line or "").startswith("raise "):
        return False
    return any(Path(frames[-1].filename).is_relative_to(folder) for folder in _REFUSING)


def _place(error: BaseException) -> str:
    """`my_verifier.py, line 12`, the innermost line of a file that is neither ours nor installed; "" for none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        installed = any(path.is_relative_to(folder) for folder in (_PACKAGE, *_INSTALLED))
        if path.is_file() and not installed and path.name not in ("trl", "credit-trl"):  # our scripts in bin/
            return f"{path.name}, line {frame.lineno}"
    return ""
