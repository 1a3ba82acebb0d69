"""Server process that starts and watches programs, so that they are never forked from the trainer.

It has one thread with an epoll loop, and exchanges JSON frames with its client over a socket on standard input:

    in:  {"run": {...}}                           start a program (fields of `Job`), or queue it until a slot is free
         {"stop": group}                          skip the waiting programs of a group
         {"cancel": true}                         end all running and waiting programs with status "deadline"
    out: {"ready": {...}} or {"refused": text}    once, after the start; with the server's process id
         {"alive": true}                          at intervals while programs run
         {"done": id, "outcome": {...}}           the program ended, or was ended
         {"failed": id, "reason": text}           the sandbox failed to start the program

Each program gets one of the last two. The server ends, with all that it started, when the socket closes or its
parent ends. That parent is a guard, the process that the client started: it kills what a killed server leaves behind.
The signal that the kernel sends to a process whose parent ends is not enough: it is set for one process and not for
those that it forks, and a child of bubblewrap whose parent is killed before it has finished waits for it forever.

The wall-clock limit of a program excludes the time in which it could run and waited for a processor, as other programs
may use all of them. Such programs come to their own limits of processor time.
"""

from __future__ import annotations

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
from collections import deque
from collections.abc import Iterable, Sequence

from credit_trl.sandbox import accounts, kernel, observe
from credit_trl.sandbox.bubblewrap import Bubblewrap
from credit_trl.sandbox.frames import Channel
from credit_trl.sandbox.interpreter import find_interpreter, public_copy
from credit_trl.sandbox.landlock import Landlock
from credit_trl.sandbox.launch import Isolation, Unprotected, compiled_driver, start
from credit_trl.sandbox.packages import find_packages, public_packages
from credit_trl.sandbox.protocol import Limits, Program, SandboxError, Status
from credit_trl.sandbox.running import GROUP_STOPPED, Job, Process, RunningProgram, processor_limit

ISOLATIONS = {"bubblewrap": Bubblewrap, "landlock": Landlock, "unprotected": Unprotected}

_SAMPLE_SECONDS = 0.05
# Of a program with more than two processes, whose memory together the kernel does not limit.
_TREE_SAMPLE_SECONDS = 0.01
_ALIVE_SECONDS = 5.0
_REAP_SECONDS = 0.02  # interval at which an idle server collects adopted processes that ended
_IDLE_SECONDS = 1.0  # interval at which a server without work checks that its parent lives
_PREPARE_SECONDS = 30.0  # for the process of a program to start on a busy machine
_CHUNK = 1 << 16
_OWN_DESCRIPTORS = 96  # of the server itself, and those between a fork and the start of a program
_BYTES_PER_FILE = 4096  # empty files take memory too, which no limit of the kernel counts


class Server:
    """Runs at most `workers` programs, and prepares the processes of as many more.

    `users` has two entries per worker, the id of the user that a program runs as or `None`.
    """

    def __init__(self, channel: Channel, isolation: Isolation, workers: int, users: list[int | None]) -> None:
        self.channel = channel
        self.isolation = isolation
        self.workers = workers
        self.free = list(users)
        self.waiting: deque[Job] = deque()
        self.runs: dict[int, RunningProgram] = {}  # by process id
        self.by_descriptor: dict[int, RunningProgram] = {}
        self.poll = select.epoll()
        self.next_alive = 0.0
        self.has_children = False
        self.prepared: deque[RunningProgram] = deque()  # processes whose program has not been released

    def serve(self) -> None:
        """Serve until the socket closes or the parent ends."""
        parent = os.getppid()
        self.poll.register(self.channel.fileno(), select.EPOLLIN)
        try:
            while not self.channel.closed and os.getppid() == parent:
                for descriptor, _ in self.poll.poll(self._timeout()):
                    if (run := self.by_descriptor.get(descriptor)) is not None:
                        self._read(run, descriptor)
                self._receive()
                self._enforce()
                self._reap()
                self._fill()
        finally:
            for run in list(self.runs.values()):
                self._kill(run, "deadline", "the sandbox server ended")
            self._kill_orphans()
            self._reap(wait_seconds=1.0)

    def _receive(self) -> None:
        self.channel.pump()
        for message in self.channel.messages():
            if "run" in message:
                job = message["run"]
                program = Program(**{**job["program"], "limits": Limits(**job["program"]["limits"])})
                self.waiting.append(Job(**{**job, "program": program}))
            elif "stop" in message:
                self._stop_group(message["stop"])
            elif "cancel" in message:
                self._drop(self.waiting, "deadline", "the deadline came before it could start")
                self.waiting.clear()
                for run in self.runs.values():
                    self._kill(run, "deadline", "the deadline came before it ended")

    def _drop(self, jobs: Iterable[Job], status: Status, reason: str) -> None:
        """Answer for programs that do not start."""
        for job in jobs:
            self.channel.send({"done": job.number, "outcome": {"status": status, "error": reason}})

    def _stop_group(self, group: int) -> None:
        """Skip the programs of a group that have not begun; those that run come to their own end."""
        self._drop((job for job in self.waiting if job.group == group), "skipped", GROUP_STOPPED)
        self.waiting = deque(job for job in self.waiting if job.group != group)
        for run in [run for run in self.prepared if run.job.group == group]:
            self.prepared.remove(run)
            self._kill(run, "skipped", GROUP_STOPPED)

    def _fill(self) -> None:
        """Release the next programs if workers are free, and prepare those after them."""
        while self.free and self.waiting:
            self._prepare(self.waiting.popleft())
        while self.prepared and sum(run.released_at is not None for run in self.runs.values()) < self.workers:
            run = self.prepared.popleft()
            run.released_at = time.monotonic()
            with contextlib.suppress(OSError):  # it has ended already, which `_finish` reports
                os.write(run.process.report, b"G")
        self.channel.flush()
        if not self.channel.closed:
            events = select.EPOLLIN | (select.EPOLLOUT if self.channel.unsent else 0)
            self.poll.modify(self.channel.fileno(), events)

    def _prepare(self, job: Job) -> None:
        user = self.free.pop()
        try:
            process = start(self.isolation, job.program, user)
        except OSError as error:
            self.free.append(user)
            self.channel.send({"failed": job.number, "reason": f"{type(error).__name__}: {error}"})
            return
        run = RunningProgram(job, process, user)
        self.runs[process.pid] = run
        self.prepared.append(run)
        for descriptor in process.descriptors:
            self.by_descriptor[descriptor] = run
            self.poll.register(descriptor, select.EPOLLIN)

    def _timeout(self) -> float:
        if not self.runs:
            return _REAP_SECONDS if self.has_children else _IDLE_SECONDS
        turns = (min(run.next_sample, self._must_end(run)) for run in self.runs.values() if run.ended_by is None)
        return max(0.0, min(min(turns, default=math.inf) - time.monotonic(), _SAMPLE_SECONDS))

    def _must_end(self, run: RunningProgram) -> float:
        """Time at which it is killed: at its own limit if it began, else some time after its release."""
        if run.began_at is not None:
            return max(run.not_before, run.began_at + run.delayed + run.program.limits.wall_seconds)
        return math.inf if run.released_at is None else run.released_at + _PREPARE_SECONDS

    def _read(self, run: RunningProgram, descriptor: int) -> None:
        """Read from a pipe of a program, and end the program if its output exceeds a limit."""
        if descriptor == run.process.pidfd:  # only signals the end of the process
            return
        try:
            chunk = os.read(descriptor, _CHUNK)
        except BlockingIOError:
            return
        except OSError:  # the socket of a process that ended with unread data
            chunk = b""
        if not chunk:
            self._forget(descriptor)
            run.pipes_open.discard(descriptor)
            return
        had_begun = run.began_at is not None
        now = time.monotonic()
        run.take(descriptor, chunk, now)
        if run.began_at is not None and not had_begun:
            run.next_sample = run.began_at + _SAMPLE_SECONDS
            run.add_times(observe.processor_times(observe.descendants(run.process.pid)), now)  # delays count from here
        if run.limit_passed:
            self._kill(run, "output_limit", f"more than {run.limit_passed} bytes of output")

    def _forget(self, descriptor: int) -> None:
        if self.by_descriptor.pop(descriptor, None) is not None:
            self.poll.unregister(descriptor)

    def _enforce(self) -> None:
        """Check wall-clock time at every turn, and what a program's whole tree uses at intervals."""
        now = time.monotonic()
        if self.runs and now >= self.next_alive:
            self.next_alive = now + _ALIVE_SECONDS
            self.channel.send({"alive": True})
        for run in self.runs.values():
            if run.ended_by is not None:
                continue
            began = run.began_at is not None
            if began and now >= min(run.next_sample, self._must_end(run)):
                self._check_usage(run, run.program.limits)
            is_late = began and now >= self._must_end(run)
            if is_late and run.is_starved and observe.is_runnable(run.process.pid):
                run.not_before = now + _SAMPLE_SECONDS  # it waits for a processor, which counts when the wait ends
            if now >= self._must_end(run):
                # A program that never began is a failure of the sandbox and has no status.
                limit = f"more than {run.program.limits.wall_seconds:g} seconds"
                self._kill(run, "timeout" if began else None, limit)

    def _check_usage(self, run: RunningProgram, limits: Limits) -> None:
        usage = observe.usage(run.process.pid, limits.memory_bytes, self.isolation.scratch)
        run.add_times(usage.times, time.monotonic())
        is_tree = usage.processes > 2 + self.isolation.own_tasks
        run.next_sample = time.monotonic() + (_TREE_SAMPLE_SECONDS if is_tree else _SAMPLE_SECONDS)
        files = limits.file_bytes // _BYTES_PER_FILE
        if usage.held_bytes > limits.memory_bytes:
            self._kill(run, "memory", f"more than {limits.memory_bytes} bytes of memory")
        elif run.cpu_seconds > math.ceil(limits.cpu_seconds):
            self._kill(run, "timeout", processor_limit(limits))
        elif usage.tasks > limits.processes + self.isolation.own_tasks + 1:
            self._kill(run, "runtime_error", f"more than {limits.processes} processes and threads")
        elif usage.scratch_files > files:
            self._kill(run, "runtime_error", f"more than {files} files in the scratch directory")

    def _kill(self, run: RunningProgram, status: Status | None, reason: str) -> None:
        """Kill the program's process group. With namespaces the kernel also ends all other processes in them."""
        if run.ended_by is None:
            run.ended_by, run.reason = status, reason
        if run.process.pid in self.runs:
            self._kill_group(run.process.pid)

    def _kill_group(self, pid: int) -> None:
        """Kill a child that has not been reaped, and its group, which it makes a moment after its start."""
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)

    def _reap(self, wait_seconds: float = 0.0) -> None:
        """Collect every child that ended: programs, and their descendants that this process adopted."""
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
            if ended.si_pid in self.runs:
                self._kill_group(ended.si_pid)  # before its process id can be used again
            _, status = os.waitpid(ended.si_pid, 0)
            self._kill_orphans()  # this process has adopted its children
            if (run := self.runs.pop(ended.si_pid, None)) is not None:
                self._finish(run, os.waitstatus_to_exitcode(status))

    def _finish(self, run: RunningProgram, exit_code: int) -> None:
        if run in self.prepared:
            self.prepared.remove(run)
        self._drain(run)
        for descriptor in run.process.descriptors:
            self._forget(descriptor)
            os.close(descriptor)
        self.free.append(run.user)
        answer = run.answer(exit_code, time.monotonic())
        self.channel.send(answer)
        if run.job.group is not None and "done" in answer and answer["outcome"]["status"] in run.job.stops:
            self._stop_group(run.job.group)

    def _drain(self, run: RunningProgram) -> None:
        """Read what an ended program left in its pipes, without waiting for other processes that hold them."""
        for descriptor in tuple(run.pipes_open):
            while descriptor in run.pipes_open and not run.limit_passed:
                before = run.received
                self._read(run, descriptor)
                if run.received == before:
                    break

    def _kill_orphans(self) -> None:
        """Kill adopted children: descendants of programs that left their group and lost their parent."""
        for child in _children():
            if child not in self.runs:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)


def _children() -> list[int]:
    with open(f"/proc/self/task/{os.getpid()}/children", "rb") as children:
        return list(map(int, children.read().split()))


def _fork_guarded() -> None:
    """Return in a child process only. This process kills what the child leaves when it ends, and ends with it.

    SIGTERM kills the child at once.
    """
    kernel.adopt_orphans()
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
            for child in _children():
                os.kill(child, signal.SIGKILL)
            os.wait()
    os._exit(exit_code if exit_code >= 0 else 128 - exit_code)


def _raise_descriptor_limit(workers: int) -> None:
    """Allow this process as many descriptors as it may have; raise `OSError` if these are too few for the workers."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    needed = _OWN_DESCRIPTORS + 2 * workers * len(Process._fields)
    if limit != resource.RLIM_INFINITY and limit < needed:
        raise OSError(errno.EMFILE, f"{os.strerror(errno.EMFILE)}: {limit} are allowed, the server needs {needed}")


def main(tier: str, workers: int, python: str | None, packages: Sequence[str] = ()) -> None:
    """Entry point of the server process. Standard input is the socket to the client."""
    sys.setrecursionlimit(500)  # limits the nesting of returned JSON to what every client can parse
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if the trainer ignores it, the server would collect no child
    _fork_guarded()
    channel = Channel(socket.socket(fileno=os.dup(0)))
    try:
        _raise_descriptor_limit(workers)
        if not observe.available():
            raise SandboxError(
                "The kernel does not list a process's children (CONFIG_PROC_CHILDREN), but the limits of a tree of "
                "processes need it. Use a remote sandbox."
            )
        interpreter = find_interpreter(python)
        if os.geteuid() == 0:
            interpreter = public_copy(interpreter)
        chosen = find_packages(packages, python)
        if os.geteuid() == 0:
            chosen = public_packages(chosen)
        isolation = ISOLATIONS[tier](interpreter, compiled_driver(interpreter), chosen)
        users, claims = accounts.claim(2 * workers) if os.geteuid() == 0 else ([None] * 2 * workers, [])
    except (SandboxError, OSError) as error:
        channel.send({"refused": str(error)})
        channel.flush()
        return
    kernel.adopt_orphans()
    note = "" if observe.measures_run_delay() else ", wall-clock limits include waits for a processor"
    description = f"{isolation.description}, Python {interpreter.version}{note}"
    ready = {"description": description, "modules": sorted(isolation.modules), "pid": os.getpid()}
    channel.send({"ready": ready})
    channel.flush()
    Server(channel, isolation, workers, users).serve()
    for claim in claims:
        claim.close()
