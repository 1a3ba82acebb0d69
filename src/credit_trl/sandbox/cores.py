"""How many programs this process may run at once without them waiting for each other."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

CGROUPS, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def worker_count() -> int:
    """This process's cores, divided among the processes that `torchrun` or `accelerate` started on this machine."""
    return max(1, available_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def available_cores(cgroups: Path = CGROUPS, own: Path = OWN_CGROUP) -> int:
    """The cores that this process may use: its affinity, and a container's quota of CPU time, rounded up.

    A container of two cores on a machine of 64 sees all of them. Programs that are timed by the clock would run
    thirty to a core, and correct ones would come too late.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([cores, *(max(1, math.ceil(quota)) for quota in _quotas(cgroups, own))])


def _quotas(cgroups: Path, own: Path) -> Iterator[float]:
    """CPU time per time of this process's control groups and all above them, version 2 and 1; none off Linux."""
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = cgroups / controllers  # version 2 names no controller, and has no folder for it
        group = mount / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder == mount or mount in folder.parents:
                yield from _quota(folder)


def _quota(folder: Path) -> Iterator[float]:
    """A control group's quota, where it has one."""
    try:
        if (folder / "cpu.max").is_file():
            quota, period = (folder / "cpu.max").read_text(encoding="utf-8").split()
        else:
            quota, period = (
                (folder / f"cpu.cfs_{name}_us").read_text(encoding="utf-8") for name in ("quota", "period")
            )
        share = float(quota) / float(period)  # "max", or −1 in version 1, is none
    except (OSError, ValueError):
        return
    if share > 0:
        yield share
