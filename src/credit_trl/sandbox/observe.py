"""Resource use of a tree of processes, read from /proc, for limits that the kernel enforces per process only."""

from __future__ import annotations

import os
from typing import NamedTuple

_PAGE = os.sysconf("SC_PAGE_SIZE")


class Usage(NamedTuple):
    """Resource use of a tree of processes."""

    tasks: int  # processes and threads
    resident_bytes: int  # of all processes, with shared pages counted once
    scratch_files: int


def available() -> bool:
    """Whether the kernel lists a process's children (`CONFIG_PROC_CHILDREN`)."""
    return os.path.exists(f"/proc/self/task/{os.getpid()}/children")


def usage(pid: int, memory_bytes: int, scratch: str | None) -> Usage:
    """Usage of a process and all its descendants, which may have a scratch directory.

    Resident memory is the sum over the processes. Only if that exceeds `memory_bytes`, the slower count is used in
    which a page that n processes share counts 1/n (a fork shares all pages of its parent).
    """
    processes = descendants(pid)
    tasks = sum(len(threads) for threads in processes.values())
    resident = sum(_resident(process) for process in processes)
    if resident > memory_bytes and len(processes) > 1:
        resident = sum(_proportional(process) for process in processes)
    files = 0
    if scratch is not None:
        files = max((_files(process, scratch) for process in processes if process != pid), default=0)
    return Usage(tasks, resident, files)


def descendants(pid: int) -> dict[int, list[str]]:
    """Thread ids by process id of a process and its descendants. Those that end meanwhile are skipped."""
    found: dict[int, list[str]] = {}
    pending = [pid]
    while pending:
        process = pending.pop()
        try:
            threads = os.listdir(f"/proc/{process}/task")
            for thread in threads:
                with open(f"/proc/{process}/task/{thread}/children", "rb") as children:
                    pending += [int(child) for child in children.read().split()]
        except OSError:
            continue
        found[process] = threads
    return found


def _resident(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm", "rb") as statm:
            return int(statm.read().split()[1]) * _PAGE
    except (OSError, IndexError):
        return 0


def _proportional(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as rollup:
            for line in rollup:
                if line.startswith(b"Pss:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return _resident(pid)


def _files(pid: int, directory: str) -> int:
    """Number of files in the file system at `directory` in this process's namespace."""
    try:
        status = os.statvfs(f"/proc/{pid}/root{directory}")
    except OSError:
        return 0
    return status.f_files - status.f_ffree
