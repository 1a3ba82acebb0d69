"""A user's mistake ends in a message that says what to do; a bug in a traceback.

`CREDIT_TRL_TRACEBACK=1` shows the traceback of a mistake too.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from importlib.util import find_spec
from pathlib import Path

from yaml import YAMLError

from credit_trl.sandbox import SandboxError

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
