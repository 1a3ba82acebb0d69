"""Bait for escaping programs, and the check of an escape: what it read, changed, reached, or left behind."""

import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from escape import PRELUDE, Escape

import credit_trl
from credit_trl.sandbox import Limits, Program
from credit_trl.sandbox.observe import descendants
from credit_trl.sandbox.pool import PoolSandbox

GOOD = Program("a, b = map(int, input().split())\nprint(a + b)", stdin="20 22")
WRONG = Program("a, b = map(int, input().split())\nprint(a - b)", stdin="20 22")
# Needs most of its processor time, and more wall-clock time than it has if others keep the processors.
DEMANDING = Program(
    "import time\nwhile time.process_time() < 0.6: pass\nprint(42)", limits=Limits(cpu_seconds=1, wall_seconds=1)
)
CALL = Program(
    "class Solution:\n    def add(self, a, b):\n        return [a + b]", fn_name="add", arguments="[20, 22]"
)


@dataclass
class Bait:
    """Files, sockets and a process that only the sandbox protects.

    Every file mode is open and, if `user` is given, everything belongs to the user that the programs run as.
    """

    user: int | None = None
    token: str = field(default_factory=lambda: "token-" + secrets.token_hex(8))
    expected: str = field(default_factory=lambda: "expected-" + secrets.token_hex(8))

    def __enter__(self) -> Self:
        os.environ[self.token.upper().replace("-", "_")] = self.token
        self.directory = tempfile.mkdtemp(prefix="credit-trl-bait-")
        self.secret = self._file("secret", self.token)
        self.writable = os.path.join(self.directory, "writable")
        os.mkdir(self.writable)
        self._file("writable/log", "log")
        self._file("expected_output.json", self.token)
        os.chmod(self.writable, 0o777)
        os.chmod(self.directory, 0o777)
        self.path = os.path.join(self.directory, "socket")
        self.abstract = "credit-trl-bait-" + secrets.token_hex(4)
        self.listeners = [
            self._listen(socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)),
            self._listen(socket.AF_UNIX, socket.SOCK_STREAM, "\0" + self.abstract),
            self._listen(socket.AF_UNIX, socket.SOCK_STREAM, self.path),
            self._listen(socket.AF_UNIX, socket.SOCK_DGRAM, self.path + ".datagram"),
        ]
        self.port = self.listeners[0].getsockname()[1]
        self.listeners.append(self._listen(socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", self.port)))
        for path in (self.path, self.path + ".datagram"):
            os.chmod(path, 0o777)
        if self.user is not None:
            for path in (Path(self.directory), *Path(self.directory).rglob("*")):
                os.chown(path, self.user, -1)
        self.victim = subprocess.Popen(["sleep", "600"], user=self.user)
        return self

    def _file(self, name: str, text: str) -> str:
        path = os.path.join(self.directory, name)
        with open(path, "w") as file:
            file.write(text)
        os.chmod(path, 0o666)
        return path

    def _listen(self, family: int, kind: int, address: object) -> socket.socket:
        listener = socket.socket(family, kind)
        listener.bind(address)
        if kind == socket.SOCK_STREAM:
            listener.listen()
        listener.setblocking(False)
        return listener

    def __exit__(self, *exc: object) -> None:
        self.victim.kill()
        self.victim.wait()
        for listener in self.listeners:
            listener.close()
        shutil.rmtree(self.directory)
        del os.environ[self.token.upper().replace("-", "_")]

    def prelude(self, sandbox: PoolSandbox) -> str:
        """Prelude with all paths and addresses of the bait, which programs may know."""
        places = {"bait": self.directory, "secret": self.secret, "writable": self.writable, "socket": self.path}
        places["package"] = os.path.dirname(os.path.abspath(credit_trl.__file__))
        processes = {"trainer": os.getpid(), "server": sandbox.server_pid, "victim": self.victim.pid}
        return PRELUDE.format(port=self.port, abstract=self.abstract, **places, **processes)

    def state(self) -> list[tuple[object, ...]]:
        """Every name, mode, owner, time and content in the bait's directory."""
        state: list[tuple[object, ...]] = []
        for path in sorted(Path(self.directory).rglob("*")):
            status = path.lstat()
            content = path.read_text() if path.is_file() else ""
            state.append((path, status.st_mode, status.st_uid, status.st_mtime_ns, status.st_nlink, content))
        return state

    def reached(self) -> list[str]:
        """Names of the sockets that were connected or sent to."""
        names = []
        for listener in self.listeners:
            try:
                if listener.type == socket.SOCK_STREAM:
                    listener.accept()[0].close()
                else:
                    listener.recv(64)
            except BlockingIOError:
                continue
            names.append(f"{listener.family.name} {listener.type.name}")
        return names


def judge(sandbox: PoolSandbox, bait: Bait, escape: Escape) -> tuple[str, list[str]]:
    """Run one escape. Returns its status and the list of faults, empty if it failed to escape."""
    state_before, server = bait.state(), sandbox.server_pid
    started = time.monotonic()
    program_options = {"stdin": escape.stdin, "fn_name": escape.call, "limits": escape.limits}
    attempt = Program(escape.source, prelude=bait.prelude(sandbox), **program_options)
    outcome, *neighbours = sandbox.run([attempt, attempt, DEMANDING] if escape.beside else [attempt], deadline=60)
    took = outcome.seconds if escape.beside else time.monotonic() - started
    faults = [
        f"changed the outcome beside it: {neighbour}" for neighbour in neighbours[1:] if neighbour.stdout != "42\n"
    ]
    if outcome.status not in escape.statuses:
        faults.append(f"ended as {outcome.status} ({outcome.error[-300:]})")
    said = outcome.stdout + (outcome.value or "") + outcome.error
    faults += [line for line in outcome.stdout.splitlines() if line.startswith("ESCAPED")]
    if bait.token in said or bait.expected in said:
        faults.append("read a secret")
    if outcome.value is not None and outcome.value.replace(" ", "") != escape.value:
        faults.append(f"returned {outcome.value[:100]}")
    if bait.state() != state_before:
        faults.append("changed files")
    faults += [f"reached {name}" for name in bait.reached()]
    if bait.victim.poll() is not None:
        faults.append("killed another process")
    if sandbox.server_pid != server or not os.path.exists(f"/proc/{server}"):
        faults.append("killed the sandbox server")
    if took > escape.limits.wall_seconds + 30:  # waits for a processor do not count as wall-clock time
        faults.append(f"ran for {took:.1f} s")
    faults += _left_behind(sandbox)
    faults += next_verdicts(sandbox)
    return outcome.status, faults


def next_verdicts(sandbox: PoolSandbox) -> list[str]:
    """Faults in the outcomes of a right program, a wrong one, and a functional call."""
    good, wrong, call = sandbox.run([GOOD, WRONG, CALL], deadline=60)
    faults = []
    if (good.status, good.stdout, wrong.status, wrong.stdout) != ("ok", "42\n", "ok", "-2\n"):
        faults.append(f"changed the next outcome: {good} {wrong}")
    if (call.status, call.value) != ("ok", "[42]"):
        faults.append(f"changed the next call: {call}")
    return faults


def _left_behind(sandbox: PoolSandbox) -> list[str]:
    give_up = time.monotonic() + 60
    while True:
        remaining = [pid for pid in descendants(sandbox.server_pid) if pid != sandbox.server_pid]
        if not remaining:
            return []
        if time.monotonic() > give_up:
            return [f"left processes {remaining} behind"]
        time.sleep(0.01)
