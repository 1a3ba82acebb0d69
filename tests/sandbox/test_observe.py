"""Memory, sockets and pipes of a process as the server counts them."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
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
        while observe._resident(f"/proc/{pid}") and time.monotonic() < give_up:
            time.sleep(0.01)
        assert observe._resident(f"/proc/{pid}") == 0
        held = observe.usage(pid, 1 << 40, None).held_bytes
        assert held > 100 * MIB + 20 * observe._socket_bytes()


def test_descriptor_that_closes_during_a_sample_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    readlink, is_first = os.readlink, iter([True])

    def vanished(path: str) -> str:
        if next(is_first, False):
            raise FileNotFoundError(path)
        return readlink(path)

    pairs = [socket.socketpair() for _ in range(8)]
    monkeypatch.setattr(os, "readlink", vanished)
    assert observe._buffers([f"/proc/{os.getpid()}"]) >= 15 * observe._socket_bytes()
    for pair in pairs:
        for one in pair:
            one.close()
