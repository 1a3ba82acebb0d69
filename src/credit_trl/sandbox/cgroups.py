"""Control groups of version 2: the container's quota of processor time, and the memory of a program's processes."""

import contextlib
import math
import os
from pathlib import Path

CGROUPS, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def worker_count() -> int:
    """Available cores per process that `torchrun` or `accelerate` started on this machine, at least 1."""
    return max(1, available_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def available_cores() -> int:
    """The smaller of the process's CPU affinity and its container's quota of CPU time, rounded up.

    A container with two cores on a machine with 64 sees 64. With as many workers, thirty programs would share a core.
    """
    cores = [len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1]
    for group in _own_groups():
        with contextlib.suppress(OSError, ValueError):  # no file, as in the root group, or "max", which means no quota
            quota, period = (group / "cpu.max").read_text(encoding="utf-8").split()
            cores.append(max(1, math.ceil(float(quota) / float(period))))
    return min(cores)


def _own_groups() -> list[Path]:
    """Folders of this process's control group and of its parents, the nearest first. None outside of Linux."""
    with contextlib.suppress(OSError):
        for line in OWN_CGROUP.read_text(encoding="utf-8").splitlines():
            number, _, path = line.split(":", 2)
            if number == "0":  # others are of version 1
                group = CGROUPS / path.lstrip("/")
                return [group, *group.parents[: len(group.relative_to(CGROUPS).parts)]]
    return []


def delegated_group() -> Path | None:
    """The nearest group in which this process may make groups that limit memory, `None` if there is none."""
    for group in _own_groups():
        with contextlib.suppress(OSError):
            limits_memory = "memory" in (group / "cgroup.subtree_control").read_text(encoding="utf-8").split()
            if limits_memory and all(os.access(path, os.W_OK) for path in (group, group / "cgroup.procs")):
                return group
    return None


class MemoryGroup:
    """A group whose processes together hold at most `memory_bytes`, with page cache and temporary file systems.

    The kernel kills them all at once where they need more.
    """

    def __init__(self, parent: Path, memory_bytes: int) -> None:
        self._folder = parent / f"credit-trl-{os.getpid()}-{os.urandom(4).hex()}"
        self._folder.mkdir()
        limits = {"memory.max": memory_bytes, "memory.swap.max": 0, "memory.oom.group": 1}
        for name, value in limits.items():
            if name == "memory.max" or (self._folder / name).exists():  # not without swap, or before Linux 4.19
                (self._folder / name).write_text(str(value))

    def enter(self) -> None:
        """Move this process into the group. Where that is refused, samples alone limit its memory."""
        with contextlib.suppress(OSError):
            (self._folder / "cgroup.procs").write_text("0")

    def has_killed(self) -> bool:
        """Whether the kernel killed the processes for their memory."""
        with contextlib.suppress(OSError):
            events = (self._folder / "memory.events").read_text().split()
            return dict(zip(events[::2], events[1::2], strict=False)).get("oom_kill", "0") != "0"
        return False

    def remove(self) -> bool:
        """Remove the group; False while a process of it is still ending."""
        try:
            self._folder.rmdir()
        except OSError:
            return not self._folder.exists()
        return True


def remove_groups(parent: Path | None, pid: int) -> None:
    """Remove the groups that a process made and whose processes have ended."""
    for folder in [] if parent is None else parent.glob(f"credit-trl-{pid}-*"):
        with contextlib.suppress(OSError):  # one that still has processes
            folder.rmdir()
