"""Server process that starts and watches programs, so that they are never forked from the trainer.

It has one thread with an epoll loop, and exchanges JSON frames with its client over a socket on standard input:

    in:  {"run": number, "program": {...}}        start a program, at most `workers` at a time
    out: {"ready": {...}} or {"refused": text}    once, after the start; with the server's process id
         {"done": number, "outcome": {...}}       the program ended, or was ended
         {"failed": number, "reason": text}       the sandbox failed to start the program

Each program gets one of the last two. The server ends, with all that it started, when the socket closes or its
parent ends. That parent is a guard, the process that the client started: it kills what a killed server leaves behind.
The signal that the kernel sends to a process whose parent ends is not enough: it is set for one process and not for
those that it forks, and a child of bubblewrap whose parent is killed before it has finished waits for it forever.

The wall-clock limit of a program excludes the time in which it could run and waited for a processor, as other programs
may use all of them. Such programs come to their own limits of processor time.
"""

import contextlib
import errno
import math
import os
import resource
import select
import signal
import socket
import sys
import time
from typing import Any

from credit_trl.sandbox import kernel, observe
from credit_trl.sandbox.bubblewrap import Bubblewrap
from credit_trl.sandbox.cgroups import MemoryGroup, delegated_group, remove_groups
from credit_trl.sandbox.interpreter import find_interpreter, public_copy
from credit_trl.sandbox.landlock import Landlock
from credit_trl.sandbox.launch import OWN_TASKS, Isolation, Unprotected, start
from credit_trl.sandbox.protocol import Channel, Limits, Program, SandboxError, Status
from credit_trl.sandbox.running import RunningProgram

_SAMPLE_SECONDS = 0.05
_IDLE_SECONDS = 1.0  # interval at which a server without programs checks that its parent lives
_START_SECONDS = 30.0  # for the process of a program to start on a busy machine
_CHUNK = 1 << 16
_OWN_DESCRIPTORS = 96  # of the server itself, and those between a fork and the start of a program


class Server:
    """Runs the programs of a client."""

    def __init__(self, channel: Channel, isolation: Isolation) -> None:
        self.channel = channel
        self.isolation = isolation
        self.groups = delegated_group()  # in which it makes one for each program
        self.ending: list[MemoryGroup] = []  # of ended programs, while a process of theirs still ends
        self.runs: dict[int, RunningProgram] = {}  # by process id
        self.by_descriptor: dict[int, RunningProgram] = {}
        self.poll = select.epoll()
        # Becomes readable whenever a child ends, if the signal has a handler.
        self.ended_child, write_end = os.pipe()
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> None:
        """Serve until the socket closes or the parent ends. The guard kills the programs that still run."""
        parent = os.getppid()
        self.poll.register(self.ended_child, select.EPOLLIN)
        self.poll.register(self.channel.stream, select.EPOLLIN)
        while not self.channel.closed and os.getppid() == parent:
            for descriptor, _ in self.poll.poll(self._timeout()):
                if descriptor == self.ended_child:
                    os.read(descriptor, _CHUNK)
                elif (run := self.by_descriptor.get(descriptor)) is not None:
                    self._read(run, descriptor)
            for message in self.channel.pump():
                self._start(message["run"], message["program"])
            self._enforce()
            self._reap()
            self.channel.flush()
            if not self.channel.closed:
                events = select.EPOLLIN | (select.EPOLLOUT if self.channel.unsent else 0)
                self.poll.modify(self.channel.stream, events)

    def _start(self, number: int, fields: dict[str, Any]) -> None:
        program = Program(**{**fields, "limits": Limits(**fields["limits"])})
        group: MemoryGroup | None = None
        if self.groups is not None:
            with contextlib.suppress(OSError):  # samples limit its memory
                group = MemoryGroup(self.groups, program.limits.memory_bytes)
        try:
            pid, pipes = start(self.isolation, program, group)
        except OSError as error:
            if group is not None:
                group.remove()
            self.channel.send({"failed": number, "reason": f"{type(error).__name__}: {error}"})
            return
        run = RunningProgram(number, program, pid, pipes, group, time.monotonic())
        self.runs[pid] = run
        for descriptor in pipes:
            self.by_descriptor[descriptor] = run
            self.poll.register(descriptor, select.EPOLLIN)

    def _timeout(self) -> float:
        if not self.runs:
            return _IDLE_SECONDS
        turns = (min(run.next_sample, self._must_end(run)) for run in self.runs.values() if run.ended_by is None)
        return max(0.0, min(min(turns, default=math.inf) - time.monotonic(), _SAMPLE_SECONDS))

    def _must_end(self, run: RunningProgram) -> float:
        """Time at which it is killed: at its own limit if it began, else some time after its start."""
        if run.began_at is None:
            return run.started_at + _START_SECONDS
        return max(run.not_before, run.began_at + run.delayed + run.program.limits.wall_seconds)

    def _read(self, run: RunningProgram, descriptor: int) -> bool:
        """Read from a pipe of a program; False if it had nothing. More output than the limit ends the program."""
        try:
            chunk = os.read(descriptor, _CHUNK)
        except BlockingIOError:
            return False
        if not chunk:
            self._close(run, descriptor)
            return False
        run.open_pipes[descriptor] += chunk
        if run.began_at is None and run.begin_mark:
            run.began_at = time.monotonic()
            run.next_sample = run.began_at + _SAMPLE_SECONDS
            times = observe.processor_times(observe.descendants(run.pid))
            run.add_times(times, run.began_at)  # delays count from here
        limit = run.exceeded_output_limit()
        if limit is not None:
            self._kill(run, "output_limit", f"more than {limit} bytes of output")
        return limit is None

    def _close(self, run: RunningProgram, descriptor: int) -> None:
        self.poll.unregister(descriptor)
        os.close(descriptor)
        del self.by_descriptor[descriptor]
        del run.open_pipes[descriptor]

    def _enforce(self) -> None:
        """Check wall-clock time at every turn, and what a program's whole tree uses at intervals."""
        now = time.monotonic()
        for run in self.runs.values():
            if run.ended_by is not None:
                continue
            began = run.began_at is not None
            if began and now >= min(run.next_sample, self._must_end(run)):
                self._check_usage(run, run.program.limits)
            is_late = began and now >= self._must_end(run)
            if is_late and run.is_starved and observe.is_runnable(run.pid):
                run.not_before = now + _SAMPLE_SECONDS  # it waits for a processor, which counts when the wait ends
            if now >= self._must_end(run):
                # A program that never began is a failure of the sandbox and has no status.
                limit = f"more than {run.program.limits.wall_seconds:g} seconds"
                self._kill(run, "timeout" if began else None, limit)

    def _check_usage(self, run: RunningProgram, limits: Limits) -> None:
        usage = observe.usage(run.pid)
        run.add_times(usage.times, time.monotonic())
        run.next_sample = time.monotonic() + _SAMPLE_SECONDS
        if usage.held_bytes > limits.memory_bytes:
            self._kill(run, "memory", f"more than {limits.memory_bytes} bytes of memory")
        elif run.cpu_seconds > math.ceil(limits.cpu_seconds):
            self._kill(run, "timeout", f"more than {limits.cpu_seconds:g} seconds of processor time")
        elif usage.tasks > limits.processes + OWN_TASKS + 1:
            self._kill(run, "runtime_error", f"more than {limits.processes} processes and threads")

    def _kill(self, run: RunningProgram, status: Status | None, reason: str) -> None:
        """Kill the program's process group. With namespaces the kernel also ends all other processes in them."""
        if run.ended_by is None:
            run.ended_by = status
            run.reason = reason
        if run.pid in self.runs:
            _kill_group(run.pid)

    def _reap(self) -> None:
        """Collect every child that ended: programs, and their descendants that this process adopted."""
        self.ending = [group for group in self.ending if not group.remove()]
        with contextlib.suppress(ChildProcessError):  # there is none
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if ended.si_pid in self.runs:
                    _kill_group(ended.si_pid)  # before its process id can be used again
                _, status = os.waitpid(ended.si_pid, 0)
                self._kill_orphans()  # this process has adopted its children
                run = self.runs.pop(ended.si_pid, None)
                if run is not None:
                    self._finish(run, os.waitstatus_to_exitcode(status))

    def _finish(self, run: RunningProgram, exit_code: int) -> None:
        """Answer for an ended program, with what it left in its pipes. Other processes may still hold them."""
        for descriptor in tuple(run.open_pipes):
            while run.exceeded_output_limit() is None and self._read(run, descriptor):
                pass
        for descriptor in tuple(run.open_pipes):
            self._close(run, descriptor)
        if run.group is not None:
            if run.group.has_killed():
                self._kill(run, "memory", f"more than {run.program.limits.memory_bytes} bytes of memory")
            if not run.group.remove():
                self.ending.append(run.group)
        self.channel.send(run.answer(exit_code, time.monotonic()))

    def _kill_orphans(self) -> None:
        """Kill adopted children: descendants of programs that left their group and lost their parent."""
        for child in observe.children(os.getpid()):
            if child not in self.runs:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)


def _kill_group(pid: int) -> None:
    """Kill a child that has not been reaped, and its group, which it makes a moment after its start."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)


def _fork_guarded() -> None:
    """Return in a child process only. This process kills what the child leaves when it ends, and ends with it.

    SIGTERM kills the child at once.
    """
    kernel.prctl(kernel.ADOPT_ORPHANS, 1)
    signals = {signal.SIGTERM, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    server = os.fork()
    if server == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        return
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)  # the client shall see that the server's end of the socket closes
    ended = None
    while ended is None and signal.sigwait(signals) == signal.SIGCHLD:
        ended = os.waitid(os.P_PID, server, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    os.kill(server, signal.SIGKILL)
    exit_code = os.waitstatus_to_exitcode(os.waitpid(server, 0)[1])
    with contextlib.suppress(OSError):  # none is left
        while True:  # the children of one that is killed become children of this process
            for child in observe.children(os.getpid()):
                os.kill(child, signal.SIGKILL)
            os.wait()
    with contextlib.suppress(OSError):  # a process is still ending
        remove_groups(delegated_group(), server)
    os._exit(exit_code if exit_code >= 0 else 128 - exit_code)


def main(tier: str, workers: int) -> None:
    """Entry point of the server process. Standard input is the socket to the client."""
    sys.setrecursionlimit(500)  # limits the nesting of returned JSON to what every client can parse
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if the trainer ignores it, the server would collect no child
    os.umask(0o022)  # every user may read a copy of the interpreter
    _fork_guarded()
    channel = Channel(socket.socket(fileno=os.dup(0)))
    try:
        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, allowed))
        needed = _OWN_DESCRIPTORS + 4 * workers  # pipes
        if 0 <= allowed < needed:
            raise OSError(errno.EMFILE, f"{os.strerror(errno.EMFILE)}: {allowed} are allowed, {needed} are needed")
        observe.require_supported()
        interpreter = find_interpreter()
        if os.geteuid() == 0:
            interpreter = public_copy(interpreter)
        kinds = {"bubblewrap": Bubblewrap, "landlock": Landlock, "unprotected": Unprotected}
        isolation = kinds[tier](interpreter)
    except (SandboxError, OSError) as error:
        channel.send({"refused": str(error)})
        channel.flush()
        return
    kernel.prctl(kernel.ADOPT_ORPHANS, 1)
    description = f"{isolation.description}, Python {interpreter.version}"
    channel.send({"ready": {"description": description, "pid": os.getpid()}})
    channel.flush()
    Server(channel, isolation).serve()
