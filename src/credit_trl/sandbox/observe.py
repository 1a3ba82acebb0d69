"""Resource use of a tree of processes, read from /proc, for limits that the kernel enforces per process only."""

import contextlib
import os
import re
from collections.abc import Sequence
from typing import NamedTuple

from credit_trl.sandbox.protocol import SandboxError

_TICKS = os.sysconf("SC_CLK_TCK")


class ProcessorTimes(NamedTuple):
    """Processor time of a tree of processes."""

    total: float  # seconds of all processes that the tree has had
    active: dict[str, float]  # seconds by thread id in which it ran, or could run and waited for a processor


class Usage(NamedTuple):
    """Resource use of a tree of processes."""

    tasks: int  # processes and threads
    held_bytes: int  # memory of all processes: resident pages, swap and page tables
    times: ProcessorTimes


def require_supported() -> None:
    """Raise `SandboxError` if the kernel does not list a process's children, or count waits for a processor."""
    for name, option in (("children", "CONFIG_PROC_CHILDREN"), ("schedstat", "CONFIG_SCHED_INFO")):
        if not os.path.exists(f"/proc/self/task/{os.getpid()}/{name}"):
            raise SandboxError(
                f"The kernel was built without {option}, which the limits of a tree of processes need. Use a remote "
                "sandbox."
            )


def usage(pid: int) -> Usage:
    """Usage of a process and all its descendants."""
    processes = descendants(pid)
    return Usage(
        tasks=sum(map(len, processes.values())),
        held_bytes=sum(_held(process, threads) for process, threads in processes.items()),
        times=processor_times(processes),
    )


def processor_times(processes: dict[int, list[str]]) -> ProcessorTimes:
    """Processor time of processes, as `descendants` lists them. A wait for a processor counts when it ends.

    No time is counted twice: the kernel adds that of an ended process to the process that waited for it, and parents
    are read before their children.
    """
    total = 0.0
    active: dict[str, float] = {}
    for process, threads in processes.items():
        times = _read(f"/proc/{process}/stat").rpartition(b")")[2].split()[11:15] or (0, 0, 0, 0)
        user, system, user_of_children, system_of_children = map(int, times)
        of_threads = 0.0
        for thread in threads:
            ran, waited, *_ = map(int, _read(f"/proc/{process}/task/{thread}/schedstat").split() or (0, 0))
            active[thread] = (ran + waited) / 1e9
            of_threads += ran / 1e9
        thread_seconds = max(
            (user + system) / _TICKS, of_threads
        )  # the first has ended threads too, and is rounded down
        total += thread_seconds + (user_of_children + system_of_children) / _TICKS
    return ProcessorTimes(total, active)


def is_runnable(pid: int) -> bool:
    """Whether a thread of a process or of its descendants runs, or waits for a processor."""
    processes = descendants(pid).items()
    stats = (_read(f"/proc/{process}/task/{thread}/stat") for process, threads in processes for thread in threads)
    return any(stat.rpartition(b")")[2].split(None, 1)[:1] == [b"R"] for stat in stats)


def descendants(pid: int) -> dict[int, list[str]]:
    """Thread ids by process id of a process and its descendants, parents first, without those that end meanwhile."""
    threads_of: dict[int, list[str]] = {}
    pending = [pid]
    while pending:
        process = pending.pop()
        with contextlib.suppress(OSError):
            threads = os.listdir(f"/proc/{process}/task")
            for thread in threads:
                pending += children(process, thread)
            threads_of[process] = threads
    return threads_of


def children(pid: int, thread: str | None = None) -> list[int]:
    """Process ids of the children of a thread, by default the first one of its process."""
    with open(f"/proc/{pid}/task/{thread or pid}/children", "rb") as listed:
        return list(map(int, listed.read().split()))


def _read(path: str) -> bytes:
    """Content of a file of /proc; empty if its process has ended."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def _held(pid: int, threads: Sequence[str]) -> int:
    """Bytes that a process holds, as a thread shows that has not ended; 0 for an ended process."""
    statuses = (_read(f"/proc/{pid}/task/{thread}/status") for thread in threads)
    sizes = (sum(map(int, re.findall(rb"^Vm(?:RSS|Swap|PTE):\s+(\d+)", status, re.MULTILINE))) for status in statuses)
    return 1024 * next(filter(None, sizes), 0)
