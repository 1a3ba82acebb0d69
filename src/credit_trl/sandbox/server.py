"""The pool server: a small process of its own, never the trainer, that starts programs and watches them.

One thread, one epoll loop. It talks to the trainer's side in JSON frames over a socket on standard input:

    in:  {"run": id, "program": {...}}            start a program, or queue it until a slot is free
         {"cancel": true}                         end everything that runs or waits, with status "deadline"
    out: {"ready": {...}} or {"refused": text}    once, after the start
         {"done": id, "outcome": {...}}           exactly once per program
         {"failed": id, "reason": text}           the program could not be started: the sandbox's fault, not its own
         {"malformed": id, "reason": text}        its arguments are not JSON: the caller's fault

It ends, with everything it started, when the socket closes or its parent goes.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import socket
import sys
import time
from collections import deque
from typing import Any

from credit_trl.sandbox import accounts, kernel, observe
from credit_trl.sandbox.frames import Channel
from credit_trl.sandbox.interpreter import find_interpreter, public_copy
from credit_trl.sandbox.launch import Walls, compiled_driver, start
from credit_trl.sandbox.protocol import Limits, Program, SandboxError
from credit_trl.sandbox.running import Run, outcome

_SAMPLE_SECONDS = 0.05
_REAP_SECONDS = 0.02  # how soon an adopted process that ends is collected
_IDLE_SECONDS = 1.0  # how soon a server without work notices that its parent has gone
_PREPARE_SECONDS = 30.0  # what building the walls may take on a machine at its limits
_CHUNK = 1 << 16
_BYTES_PER_FILE = 4096  # empty files take memory too, which no limit of the kernel counts


def build_walls(tier: str, python: str | None) -> tuple[Walls, str]:
    """The walls of a tier, and a line that describes them. Raises `SandboxError` where they cannot be had."""
    interpreter = find_interpreter(python)
    if os.geteuid() == 0:
        interpreter = public_copy(interpreter)
    driver = compiled_driver(interpreter)
    if tier == "bubblewrap":
        from credit_trl.sandbox.bubblewrap import Bubblewrap

        walls = Bubblewrap(interpreter, driver)
        return walls, f"bubblewrap {'.'.join(map(str, walls.version))}, Python {interpreter.version}"
    if tier == "landlock":
        from credit_trl.sandbox.landlock import LandlockWalls

        walls = LandlockWalls(interpreter, driver)
        return walls, f"Landlock version {walls.version} and seccomp, Python {interpreter.version}"
    from credit_trl.sandbox.unprotected import NoWalls

    return NoWalls(interpreter, driver), f"no walls, Python {interpreter.version}"


class Server:
    """The loop. At most `workers` programs run; the walls of as many more are built meanwhile.

    `users` has two entries per worker: the user number that a program runs as, or `None`.
    """

    def __init__(self, channel: Channel, walls: Walls, workers: int, users: list[int | None]) -> None:
        self.channel = channel
        self.walls = walls
        self.workers = workers
        self.free = list(users)
        self.waiting: deque[tuple[int, Program]] = deque()
        self.runs: dict[int, Run] = {}  # by process id
        self.by_descriptor: dict[int, Run] = {}
        self.poll = select.epoll()
        self.next_sample = 0.0
        self.has_children = False
        self.prepared: deque[Run] = deque()  # started, not yet told to begin

    def serve(self) -> None:
        """Serve until the other end closes."""
        parent = os.getppid()
        self.poll.register(self.channel.fileno(), select.EPOLLIN)
        try:
            while not self.channel.closed and os.getppid() == parent:
                for descriptor, _ in self.poll.poll(self._timeout()):
                    run = self.by_descriptor.get(descriptor)
                    if run is not None:
                        self._read(run, descriptor)
                self._converse()
                self._enforce()
                self._reap()
                self._fill()
        finally:
            for run in list(self.runs.values()):
                self._kill(run, "deadline", "the pool server ended")
            self._kill_orphans()
            self._reap(wait_seconds=1.0)

    def _converse(self) -> None:
        self.channel.pump()
        for message in self.channel.messages():
            if "run" in message:
                fields = message["program"]
                self.waiting.append((message["run"], Program(**{**fields, "limits": Limits(**fields["limits"])})))
            elif "cancel" in message:
                for number, _ in self.waiting:
                    self._answer(number, {"status": "deadline", "error": "the deadline came before it could start"})
                self.waiting.clear()
                for run in self.runs.values():
                    self._kill(run, "deadline", "the deadline came before it ended")

    def _answer(self, number: int, fields: dict[str, Any]) -> None:
        self.channel.send({"done": number, "outcome": fields})

    def _fill(self) -> None:
        """Let the next programs begin where workers are free, and build the walls for those after them."""
        while self.free and self.waiting:
            number, program = self.waiting.popleft()
            self._prepare(number, program)
        while self.prepared and len(self.runs) - len(self.prepared) < self.workers:
            run = self.prepared.popleft()
            run.released_at = time.monotonic()
            with contextlib.suppress(OSError):  # it has ended already; `_finish` says so
                os.write(run.process.report, b"G")
        self.channel.flush()
        events = select.EPOLLIN | (select.EPOLLOUT if self.channel.unsent else 0)
        if not self.channel.closed:
            self.poll.modify(self.channel.fileno(), events)

    def _prepare(self, number: int, program: Program) -> None:
        user = self.free.pop()
        try:
            process = start(self.walls, program, user)
        except OSError as error:
            self.free.append(user)
            self.channel.send({"failed": number, "reason": f"{type(error).__name__}: {error}"})
            return
        run = Run(number, program, process, user)
        self.runs[process.pid] = run
        self.prepared.append(run)
        for descriptor in run.descriptors:
            self.by_descriptor[descriptor] = run
            self.poll.register(descriptor, select.EPOLLIN)

    def _timeout(self) -> float:
        if not self.runs:
            return _REAP_SECONDS if self.has_children else _IDLE_SECONDS
        now = time.monotonic()
        return max(0.0, min(self.next_sample, *(self._must_end(run) for run in self.runs.values())) - now)

    def _must_end(self, run: Run) -> float:
        """When it is killed: by its own limit once it began; for walls that do not come up, once it could begin."""
        if run.began_at is not None:
            return run.began_at + run.program.limits.wall_seconds
        return math.inf if run.released_at is None else run.released_at + _PREPARE_SECONDS

    def _read(self, run: Run, descriptor: int) -> None:
        """Take what a pipe has; ends a run whose output passes its limit. A process descriptor has nothing to read."""
        if descriptor == run.process.pidfd:
            return
        try:
            chunk = os.read(descriptor, _CHUNK)
        except BlockingIOError:
            return
        except OSError:  # the socket of a process that died before it read what it was sent
            chunk = b""
        if not chunk:
            self._forget(descriptor)
            run.pipes_open.discard(descriptor)
            return
        run.take(descriptor, chunk, time.monotonic())
        if run.limit_passed:
            self._kill(run, "output_limit", f"more than {run.limit_passed} bytes of output")

    def _forget(self, descriptor: int) -> None:
        if self.by_descriptor.pop(descriptor, None) is not None:
            self.poll.unregister(descriptor)

    def _enforce(self) -> None:
        """Wall clock at every turn; memory and process count of the whole tree every so often."""
        now = time.monotonic()
        sample = now >= self.next_sample
        if sample:
            self.next_sample = now + _SAMPLE_SECONDS
        for run in self.runs.values():
            limits = run.program.limits
            if now >= self._must_end(run):
                # Walls that do not come up are the sandbox's fault: no status, and `outcome` says that it failed.
                status = None if run.began_at is None else "timeout"
                self._kill(run, status, f"more than {limits.wall_seconds:g} seconds")
            elif run.began_at is None:
                continue
            elif sample and now - run.began_at >= _SAMPLE_SECONDS / 2:
                usage = observe.usage(run.process.pid, limits.memory_bytes, self.walls.scratch)
                if usage.resident_bytes > limits.memory_bytes:
                    self._kill(run, "memory", f"more than {limits.memory_bytes} bytes of memory")
                elif usage.tasks > limits.processes + self.walls.own_tasks + 1:
                    self._kill(run, "runtime_error", f"more than {limits.processes} processes and threads")
                elif usage.scratch_files > limits.file_bytes // _BYTES_PER_FILE:
                    files = limits.file_bytes // _BYTES_PER_FILE
                    self._kill(run, "runtime_error", f"more than {files} files in the scratch directory")

    def _kill(self, run: Run, status: str | None, reason: str) -> None:
        """End the program's whole group; with namespaces, everything in them ends with it."""
        if run.ended_by is None:
            run.ended_by, run.reason = status, reason
        if run.process.pid in self.runs:
            self._kill_group(run.process.pid)

    def _kill_group(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)

    def _reap(self, wait_seconds: float = 0.0) -> None:
        """Collect every child that ended: programs, and descendants of theirs that this process adopted."""
        give_up = time.monotonic() + wait_seconds
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                self.has_children = True
            except ChildProcessError:
                self.has_children = False
                return
            if ended is None:
                if time.monotonic() >= give_up:
                    return
                time.sleep(0.005)
                continue
            run = self.runs.get(ended.si_pid)
            if run is not None:
                self._kill_group(run.process.pid)  # before its number is given back and may become another's
            _, status = os.waitpid(ended.si_pid, 0)
            if run is None:
                self._kill_orphans()  # its own children are this process's now
                continue
            del self.runs[run.process.pid]
            if run in self.prepared:
                self.prepared.remove(run)
            self._finish(run, os.waitstatus_to_exitcode(status))

    def _finish(self, run: Run, exit_code: int) -> None:
        self._kill_orphans()
        self._drain(run)
        for descriptor in run.descriptors:
            self._forget(descriptor)
            os.close(descriptor)
        self.free.append(run.user)
        fields = outcome(run, exit_code, time.monotonic())
        for fault in ("failed", "malformed"):
            if fault in fields:
                self.channel.send({fault: run.number, "reason": fields[fault]})
                return
        self._answer(run.number, fields)

    def _drain(self, run: Run) -> None:
        """Read what an ended program left in its pipes, without waiting for anybody who still holds them."""
        for descriptor in tuple(run.pipes_open):
            while descriptor in run.pipes_open and not run.limit_passed:
                before = run.received
                self._read(run, descriptor)
                if run.received == before:
                    break

    def _kill_orphans(self) -> None:
        """Descendants that left their group and lost their parent became children of this process: end them too."""
        with open(f"/proc/self/task/{os.getpid()}/children", "rb") as children:
            for child in map(int, children.read().split()):
                if child not in self.runs:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(child, signal.SIGKILL)


def main(tier: str, workers: int, python: str | None) -> None:
    """Entry point of the server process: standard input is the socket to the trainer's side."""
    sys.setrecursionlimit(500)  # bounds the nesting of returned JSON to what any caller can parse again
    channel = Channel(socket.socket(fileno=os.dup(0)))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        if not observe.available():
            raise SandboxError(
                "The kernel does not list a process's children (CONFIG_PROC_CHILDREN), which the memory limit of a "
                "tree of processes needs. Use a remote sandbox (url=...)."
            )
        walls, description = build_walls(tier, python)
        users, claims = accounts.claim(2 * workers) if os.geteuid() == 0 else ([None] * 2 * workers, [])
    except (SandboxError, OSError) as error:
        channel.send({"refused": str(error)})
        channel.flush()
        return
    kernel.adopt_orphans()
    channel.send({"ready": {"description": description}})
    channel.flush()
    Server(channel, walls, workers, users).serve()
    for claim in claims:
        claim.close()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
