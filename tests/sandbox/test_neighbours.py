"""Programs beside each other: a correct one keeps its outcome, whatever the others of its batch do.

The neighbours use more processor time, wall-clock time or memory than they may. The correct program needs most of its
own limit of processor time. Two workers and four neighbours leave it a fraction of a processor.
"""

from __future__ import annotations

import os

import pytest
from escape import GROUPS, MULTIPLY
from observing import run_one

from credit_trl.sandbox import Limits, Program

MIB = 1024 * 1024
LIMITS = Limits(cpu_seconds=1, wall_seconds=1, memory_bytes=192 * MIB, processes=16)
# Needs 0.7 of its second of processor time, and prints what shows that it came to its end.
CORRECT = "import time\nwhile time.process_time() < 0.7: pass\nprint(int(input()) + 1)"

SOURCES = {escape.name: MULTIPLY + escape.source for escape in GROUPS["neighbours"]}


def statuses_beside(sandbox, neighbours: list[str]) -> tuple[set[str], list[str]]:
    """Statuses of the neighbours, and the faults in the outcomes of two correct programs among them."""
    hostile = [Program(source, group=f"hostile {n}", limits=LIMITS) for n, source in enumerate(neighbours)]
    correct = [Program(CORRECT, stdin=str(n), group=f"correct {n}", limits=LIMITS) for n in range(2)]
    outcomes = sandbox.run([*hostile, *correct], deadline=300)
    found = outcomes[len(hostile) :]
    faults = [str(o) for n, o in enumerate(found) if (o.status, o.stdout) != ("ok", f"{n + 1}\n")]
    return {outcome.status for outcome in outcomes[: len(hostile)]}, faults


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", [*SOURCES, "all"])
def test_correct_program_succeeds_in_20_repetitions(sandbox, kind: str) -> None:
    neighbours = list(SOURCES.values()) if kind == "all" else [SOURCES[kind]] * 4
    faults = [fault for _ in range(20) for fault in statuses_beside(sandbox, neighbours)[1]]
    assert not faults, faults[:3]


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
