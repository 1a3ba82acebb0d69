"""Sandbox on this machine: sends programs to server processes and collects their outcomes until the deadline."""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from credit_trl.sandbox.batch import Batch, Sandbox
from credit_trl.sandbox.frames import Channel, wait
from credit_trl.sandbox.protocol import Outcome, SandboxError, sandbox_error
from credit_trl.sandbox.running import Job

# The server runs without this process's packages. An empty package named `credit_trl` with this package's directory as
# its path lets it import the sandbox and nothing else of the project.
_BOOT = """
import json, sys, types
package = types.ModuleType("credit_trl")
package.__path__ = [sys.argv[1]]
sys.modules["credit_trl"] = package
from credit_trl.sandbox.server import main
main(**json.loads(sys.argv[2]))
"""
_START_SECONDS = 60.0
# A server that runs programs and sends nothing for this long is taken for dead.
_SILENCE_SECONDS = 30.0
# One server's loop starts about a thousand programs a second, so more workers get another server.
_WORKERS_PER_SERVER = 16
# Interval at which `close` tries to end the batch of another thread.
_CLOSE_SECONDS = 0.05
# Time after a deadline for the servers to end their programs and report.
_GRACE_SECONDS = 0.5


class _ServerGone(Exception):
    """The server process ended, or stopped answering."""


class _Server:
    """A server, the channel to it, and the programs that it has: `running` maps their numbers to indices.

    `process` is the server's guard, `pid` the server.
    """

    def __init__(self, settings: dict[str, Any], until: float = math.inf) -> None:
        ours, theirs = socket.socketpair()
        # What an interpreter may need to start, and a variable that must not reach a program, which the probe checks.
        path = os.environ.get("LD_LIBRARY_PATH")
        environment = {"CREDIT_SANDBOX_CANARY": "1", **({"LD_LIBRARY_PATH": path} if path else {})}
        package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _BOOT, package, json.dumps(settings)],
                stdin=theirs,
                stdout=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )
        finally:
            theirs.close()
        self.workers: int = settings["workers"]
        self.running: dict[int, int] = {}
        self.channel = Channel(ours)
        ready = self._await_start(min(until, time.monotonic() + _START_SECONDS))
        self.description: str = ready["description"]
        self.modules: list[str] = ready["modules"]
        self.pid: int = ready["pid"]

    def _await_start(self, give_up: float) -> dict[str, Any]:
        while time.monotonic() < give_up and not self.channel.closed:
            wait([self.channel], give_up - time.monotonic())
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

    def __init__(self, tier: str, workers: int, python: str | None = None, packages: Sequence[str] = ()) -> None:
        self.tier = tier
        self.workers = workers
        self._python, self._packages = python, tuple(packages)
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        self._next_number = 0
        self._servers: list[_Server] = []
        self._start_servers()
        self.description = self._servers[0].description
        self.modules = self._servers[0].modules  # of the packages

    @property
    def server_pids(self) -> list[int]:
        """Process ids of the servers."""
        return [server.pid for server in self._servers]

    def _run_batch(self, batch: Batch, until: float) -> None:
        if os.getpid() != self._owner:
            raise SandboxError("This sandbox belongs to the process that opened it; open another one after a fork.")
        if not self._lock.acquire(timeout=min(max(0.0, until - time.monotonic()), threading.TIMEOUT_MAX)):
            batch.expire("the deadline came before another batch had ended")
            return
        try:
            self._check_open()
            try:
                self._serve(batch, until)
            except _ServerGone:
                self._drop_servers(at_once=True)
                self._check_open()
                batch.requeue()
                self._serve(batch, until)
        except _ServerGone as error:
            self._drop_servers(at_once=True)
            self._check_open()
            raise SandboxError(f"The sandbox server ended twice while it ran a batch: {error}.") from error
        except BaseException:
            self._drop_servers(at_once=True)  # their programs belong to a batch that nobody waits for
            raise
        finally:
            self._lock.release()

    def _serve(self, batch: Batch, until: float) -> None:
        """Send the batch and collect its outcomes until it is finished or the deadline comes."""
        if not self._servers:
            try:
                self._start_servers(until)
            except SandboxError:
                if time.monotonic() < until:
                    raise
        heard = time.monotonic()
        while not batch.finished and time.monotonic() < until:
            self._feed(batch)
            give_up = heard + _SILENCE_SECONDS
            wait([server.channel for server in self._servers], min(until, give_up) - time.monotonic())
            if self._collect(batch):
                heard = time.monotonic()
            elif time.monotonic() >= give_up:
                raise _ServerGone(f"no answer in {time.monotonic() - heard:.0f} s")
        if not batch.finished:
            self._cancel(batch, until)

    def _feed(self, batch: Batch) -> None:
        """Send each server at most three programs a worker: one to run, one to prepare, and a reserve."""
        for lead in (1, 2, 3):
            for server in self._servers:
                while len(server.running) < lead * server.workers and (index := batch.take()) is not None:
                    server.running[self._next_number] = index
                    job = Job(self._next_number, batch.programs[index], batch.group_number(index), batch.stops)
                    server.channel.send({"run": _as_message(job)})
                    self._next_number += 1
        for server in self._servers:
            server.channel.flush()

    def _collect(self, batch: Batch) -> bool:
        """Record the answers that have arrived; return whether there were any."""
        heard = False
        for server in self._servers:
            server.channel.pump()
            for message in server.channel.messages():
                heard = True
                if "alive" in message:
                    continue
                if "failed" in message:
                    batch.failed(server.running.pop(message["failed"]), message["reason"])
                else:
                    batch.done(server.running.pop(message["done"]), Outcome(**message["outcome"]))
            if server.channel.closed:
                raise _ServerGone("its socket closed")
        while batch.newly_stopped:
            stop = {"stop": batch.newly_stopped.pop()}
            for server in self._servers:
                server.channel.send(stop)
        return heard

    def _cancel(self, batch: Batch, until: float) -> None:
        """End all programs after the deadline, and kill the servers if they do not answer in time."""
        for server in self._servers:
            server.channel.send({"cancel": True})
        batch.abandon()
        try:
            while any(server.running for server in self._servers):
                left = until + _GRACE_SECONDS - time.monotonic()
                if left <= 0:
                    raise _ServerGone("no answer after the deadline")
                wait([server.channel for server in self._servers], left)
                self._collect(batch)
        except _ServerGone:
            self._drop_servers(at_once=True)
        batch.expire()

    def _start_servers(self, until: float = math.inf) -> None:
        count = math.ceil(self.workers / _WORKERS_PER_SERVER)
        try:
            for number in range(count):
                share = self.workers // count + (number < self.workers % count)
                settings = {"tier": self.tier, "workers": share, "python": self._python, "packages": self._packages}
                self._servers.append(_Server(settings, until))
        except BaseException:
            self._drop_servers(at_once=True)
            raise

    def _drop_servers(self, at_once: bool = False) -> None:
        while self._servers:
            self._servers.pop().close(at_once)

    def _check_open(self) -> None:
        if self._closed:
            raise SandboxError("This sandbox has been closed; open another one with open_sandbox().")

    def close(self) -> None:
        """End all programs and servers. A batch that another thread runs ends at once with `SandboxError`."""
        if os.getpid() != self._owner:
            return
        self._closed = True
        while not self._lock.acquire(timeout=_CLOSE_SECONDS):
            for server in tuple(self._servers):  # the thread that runs the batch fails, and releases the lock
                server.process.terminate()
        try:
            self._drop_servers()
        finally:
            self._lock.release()

    def __del__(self) -> None:
        # Not `contextlib.suppress`: at the end of the interpreter the module's names may already be gone.
        try:
            self.close()
        except Exception:
            return


def _as_message(job: Job) -> dict[str, Any]:
    return asdict(replace(job, program=replace(job.program, group=None)))
