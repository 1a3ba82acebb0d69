"""Memory of a process as the server counts it."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from observing import SOURCES

from credit_trl.sandbox import observe

MIB = 1024 * 1024


@contextmanager
def running(source: str) -> Iterator[int]:
    """Process id of a program that has printed a line."""
    with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE) as process:
        try:
            process.stdout.readline()
            yield process.pid
        finally:
            process.kill()


def test_process_whose_first_thread_ended_is_counted() -> None:
    with running(SOURCES["without_first_thread"]) as pid:
        give_up = time.monotonic() + 10
        while observe._held(pid, [str(pid)]) and time.monotonic() < give_up:
            time.sleep(0.01)
        assert observe._held(pid, [str(pid)]) == 0
        assert observe.usage(pid).held_bytes > 100 * MIB
