"""Resource use of a tree of processes, read from /proc, for limits that the kernel enforces per process only."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from credit_trl.sandbox.protocol import SandboxError

_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")
_PIPE_BYTES = 16 * _PAGE  # capacity of a pipe, which programs cannot change
_SKB_BYTES = 1 << 16  # a socket accepts one more message before its buffer counts as full


class ProcessorTimes(NamedTuple):
    """Processor time of a tree of processes."""

    total: float  # seconds of all processes that the tree has had
    active: dict[str, float]  # seconds by thread id in which it ran, or could run and waited for a processor


class Usage(NamedTuple):
    """Resource use of a tree of processes."""

    processes: int
    tasks: int  # processes and threads
    # Memory of all processes, with shared resident pages counted once, page tables, and full pipes and sockets
    held_bytes: int
    scratch_files: int
    times: ProcessorTimes


def require_supported() -> None:
    """Raise `SandboxError` if the kernel does not list a process's children, or count waits for a processor."""
    for name, option in (("children", "CONFIG_PROC_CHILDREN"), ("schedstat", "CONFIG_SCHED_INFO")):
        if not os.path.exists(f"/proc/self/task/{os.getpid()}/{name}"):
            raise SandboxError(
                f"The kernel was built without {option}, which the limits of a tree of processes need. Use a remote "
                "sandbox."
            )


def usage(pid: int, memory_bytes: int, scratch: str | None) -> Usage:
    """Usage of a process and all its descendants, which may have a scratch directory.

    Resident memory is the sum over the processes. Only if that exceeds `memory_bytes`, the slower count is used in
    which a page that n processes share counts 1/n (a fork shares all pages of its parent).
    """
    processes = descendants(pid)
    tasks = sum(map(len, processes.values()))
    folders = {process: _living(process, threads) for process, threads in processes.items()}
    kernel = sum(_kibibytes(f"{folder}/status", b"VmPTE", b"VmSwap") for folder in folders.values())
    kernel += _buffers(folders.values())
    held = kernel + sum(_resident(folder) for folder in folders.values())
    if held > memory_bytes and len(processes) > 1:
        shares = (_kibibytes(f"{folder}/smaps_rollup", b"Pss") or _resident(folder) for folder in folders.values())
        held = kernel + sum(shares)
    files = 0
    if scratch is not None:
        files = max((_files(folder, scratch) for process, folder in folders.items() if process != pid), default=0)
    return Usage(len(processes), tasks, held, files, processor_times(processes))


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
        own = max((user + system) / _TICKS, of_threads)  # the first has ended threads too, and is rounded down
        total += own + (user_of_children + system_of_children) / _TICKS
    return ProcessorTimes(total, active)


def is_runnable(pid: int) -> bool:
    """Whether a thread of a process or of its descendants runs, or waits for a processor."""
    processes = descendants(pid).items()
    stats = (_read(f"/proc/{process}/task/{thread}/stat") for process, threads in processes for thread in threads)
    return any(stat.rpartition(b")")[2].split(None, 1)[:1] == [b"R"] for stat in stats)


def descendants(pid: int) -> dict[int, list[str]]:
    """Thread ids by process id of a process and its descendants, parents first, without those that end meanwhile."""
    found: dict[int, list[str]] = {}
    pending = [pid]
    while pending:
        process = pending.pop()
        with contextlib.suppress(OSError):
            threads = os.listdir(f"/proc/{process}/task")
            for thread in threads:
                pending += children(process, thread)
            found[process] = threads
    return found


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


def _living(pid: int, threads: Sequence[str]) -> str:
    """Directory in /proc with a process's memory and descriptors: another thread's if the first one has ended."""
    own = f"/proc/{pid}"
    if len(threads) == 1 or _resident(own):
        return own
    return next((folder for thread in threads if _resident(folder := f"{own}/task/{thread}")), own)


def _kibibytes(path: str, *names: bytes) -> int:
    """Sum in bytes of lines `Name:  12 kB` of a file, 0 for those that it lacks."""
    content = _read(path)
    fields = (content.partition(b"\n" + name + b":")[2].split(None, 1) for name in names)
    return sum(int(found[0]) * 1024 for found in fields if found)


def _resident(folder: str) -> int:
    """Resident memory in bytes, 0 for an ended process."""
    fields = _read(f"{folder}/statm").split()
    return int(fields[1]) * _PAGE if fields else 0


def _buffers(folders: Iterable[str]) -> int:
    """Bytes that the open sockets and pipes of processes, given by their folders in /proc, hold if they are full."""
    names: set[str] = set()
    for folder in folders:
        with contextlib.suppress(OSError):  # the process is gone
            for descriptor in os.listdir(f"{folder}/fd"):
                with contextlib.suppress(OSError):  # the descriptor is gone
                    names.add(os.readlink(f"{folder}/fd/{descriptor}"))
    sockets = sum(name.startswith("socket:") for name in names)
    pipes = sum(name.startswith("pipe:") for name in names)
    return sockets * _socket_bytes() + pipes * _PIPE_BYTES


def _socket_bytes() -> int:
    """Most bytes that a Unix socket whose buffer nobody enlarged holds for its peer."""
    default = _read("/proc/sys/net/core/wmem_default")
    return int(default) + _SKB_BYTES if default else 4 * _SKB_BYTES


def _files(folder: str, directory: str) -> int:
    """Number of files in the file system at `directory`, as a process sees it that is given by its folder in /proc."""
    try:
        status = os.statvfs(f"{folder}/root{directory}")
    except OSError:
        return 0
    return status.f_files - status.f_ffree
