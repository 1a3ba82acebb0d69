"""Sandbox on this machine: sends programs to a server process and collects their outcomes until the deadline."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from typing import Any

from credit_trl.sandbox.batch import Batch, Sandbox
from credit_trl.sandbox.frames import Channel
from credit_trl.sandbox.protocol import Outcome, Program, SandboxError, sandbox_error

# The server runs without this process's packages. An empty package named `credit_trl` with this package's directory as
# its path lets it import the sandbox and nothing else of the project.
_BOOT = """
import sys, types
package = types.ModuleType("credit_trl")
package.__path__ = [sys.argv[1]]
sys.modules["credit_trl"] = package
from credit_trl.sandbox.server import main
main(sys.argv[2], int(sys.argv[3]))
"""
_START_SECONDS = 60.0
# Interval at which `close` tries to end the batch of another thread.
_CLOSE_SECONDS = 0.05
# Time after a deadline for the server to end its programs and report.
_GRACE_SECONDS = 0.5


class _ServerGone(Exception):
    """The server process ended, or did not answer after a deadline."""


class _Server:
    """A server, the channel to it, and the indices of the programs that it runs.

    `process` is the server's guard, `pid` the server.
    """

    def __init__(self, tier: str, workers: int, until: float = math.inf) -> None:
        ours, theirs = socket.socketpair()
        # What an interpreter may need to start, and a variable that must not reach a program, which the probe checks.
        path = os.environ.get("LD_LIBRARY_PATH")
        environment = {"CREDIT_SANDBOX_CANARY": "1", **({"LD_LIBRARY_PATH": path} if path else {})}
        package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _BOOT, package, tier, str(workers)],
                stdin=theirs,
                stdout=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )
        finally:
            theirs.close()
        self.running: set[int] = set()
        self.channel = Channel(ours)
        ready = self._await_start(min(until, time.monotonic() + _START_SECONDS))
        self.description: str = ready["description"]
        self.pid: int = ready["pid"]

    def _await_start(self, give_up: float) -> dict[str, Any]:
        while time.monotonic() < give_up and not self.channel.closed:
            self.channel.wait(give_up - time.monotonic())
            self.channel.pump()
            for message in self.channel.messages():
                if "ready" in message:
                    return message["ready"]
                self.close()
                raise sandbox_error(message["refused"])
        self.close(at_once=True)
        raise SandboxError(f"The sandbox server did not start (exit status {self.process.returncode}).")

    def close(self, at_once: bool = False) -> None:
        """End the server and its programs. `at_once` has its guard kill them."""
        self.channel.close()
        if at_once:
            self.process.terminate()
        for end in (self.process.terminate, self.process.kill):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=5)
                return
            end()
        self.process.wait()


class PoolSandbox(Sandbox):
    """Sandbox on this machine, not probed; `open_sandbox`, which has these arguments, opens and probes one.

    Calls of `run` from several threads wait for each other, and the wait counts against their deadline.
    """

    def __init__(self, tier: str, workers: int) -> None:
        self.tier = tier
        self.workers = workers
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        self._server: _Server | None = _Server(tier, workers)
        self.description = self._server.description

    @property
    def server_pid(self) -> int | None:
        """Process id of the server, `None` while there is none."""
        return None if self._server is None else self._server.pid

    def _run_batch(self, batch: Batch, until: float) -> None:
        if os.getpid() != self._owner:
            raise SandboxError("This sandbox belongs to the process that opened it; open another one after a fork.")
        if not self._lock.acquire(timeout=min(max(0.0, until - time.monotonic()), threading.TIMEOUT_MAX)):
            batch.expire("the deadline came before another batch had ended")
            return
        try:
            try:
                self._serve(batch, until)
            except _ServerGone:
                self._drop_server(at_once=True)
                batch.requeue()
                self._serve(batch, until)
        except _ServerGone as error:
            self._drop_server(at_once=True)
            self._check_open()
            raise SandboxError(f"The sandbox server ended twice while it ran a batch: {error}.") from error
        except BaseException:
            self._drop_server(at_once=True)  # its programs belong to a batch that nobody waits for
            raise
        finally:
            self._lock.release()

    def _serve(self, batch: Batch, until: float) -> None:
        """Send the batch and collect its outcomes until it is finished or the deadline comes."""
        self._check_open()
        if self._server is None:
            try:
                self._server = _Server(self.tier, self.workers, until)
            except SandboxError:
                if time.monotonic() < until:
                    raise
                batch.expire()
                return
        server = self._server
        while not batch.finished and time.monotonic() < until:
            while len(server.running) < self.workers and (index := batch.take()) is not None:
                server.running.add(index)
                server.channel.send(_as_message(index, batch.programs[index]))
            server.channel.flush()
            server.channel.wait(until - time.monotonic())
            _collect(server, batch)
        if not batch.finished:
            self._cancel(server, batch, until)

    def _cancel(self, server: _Server, batch: Batch, until: float) -> None:
        """End all programs after the deadline, and kill the server if it does not answer in time."""
        server.channel.send({"cancel": True})
        try:
            while server.running:
                left = until + _GRACE_SECONDS - time.monotonic()
                if left <= 0:
                    raise _ServerGone("no answer after the deadline")
                server.channel.wait(left)
                _collect(server, batch)
        except _ServerGone:
            self._drop_server(at_once=True)
        batch.expire()

    def _drop_server(self, at_once: bool = False) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close(at_once)

    def _check_open(self) -> None:
        if self._closed:
            raise SandboxError("This sandbox has been closed; open another one with open_sandbox().")

    def close(self) -> None:
        """End all programs and the server. A batch that another thread runs ends at once with `SandboxError`."""
        if os.getpid() != self._owner:
            return
        self._closed = True
        while not self._lock.acquire(timeout=_CLOSE_SECONDS):
            server = self._server
            if server is not None:  # the thread that runs the batch fails, and releases the lock
                server.process.terminate()
        try:
            self._drop_server()
        finally:
            self._lock.release()


def _collect(server: _Server, batch: Batch) -> None:
    """Record the answers that have arrived."""
    server.channel.pump()
    for message in server.channel.messages():
        if "failed" in message:
            server.running.remove(message["failed"])
            batch.failed(message["failed"], message["reason"])
        else:
            server.running.remove(message["done"])
            batch.done(message["done"], Outcome(**message["outcome"]))
    if server.channel.closed:
        raise _ServerGone("its socket closed")


def _as_message(index: int, program: Program) -> dict[str, Any]:
    return {"run": index, "program": asdict(replace(program, group=None))}
