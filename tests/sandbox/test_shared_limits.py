"""Limit of wall-clock time of programs with several threads."""

import os

from observing import SOURCES, run_one

from credit_trl.sandbox import Limits


def test_own_threads_do_not_lengthen_the_wall_limit(sandbox) -> None:
    """Fifteen threads that share the processors each wait for most of the time, for each other."""
    processor_limit = 2 + 2 * len(os.sched_getaffinity(0))  # more than it can use in a second
    limits = Limits(cpu_seconds=processor_limit, wall_seconds=1, processes=16)
    outcome = run_one(sandbox, SOURCES["fifteen_threads"], limits=limits)
    assert (outcome.status, outcome.error) == ("timeout", "more than 1 seconds")
