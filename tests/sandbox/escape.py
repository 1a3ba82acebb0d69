"""Form of the programs that try to escape the sandbox, to harm it, or to get better rewards than they deserve.

Every program limits itself (number of forks, megabytes, seconds), so that it does little harm if it is not isolated. A
program prints `ESCAPED ...` if it detects its escape. The test detects the others on the bait: files, sockets,
descriptors and processes whose names `PRELUDE` defines.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from credit_trl.sandbox import Limits

MIB = 1024 * 1024

# Small, so that a program that is not isolated does no harm and the suite is fast.
LIMITS = Limits(
    cpu_seconds=3,
    wall_seconds=6,
    memory_bytes=256 * MIB,
    processes=12,
    file_bytes=4 * MIB,
    open_files=64,
    output_bytes=1 * MIB,
)
SHORT = replace(LIMITS, cpu_seconds=1, wall_seconds=0.6)

# Makes as many processes as a program can, or threads where it may have no processes.
MULTIPLY = """
import os, threading, time

def multiply(work, count=14):
    for _ in range(count):
        try:
            child = os.fork()
        except OSError:
            try:
                threading.Thread(target=work, daemon=True).start()
            except RuntimeError:
                pass
            continue
        if child == 0:
            try:
                os.setsid()  # where the kernel divides processor time by session, each would have a share
            except OSError:
                pass
            work()
            os._exit(0)
    work()
"""

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
PRELUDE += MULTIPLY


@dataclass(frozen=True)
class Escape:
    """One program.

    Args:
        name: what it tries.
        source: its text, after `PRELUDE`.
        statuses: statuses with which it may end.
        fn_name: function to call, for attacks on functional calls.
        stdin: its standard input.
        value: the only value that the functional call may return.
        beside: two copies of it run beside a correct program, which must succeed.
    """

    name: str
    source: str
    statuses: tuple[str, ...] = ("ok",)
    fn_name: str | None = None
    stdin: str = ""
    limits: Limits = LIMITS
    value: str | None = None
    beside: bool = False
