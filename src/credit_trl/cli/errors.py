"""One-line reports of user errors; bugs keep their traceback.

`CREDIT_TRL_TRACEBACK=1` shows the traceback of user errors too. With several processes, each records its error for the
launcher, which reports one of them last, below the errors of processes that lost their peer.
"""

from __future__ import annotations

import difflib
import errno
import os
import re
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib.util import find_spec
from io import TextIOWrapper
from pathlib import Path
from signal import SIGKILL, SIGPIPE, SIGTERM, strsignal
from typing import TYPE_CHECKING

from yaml import YAMLError

from credit_trl.sandbox import SandboxError
from credit_trl.sandbox.protocol import printable
from credit_trl.sandbox.user_code import PACKAGE_FOLDER, is_raised_by, user_line

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

# Exception types that may report a user error: a wrong value, name, file, module, sandbox or YAML. Those of a run that
# cannot go on, such as `CheckpointError`, `NonFiniteError` and `RunLockedError`, are `RuntimeError`s. `is_user_error`
# also knows those of functions of the user and of the network, which have any type.
USER_ERRORS = (ValueError, TypeError, OSError, ImportError, SandboxError, YAMLError, RuntimeError)

_VALIDATING = [PACKAGE_FOLDER, *(Path(find_spec(name).origin).parent for name in ("trl", "transformers"))]
# Packages whose exceptions are failures of the network or the hub.
_NETWORK = ("httpx", "httpcore", "huggingface_hub", "requests", "urllib3")
# Error of the system -> what is wrong, and what to do.
_SYSTEM = {
    errno.ENOENT: "there is no such file or folder. Check the path, and the folder in which the command runs.",
    errno.EEXIST: "this is a file, where a folder is needed. Name another path.",
    errno.ENOTDIR: "a part of this path is a file, where a folder is needed. Name another path.",
    errno.EISDIR: "this is a folder, where a file is needed. Name a file in it.",
    errno.EACCES: "the permission is missing. Change it, or name another path.",
    errno.EROFS: "the file system is read-only. Name another path.",
    errno.ENOSPC: "the disk is full. Free space, or name another path.",
}


def report_user_error(command: str, error: BaseException, code: int = 1) -> int:
    """Print an error with the line of the user's own files that raised it, if any; return the exit code `code`.

    Nothing is printed where the reader of the output has ended, as `head` does.
    """
    if isinstance(error, BrokenPipeError) and _output_is_closed():
        return 128 + SIGPIPE
    if os.environ.get("CREDIT_TRL_TRACEBACK") == "1":
        raise error
    tqdm = sys.modules.get("tqdm.std")
    for bar in list(getattr(tqdm and tqdm.tqdm, "_instances", ())):
        bar.close()  # so that the error begins on a line of its own
    text = printable(_text(error), allowed="\n") + _user_line(error)
    print(f"{command}: error: {text}", file=sys.stderr)
    return code


def spell_unencodable() -> None:
    """Print characters that the locale lacks, such as λ in Latin-1, as `\\u03bb` instead of failing."""
    if isinstance(sys.stdout, TextIOWrapper):  # a notebook has another stream
        with suppress(OSError, ValueError):  # a descriptor that was replaced, a stream that was closed
            sys.stdout.reconfigure(errors="backslashreplace")


def _output_is_closed() -> bool:
    """Whether the reader of the output has ended. What is left of the output is then discarded."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


def report_exit_code(command: str, code: int) -> int:
    """Return the exit code of a process as a shell does: 128 + n, with a printed line, if signal n ended it.

    A process that ended by itself has printed its error.
    """
    if code >= 0:
        return code
    cause = "; Linux sends it where memory runs out (`dmesg`)" if code == -SIGKILL else ""
    print(f"{command}: error: signal {-code} ({strsignal(-code)}) ended the process{cause}", file=sys.stderr)
    return 128 - code


def report_failed_process(command: str, error: ChildFailedError) -> int:
    """Print why a run of several processes failed.

    A user error takes precedence over a killed process, and that over other exceptions; ties go to the earliest.

    Returns:
        The exit code of the reported process, or 128 + n if signal n ended it, as a shell returns. Nothing is printed
        for a run that SIGTERM ended with a checkpoint.
    """
    from credit_trl.cli.preemption import REQUEUE

    def order(failure: ProcessFailure) -> tuple[int, float]:
        kinds = {2: 0, 1: 2, -SIGTERM: 3}  # user error, (killed,) exception, ended by the launcher
        file = Path(failure.error_file)
        return kinds.get(failure.exitcode, 1), file.stat().st_mtime if file.is_file() else failure.timestamp

    if any(process.exitcode == REQUEUE for process in error.failures.values()):  # others are ended by the launcher
        return REQUEUE
    rank, failure = min(error.failures.items(), key=lambda item: order(item[1]))
    reason = failure.message["message"] if isinstance(failure.message, dict) else failure.message
    text = printable(reason, allowed="\n")
    print(f"{command}: error: process {rank} failed: {text}", file=sys.stderr)
    return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode


def suggest(name: str, valid_names: Iterable[str]) -> str:
    """` Did you mean --steps?` for the known name most similar to `name`, or an empty string."""
    close = difflib.get_close_matches(name, valid_names, n=1, cutoff=0.75)
    return f" Did you mean {close[0]}?" if close else ""


def remedy_of(option: str, options: Iterable[str], other_names: Mapping[str, str]) -> str:
    """` Set …` for an option that has another name here, where this command knows it, or as `suggest`."""
    advice = other_names.get(option.lstrip("-"), "")
    words = re.findall(r"`(\w+)", advice)
    return f" {advice}" if any(f"--{word}" in options for word in words) else suggest(option, options)


def is_user_error(error: BaseException) -> bool:
    """Whether an exception reports a user error.

    True for errors of files, YAML, the sandbox, the network and functions of the user, and for a `raise` statement of
    this package, TRL or transformers. Exceptions of other code, and exceptions without a `raise` statement, are bugs.
    """
    if getattr(error, "is_explained", False) or isinstance(error, OSError | SandboxError | YAMLError):
        return True
    return _is_of_network(error) or is_raised_by(error, _VALIDATING)


def _is_of_network(error: BaseException) -> bool:
    return type(error).__module__.partition(".")[0] in _NETWORK


def _text(error: BaseException) -> str:
    """What is wrong and what to do, in a line where Python, the network or the system say it in another way."""
    if _is_of_network(error):
        cause = str(error).partition("\n")[0] or type(error).__name__
        return f"the hub or another service is not reached ({cause}). Check the network, or use local files."
    remedy = _SYSTEM.get(getattr(error, "errno", None))
    name = getattr(error, "filename", None)
    is_plain = remedy is not None and name is not None and not getattr(error, "is_explained", False)
    return f"{os.fspath(name)}: {remedy}" if is_plain else str(error)


def _user_line(error: BaseException) -> str:
    """` (my_verifier.py, line 12)` of the user's file that raised the error, or an empty string."""
    line = user_line(error.__traceback__)
    return "" if line is None or getattr(error, "is_explained", False) else f" ({line})"
