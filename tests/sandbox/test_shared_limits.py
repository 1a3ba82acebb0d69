"""Limits of processor and wall-clock time of programs with several processes or threads."""

import os

import pytest
from observing import run_one

from credit_trl.sandbox import Limits


def needs_processes(sandbox) -> None:
    if sandbox.tier == "landlock":
        pytest.skip("programs have one process there")


@pytest.mark.parametrize("wait", ["os.wait()", "pass"])
def test_processor_limit_covers_all_processes(sandbox, wait: str) -> None:
    needs_processes(sandbox)
    source = f"""
    import os, time
    for _ in range(6):
        if os.fork() == 0:
            while time.process_time() < 0.3: pass
            os._exit(0)
        {wait}
    for _ in range(6):
        try:
            os.wait()
        except ChildProcessError:
            break
    """
    outcome = run_one(sandbox, source, limits=Limits(cpu_seconds=1, wall_seconds=30))
    assert (outcome.status, outcome.error) == ("timeout", "more than 1 seconds of processor time")
    within = run_one(sandbox, source, limits=Limits(cpu_seconds=5, wall_seconds=30))
    assert within.status == "ok", within


def test_event_loop_runs(sandbox) -> None:
    """It uses a pair of sockets, whose options the filter restricts."""
    assert run_one(sandbox, "import asyncio; print(asyncio.run(asyncio.sleep(0, 'runs')))").stdout == "runs\n"


def test_own_threads_do_not_lengthen_the_wall_limit(sandbox) -> None:
    """Fifteen threads that share the processors each wait for most of the time, for each other."""
    source = """
    import hashlib, threading, time
    for _ in range(15):
        arguments = ("sha256", b"", b"", 10 ** 9)
        threading.Thread(target=hashlib.pbkdf2_hmac, args=arguments, daemon=True).start()
    time.sleep(60)
    """
    processor_limit = 2 + 2 * len(os.sched_getaffinity(0))  # more than it can use in a second
    outcome = run_one(sandbox, source, limits=Limits(cpu_seconds=processor_limit, wall_seconds=1, processes=16))
    assert (outcome.status, outcome.error) == ("timeout", "more than 1 seconds")
