"""Programs that try to get out of the sandbox, to harm it, or to be graded better than they are.

Every program carries its own bound (so many forks, so many megabytes, so many seconds), so that a wall that does not
hold costs the machine little. A program prints `ESCAPED ...` where it can tell that it got out; what it cannot tell,
the test finds on the bait: the files, sockets, descriptors and processes that `test_escapes.py` lays out, by the names
that `PRELUDE` gives.
"""

from __future__ import annotations

from dataclasses import dataclass

from credit_trl.sandbox import Limits

MIB = 1024 * 1024

# Small enough that a program which is not held does no harm, and that the suite is quick.
LIMITS = Limits(
    cpu_seconds=3,
    wall_seconds=6,
    memory_bytes=256 * MIB,
    processes=12,
    file_bytes=4 * MIB,
    open_files=64,
    output_bytes=1 * MIB,
)
SHORT = Limits(
    cpu_seconds=1,
    wall_seconds=0.6,
    memory_bytes=256 * MIB,
    processes=12,
    file_bytes=4 * MIB,
    open_files=64,
    output_bytes=1 * MIB,
)

PRELUDE = """
import os, sys
BAIT, SECRET, WRITABLE, SOCKET = {bait!r}, {secret!r}, {writable!r}, {socket!r}
PORT, ABSTRACT, TRAINER, SERVER, VICTIM = {port}, {abstract!r}, {trainer}, {server}, {victim}
PACKAGE = {package!r}

def attempt(what, action):
    try:
        result = action()
    except Exception as error:
        print("refused", what, type(error).__name__, error)
    else:
        if result is not False:
            print("ESCAPED", what, repr(result)[:200])

def read(path):
    with open(path, "rb") as file:
        return file.read(200)

def libc():
    import ctypes
    return ctypes.CDLL(None, use_errno=True)

def called(result):
    if result == -1:
        import ctypes
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
"""


@dataclass(frozen=True)
class Escape:
    """One attempt.

    Args:
        name: what it tries.
        source: the program, after `PRELUDE`.
        statuses: how it may end.
        fn_name: for those that attack a functional call.
        stdin: what it reads.
        value: the one value that a functional call may return.
    """

    name: str
    source: str
    statuses: tuple[str, ...] = ("ok",)
    fn_name: str | None = None
    stdin: str = ""
    limits: Limits = LIMITS
    value: str | None = None
