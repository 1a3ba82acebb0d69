"""Sandbox on this machine: sends programs to a server process and collects their outcomes until the deadline."""

import math
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace

from credit_trl.sandbox.batch import Batch, Sandbox
from credit_trl.sandbox.protocol import Channel, Outcome, SandboxError, sandbox_error

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
PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# Interval at which `close` tries to end the batch of another thread.
_CLOSE_SECONDS = 0.05


class _Server:
    """A server and the channel to it. `process` is the server's guard, `pid` the server."""

    def __init__(self, tier: str, workers: int, until: float = math.inf) -> None:
        ours, theirs = socket.socketpair()
        # What an interpreter may need to start, and a variable that must not reach a program, which the probe checks.
        path = os.environ.get("LD_LIBRARY_PATH")
        environment = {"CREDIT_SANDBOX_CANARY": "1", **({"LD_LIBRARY_PATH": path} if path else {})}
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _BOOT, PACKAGE, tier, str(workers)],
                stdin=theirs,
                stdout=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )
        self.channel = Channel(ours)
        give_up = min(until, time.monotonic() + _START_SECONDS)
        while time.monotonic() < give_up and not self.channel.closed:
            self.channel.wait(give_up - time.monotonic())
            for message in self.channel.pump():
                if "refused" in message:
                    self.close()
                    raise sandbox_error(message["refused"])
                self.description: str = message["ready"]["description"]
                self.pid: int = message["ready"]["pid"]
                return
        self.close()
        raise SandboxError(f"The sandbox server did not start (exit status {self.process.returncode}).")

    def close(self) -> None:
        """End the server and its programs: its guard kills them."""
        self.channel.close()
        self.process.terminate()
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.process.kill()
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
            batch.expire()
            return
        try:
            self._serve(batch, until)
        except BaseException:
            self._drop_server()  # its programs belong to a batch that nobody waits for
            raise
        finally:
            self._lock.release()

    def _serve(self, batch: Batch, until: float) -> None:
        """Send the batch and collect its outcomes until it is finished or the deadline comes."""
        while not batch.finished and time.monotonic() < until:
            if self._closed:
                raise SandboxError("This sandbox has been closed; open another one with open_sandbox().")
            try:
                self._server = self._server or _Server(self.tier, self.workers, until)
            except SandboxError:
                if time.monotonic() < until:
                    raise
                break
            channel = self._server.channel
            while (index := batch.take(self.workers)) is not None:
                program = replace(batch.programs[index], group=None)
                channel.send({"run": index, "program": asdict(program)})
            channel.wait(until - time.monotonic())
            for message in channel.pump():
                if "failed" in message:
                    batch.failed([message["failed"]], message["reason"])
                else:
                    batch.done(message["done"], Outcome(**message["outcome"]))
            if channel.closed:
                self._drop_server()
                batch.failed(sorted(batch.running), "the sandbox server ended")
        if not batch.finished:
            self._drop_server()  # ends the programs
            batch.expire()

    def _drop_server(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()

    def close(self) -> None:
        """End all programs and the server. A batch that another thread runs ends at once with `SandboxError`."""
        if os.getpid() != self._owner:
            return
        self._closed = True
        while not self._lock.acquire(timeout=_CLOSE_SECONDS):
            server = self._server
            if server is not None:  # the thread that runs the batch fails, and releases the lock
                server.process.terminate()
        self._drop_server()
        self._lock.release()
