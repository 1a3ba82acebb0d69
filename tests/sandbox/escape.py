"""The programs of `escapes.toml`, and the names that each of them may use.

Every program limits itself (number of forks, megabytes, seconds), so that it does little harm if it is not isolated. A
program prints `ESCAPED ...` if it detects its escape. The test detects the others on the bait: files, sockets,
descriptors and processes whose names `PRELUDE` defines. An attempt must have no effect: no secret read, no file
changed, no socket reached, no other process touched, nothing left running, and the next programs get right outcomes.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from pathlib import Path

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
    """One program; `escapes.toml` describes its fields."""

    name: str
    source: str
    statuses: tuple[str, ...]
    call: str | None
    value: str | None
    stdin: str
    limits: Limits
    beside: bool


def load_escapes() -> dict[str, list[Escape]]:
    """The programs of `escapes.toml` by the name of their group."""
    groups = tomllib.loads(Path(__file__).with_name("escapes.toml").read_text("utf-8"))
    return {group: [_escape(**fields) for fields in programs] for group, programs in groups.items()}


def _escape(
    name: str,
    source: str,
    statuses: tuple[str, ...] = ("ok",),
    call: str | None = None,
    value: str | None = None,
    stdin: str = "",
    limits: dict[str, float] | None = None,
    beside: bool = False,
) -> Escape:
    return Escape(name, source, tuple(statuses), call, value, stdin, replace(LIMITS, **(limits or {})), beside)


GROUPS = load_escapes()
ESCAPES = [escape for group in GROUPS.values() for escape in group]
