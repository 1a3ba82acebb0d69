"""Limits of processor and wall-clock time of programs with several processes or threads."""

import os

import pytest
from observing import SOURCES, run_one

from credit_trl.sandbox import Limits


@pytest.mark.parametrize("wait", ["os.wait()", "pass"])
def test_processor_limit_covers_all_processes(sandbox, wait: str) -> None:
    if sandbox.tier == "landlock":
        pytest.skip("programs have one process there")
    source = SOURCES["six_processes"].replace("WAIT", wait)
    outcome = run_one(sandbox, source, limits=Limits(cpu_seconds=1, wall_seconds=30))
    assert (outcome.status, outcome.error) == ("timeout", "more than 1 seconds of processor time")
    within = run_one(sandbox, source, limits=Limits(cpu_seconds=5, wall_seconds=30))
    assert within.status == "ok", within


def test_own_threads_do_not_lengthen_the_wall_limit(sandbox) -> None:
    """Fifteen threads that share the processors each wait for most of the time, for each other."""
    processor_limit = 2 + 2 * len(os.sched_getaffinity(0))  # more than it can use in a second
    limits = Limits(cpu_seconds=processor_limit, wall_seconds=1, processes=16)
    outcome = run_one(sandbox, SOURCES["fifteen_threads"], limits=limits)
    assert (outcome.status, outcome.error) == ("timeout", "more than 1 seconds")
