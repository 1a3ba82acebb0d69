"""Start of a program: its descriptors, its user, its isolation, then a fresh interpreter.

Runs in the server, which has one thread and little memory, so that a fork is cheap and never copies the trainer.
"""

from __future__ import annotations

import contextlib
import fcntl
import marshal
import math
import os
import random
import resource
import signal
import socket
from importlib.resources import files

from credit_trl.sandbox import kernel
from credit_trl.sandbox.cgroups import MemoryGroup
from credit_trl.sandbox.interpreter import Interpreter
from credit_trl.sandbox.protocol import MIB, Limits, Program, SandboxError

_USERS = range(60800, 61184)  # not allocated by Debian, Fedora or systemd
OWN_TASKS = 1  # of an isolation: bubblewrap has a reaper, process 1 of the namespace
DEVICES = ("/dev/null", "/dev/random", "/dev/urandom")  # /dev/zero, mapped, is uncounted shared memory
_FILE_BYTES = 16 * MIB  # of a file that an unprotected program writes; others write none
_SIGNALS = 256  # queued signals and timers, which hold memory of the kernel
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL

# Options of a fresh interpreter: isolated, without site-packages, UTF-8 in every locale; then its code.
_FRESH = ("-I", "-S", "-X", "utf8", "-c")
# Executes the driver's bytecode at the start of descriptor 3. To compile its text for every program would take a third
# of the time that an interpreter takes to start.
_BOOT = "import marshal; request = open(3, 'rb'); exec(marshal.load(request), {'REQUEST': request})"


class Isolation:
    """Base class of the tiers' isolation. A server has one object, which it uses for every program.

    Attributes:
        description: the tier's name and version.
        counts_own_users: whether the kernel counts the processes of a program apart from all others, so that
            `RLIMIT_NPROC` limits them alone.
    """

    description: str
    counts_own_users = False

    def __init__(self, interpreter: Interpreter) -> None:
        driver = files(__package__).joinpath("driver.py").read_text(encoding="utf-8")
        # Programs have the interpreter of this process, so they can read its bytecode.
        self.driver = marshal.dumps(compile(driver, "<driver>", "exec", dont_inherit=True, optimize=2))
        self._command = [interpreter.executable, *_FRESH, _BOOT]
        self._environment = interpreter.environment

    def command(self, program: Program) -> tuple[list[str], dict[str, str]]:
        """Argument vector and environment of the program's process."""
        return self._command, self._environment

    def descriptors(self, program: Program) -> list[int]:
        """Descriptors that the command expects from number 5 on. The caller closes them."""
        return []

    def enter(self) -> None:
        """Restrict the new process, if the command does not. Called as the program's user, just before the command."""


class Unprotected(Isolation):
    """Resource limits and an empty environment only, and an unprivileged user if the server is root."""

    description = "unprotected"

    def enter(self) -> None:
        kernel.no_new_privileges()


def claim_users(count: int) -> dict[int, socket.socket]:
    """Claim free unprivileged user ids for the programs of a server that is root.

    Returns by id the socket that holds the claim until it is closed. An id needs no entry in the password file. Each
    is claimed by binding an abstract Unix socket, which the kernel releases when the server ends in any way. Two
    trainers in a network namespace thus never share an id: a program could otherwise signal the other's programs, or
    use up their process limit. Containers with networks of their own do not see each other's claims, so ids are tried
    from a random one on.
    """
    claims: dict[int, socket.socket] = {}
    start = random.randrange(len(_USERS))
    for number in (*_USERS[start:], *_USERS[:start]):
        if len(claims) == count:
            break
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            claim.bind(f"\0credit-trl-sandbox-user-{number}")
        except OSError:
            claim.close()
            continue
        claims[number] = claim
    if len(claims) < count:
        raise SandboxError(
            f"Only {len(claims)} of {count} user ids ({_USERS.start} to {_USERS.stop - 1}) are free for programs: "
            "other sandboxes on this machine have the rest. Close them, or open this one with fewer workers."
        )
    return claims


def start(
    isolation: Isolation, program: Program, user: int | None, group: MemoryGroup | None
) -> tuple[int, list[int]]:
    """Start a process for a program, as `user` if that is not `None`, which needs root, and in a control group.

    Returns its id, and the ends of the pipes for its standard output, standard error and report.
    """
    ours: list[int] = []
    inherited: list[int] = []

    def add_pipe() -> None:
        read_end, write_end = os.pipe()
        os.set_blocking(read_end, False)
        ours.append(read_end)
        inherited.append(write_end)

    try:
        inherited.append(sealed_file(program.stdin.encode("utf-8", "replace")))
        add_pipe()
        add_pipe()
        inherited.append(sealed_file(_request(isolation, program, user is not None)))
        add_pipe()
        inherited += isolation.descriptors(program)
        pid = os.fork()
        if pid == 0:
            _become_program(isolation, program, inherited, user, group)
        return pid, ours
    except BaseException:
        for descriptor in ours:
            os.close(descriptor)
        raise
    finally:
        for descriptor in inherited:
            os.close(descriptor)


def _become_program(
    isolation: Isolation, program: Program, inherited: list[int], user: int | None, group: MemoryGroup | None
) -> None:
    """Turn the forked process into the program's. Never returns; an error goes to standard error without a report."""
    try:
        os.setsid()
        server = os.getppid()
        high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 64) for descriptor in inherited]
        for number, descriptor in enumerate(high):
            os.dup2(descriptor, number, inheritable=True)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        for ignored in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD):  # else they stay ignored
            signal.signal(ignored, signal.SIG_DFL)
        if group is not None:
            group.enter()  # needs the server's user
        os.umask(0o077)
        os.chdir("/")
        if user is not None:
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
        kernel.die_with_parent(signal.SIGKILL)  # after the change of user, which clears it
        if os.getppid() != server:
            os._exit(127)
        isolation.enter()
        command, environment = isolation.command(program)
        os.execve(command[0], command, environment)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.write(2, f"{type(error).__name__}: {error}".encode())
    finally:
        os._exit(127)


def sealed_file(content: bytes) -> int:
    """A memory file with this content that cannot be changed, positioned at its start."""
    descriptor = os.memfd_create("request", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    return descriptor


def _request(isolation: Isolation, program: Program, has_own_user: bool) -> bytes:
    limits = resource_limits(program.limits, isolation, has_own_user)
    arguments = program.arguments if program.arguments is not None else "[]"
    call = (program.prelude, program.source, program.fn_name, arguments)
    return isolation.driver + marshal.dumps((limits, *call))


def resource_limits(limits: Limits, isolation: Isolation, has_own_user: bool) -> list[tuple[int, int, int]]:
    """Arguments of the driver's `setrlimit` calls, (resource, soft, hard), at most this process's own hard limits."""
    seconds = math.ceil(limits.cpu_seconds)
    wanted = [
        (resource.RLIMIT_CPU, seconds, seconds + 1),  # SIGXCPU, then SIGKILL
        (resource.RLIMIT_AS, limits.memory_bytes, limits.memory_bytes),
        (resource.RLIMIT_FSIZE, _FILE_BYTES, _FILE_BYTES),
        (resource.RLIMIT_NOFILE, limits.open_files, limits.open_files),
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_SIGPENDING, _SIGNALS, _SIGNALS),
    ]
    if isolation.counts_own_users or has_own_user:
        tasks = limits.processes + OWN_TASKS
        wanted.append((resource.RLIMIT_NPROC, tasks, tasks))
    bounded = []
    for kind, *values in wanted:
        ceiling = resource.getrlimit(kind)[1] % (1 << 64)  # "infinity" is -1
        bounded.append((kind, *(min(value, ceiling) for value in values)))
    return bounded
