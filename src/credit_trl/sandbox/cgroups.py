"""Number of cores that this process may use."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

CGROUPS, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def worker_count() -> int:
    """Available cores per process that `torchrun` or `accelerate` started on this machine, at least 1."""
    return max(1, available_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def available_cores(cgroups: Path = CGROUPS, own: Path = OWN_CGROUP) -> int:
    """The smaller of the process's CPU affinity and its container's quota of CPU time, rounded up.

    A container with two cores on a machine with 64 sees 64. With as many workers, thirty programs would share a core.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([cores, *(max(1, math.ceil(quota)) for quota in _quotas(cgroups, own))])


def _quotas(cgroups: Path, own: Path) -> Iterator[float]:
    """Quotas in cores of this process's control group (version 2) and its parents. None outside of Linux."""
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        number, _, path = line.split(":", 2)
        if number != "0":  # of version 1
            continue
        group = cgroups / path.lstrip("/")
        for folder in (group, *group.parents):
            try:
                quota, period = (folder / "cpu.max").read_text(encoding="utf-8").split()
                yield float(quota) / float(period)
            except (OSError, ValueError):  # no file, as in the root group, or "max", which means no quota
                continue
