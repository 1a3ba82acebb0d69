"""The trainer's side of the pool: feeds programs to the server process and collects outcomes, by a deadline."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from typing import Any

from credit_trl.rollout.deadline import seconds_left
from credit_trl.sandbox.batch import Batch
from credit_trl.sandbox.frames import Channel, wait
from credit_trl.sandbox.protocol import Outcome, Program, SandboxError, Status

# The server runs without this process's packages: `credit_trl` becomes an empty package whose path is its directory,
# so that importing the sandbox imports nothing else of the project.
_BOOT = """
import json, sys, types
package = types.ModuleType("credit_trl")
package.__path__ = [sys.argv[1]]
sys.modules["credit_trl"] = package
from credit_trl.sandbox.server import main
main(**json.loads(sys.argv[2]))
"""
_START_SECONDS = 60.0
# A server that says nothing for this long after the last program's wall clock limit is taken for dead.
_SILENCE_SECONDS = 15.0
# One server's loop starts some thousand programs a second at most; more workers than this get another server.
_WORKERS_PER_SERVER = 16
# How soon, and how often, a batch that is in the way of `close` is ended.
_CLOSE_SECONDS = 0.05
# What a batch may overrun its deadline by, for the server to end programs and report.
_GRACE_SECONDS = 0.5
_MESSAGE_FIELDS = ("source", "stdin", "fn_name", "arguments", "prelude")


class _ServerGone(Exception):
    """The server process ended, or stopped answering."""


class _Server:
    """A server process, the channel to it, and what it runs: the number it knows a program by -> its index."""

    def __init__(self, tier: str, workers: int, python: str | None, until: float = math.inf) -> None:
        ours, theirs = socket.socketpair()
        package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        settings = json.dumps({"tier": tier, "workers": workers, "python": python})
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _BOOT, package, settings],
                stdin=theirs,
                stdout=subprocess.DEVNULL,
                env=_server_environment(),
                start_new_session=True,
            )
        finally:
            theirs.close()
        self.workers = workers
        self.running: dict[int, int] = {}
        self.channel = Channel(ours)
        self.description = self._await_start(min(until, time.monotonic() + _START_SECONDS))

    def _await_start(self, give_up: float) -> str:
        while time.monotonic() < give_up and not self.channel.closed:
            wait([self.channel], give_up - time.monotonic())
            self.channel.pump()
            for message in self.channel.messages():
                if "ready" in message:
                    return message["ready"]["description"]
                self.close()
                raise SandboxError(message["refused"])
        self.close(at_once=True)
        raise SandboxError(f"The pool server did not start (exit status {self.process.returncode}).")

    def close(self, at_once: bool = False) -> None:
        """End the server, and with it its programs. `at_once` does not wait for it to clean up after itself: the
        kernel ends the programs of a server that was killed.
        """
        self.channel.close()
        if at_once:
            self.process.kill()
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class PoolSandbox:
    """A `Sandbox` on this machine. Open it with `credit_trl.sandbox.open_sandbox`, which probes its walls first.

    Args:
        tier: `"bubblewrap"`, `"landlock"` or `"unprotected"`.
        workers: programs that run at the same time.
        python: interpreter for the programs.

    Raises:
        SandboxError: the tier is not to be had here, and what to install.
    """

    def __init__(self, tier: str, workers: int, python: str | None = None) -> None:
        self.tier = tier
        self.workers = workers
        self._python = python
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        self._next_number = 0
        self._servers: list[_Server] = []
        self._start_servers()
        self.description = self._servers[0].description

    @property
    def server_pids(self) -> list[int]:
        """Process ids of the pool servers."""
        return [server.process.pid for server in self._servers]

    def run(
        self,
        programs: Sequence[Program],
        *,
        deadline: float | None = None,
        skip_group_after: Collection[Status] = (),
        progress: bool | str = False,
        keep: Callable[[int, Outcome], Outcome] | None = None,
    ) -> list[Outcome]:
        """See `Sandbox.run`. Calls from several threads take turns; waiting for one's turn counts.

        Raises:
            SandboxError: also where the sandbox is closed, or another thread closes it meanwhile.
        """
        if os.getpid() != self._owner:
            raise SandboxError("This sandbox belongs to the process that opened it; open another one after a fork.")
        deadline = seconds_left(deadline)
        until = math.inf if deadline is None else time.monotonic() + deadline
        if not self._lock.acquire(timeout=-1 if deadline is None else min(max(0.0, deadline), threading.TIMEOUT_MAX)):
            batch = Batch(programs, keep=keep)
            batch.expire("the deadline came before another batch had ended")
            return batch.outcomes()
        try:
            self._check_open()
            with Batch(programs, skip_group_after, progress, keep) as batch:
                try:
                    self._serve(batch, until)
                except _ServerGone:
                    batch.requeue()
                    self._serve_again(batch, until)
                return batch.outcomes()
        except BaseException:
            # Whatever still runs belongs to a batch that nobody waits for any more.
            self._drop_servers(at_once=True)
            raise
        finally:
            self._lock.release()

    def _serve_again(self, batch: Batch, until: float) -> None:
        self._drop_servers(at_once=True)
        self._check_open()
        try:
            self._serve(batch, until)
        except _ServerGone as error:
            self._check_open()
            raise SandboxError(f"The pool server ended twice while it ran a batch: {error}.") from error

    def _serve(self, batch: Batch, until: float) -> None:
        """Feed the batch and collect, until all is in or the deadline has come."""
        if not self._servers:
            try:
                self._start_servers(until)
            except SandboxError:
                if time.monotonic() < until:
                    raise
        heard = time.monotonic()
        while not batch.finished and time.monotonic() < until:
            self._feed(batch)
            give_up = heard + batch.longest_wall_seconds + _SILENCE_SECONDS
            wait([server.channel for server in self._servers], min(until, give_up) - time.monotonic())
            if self._collect(batch):
                heard = time.monotonic()
            elif time.monotonic() >= give_up:
                raise _ServerGone(f"no answer in {time.monotonic() - heard:.0f} s")
        if not batch.finished:
            self._cancel(batch, until)

    def _feed(self, batch: Batch) -> None:
        """Keep a small lead over the servers, so that their memory does not grow with the batch.

        Each server first gets what it can run, then as much to build walls for, then as much in reserve: a small batch
        is spread over all of them.
        """
        for lead in (1, 2, 3):
            for server in self._servers:
                while len(server.running) < lead * server.workers and (index := batch.take()) is not None:
                    server.running[self._next_number] = index
                    server.channel.send({"run": self._next_number, "program": _as_message(batch.programs[index])})
                    self._next_number += 1
        for server in self._servers:
            server.channel.flush()

    def _collect(self, batch: Batch) -> bool:
        """Take the answers that have arrived; whether there were any."""
        heard = False
        for server in self._servers:
            server.channel.pump()
            for message in server.channel.messages():
                heard = True
                self._take(message, server.running, batch)
            if server.channel.closed:
                raise _ServerGone("its socket closed")
        return heard

    def _take(self, message: dict[str, Any], running: dict[int, int], batch: Batch) -> None:
        if "malformed" in message:
            index = running.pop(message["malformed"])
            raise ValueError(f"Program.arguments of program {index} are not JSON: {message['reason']}")
        if "failed" in message:
            batch.failed(running.pop(message["failed"]), message["reason"])
        else:
            batch.done(running.pop(message["done"]), Outcome(**message["outcome"]))

    def _cancel(self, batch: Batch, until: float) -> None:
        """The deadline has come: have the servers end what runs. One that does not answer in time is killed."""
        for server in self._servers:
            server.channel.send({"cancel": True})
        batch.abandon()
        try:
            while any(server.running for server in self._servers):
                left = until + _GRACE_SECONDS - time.monotonic()
                if left <= 0:
                    self._drop_servers(at_once=True)
                    break
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
                self._servers.append(_Server(self.tier, share, self._python, until))
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
        """See `Sandbox.close`. A batch that another thread runs ends at once, with `SandboxError`."""
        if os.getpid() != self._owner:
            return
        self._closed = True
        while not self._lock.acquire(timeout=_CLOSE_SECONDS):
            for server in tuple(self._servers):  # the thread that runs the batch notices, and gives up
                server.process.kill()
        try:
            self._drop_servers()
        finally:
            self._lock.release()

    def __enter__(self) -> PoolSandbox:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        # Not `contextlib.suppress`: at the interpreter's end the module's names may be gone before this runs.
        try:
            self.close()
        except Exception:
            return


def _server_environment() -> dict[str, str]:
    """Nothing but what an interpreter may need to start, and a mark that must not reach a program: the probe looks."""
    path = os.environ.get("LD_LIBRARY_PATH")
    return {"CREDIT_SANDBOX_CANARY": "1", **({"LD_LIBRARY_PATH": path} if path else {})}


def _as_message(program: Program) -> dict[str, Any]:
    message = {name: getattr(program, name) for name in _MESSAGE_FIELDS}
    return {**message, "limits": asdict(program.limits)}
