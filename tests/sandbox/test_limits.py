"""Time and memory of a running program: processor time, waits for processors that others used, what it holds."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from observing import SOURCES, parametrize, run_one

from credit_trl.sandbox import Limits, observe
from credit_trl.sandbox.observe import ProcessorTimes
from credit_trl.sandbox.protocol import Program
from credit_trl.sandbox.running import RunningProgram

MIB = 1024 * 1024


def running_program() -> RunningProgram:
    return RunningProgram(0, Program("pass"), pid=1, pipes=(2, 3, 4, 5), group=None, started_at=0.0)


@parametrize("total ran waited delayed", "waits")
def test_waits_for_own_threads_are_no_delay(total, ran, waited, delayed):
    run = running_program()
    run.add_times(ProcessorTimes(5.0, dict.fromkeys(ran, 2.0)), now=0.0)
    run.add_times(ProcessorTimes(5.0 + total, {name: 2.0 + ran[name] + waited[name] for name in ran}), now=1.0)
    assert run.delayed == pytest.approx(delayed)
    assert run.is_starved == (total < 0.2)


def test_wait_longer_than_the_interval_of_samples_is_a_delay():
    run = running_program()
    for now, total, active in ((0.0, 0.0, 0.0), (0.05, 0.0, 0.0), (0.1, 0.0, 0.0), (0.2, 0.02, 0.2)):
        run.add_times(ProcessorTimes(total, {"a": active}), now)
    assert run.delayed == pytest.approx(0.18)


def test_processor_seconds_keep_their_maximum():
    """A process that nobody has waited for takes its processor time with it."""
    run = running_program()
    for total in (1.0, 4.0, 2.0, 3.0):
        run.add_times(ProcessorTimes(total, {}), now=total)
    assert run.cpu_seconds == 4.0


def test_own_threads_do_not_lengthen_the_wall_limit(sandbox):
    """Fifteen threads that share the processors each wait for most of the time, for each other."""
    processor_limit = 2 + 2 * len(os.sched_getaffinity(0))  # more than it can use in a second
    limits = Limits(cpu_seconds=processor_limit, wall_seconds=1, processes=16)
    outcome = run_one(sandbox, SOURCES["fifteen_threads"], limits=limits)
    assert (outcome.status, outcome.error) == ("timeout", "more than 1 seconds")


@contextmanager
def running(source: str) -> Iterator[int]:
    """Process id of a program that has printed a line."""
    with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE) as process:
        try:
            process.stdout.readline()
            yield process.pid
        finally:
            process.kill()


def test_process_whose_first_thread_ended_is_counted():
    with running(SOURCES["without_first_thread"]) as pid:
        give_up = time.monotonic() + 120
        while observe._held(pid, [str(pid)]) and time.monotonic() < give_up:
            time.sleep(0.01)
        assert observe._held(pid, [str(pid)]) == 0
        assert observe.usage(pid).held_bytes > 100 * MIB
