"""Start of a program: its descriptors, its user, its isolation, then a fresh interpreter.

Runs in the server, which has one thread and little memory, so that a fork is cheap and never copies the trainer.
"""

import contextlib
import fcntl
import marshal
import math
import os
import resource
import signal
from importlib.resources import files

from credit_trl.sandbox import kernel
from credit_trl.sandbox.cgroups import MemoryGroup
from credit_trl.sandbox.interpreter import Interpreter
from credit_trl.sandbox.protocol import MIB, Limits, Program

USER = 60800  # id of the programs of a server that is root; not allocated by Debian, Fedora or systemd
OWN_TASKS = 1  # of an isolation: bubblewrap has a reaper, process 1 of the namespace
DEVICES = ("/dev/null", "/dev/random", "/dev/urandom")  # /dev/zero, mapped, is uncounted shared memory
_FILE_BYTES = 16 * MIB  # of a file that an unprotected program writes; others write none
_STACK_BYTES = 64 << 20  # of cached functions that call each other 25,000 deep
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
        """Descriptors that the command expects from number 6 on. The caller closes them."""
        return []

    def enter(self) -> None:
        """Restrict the new process, if the command does not. Called as the program's user, just before the command."""


class Unprotected(Isolation):
    """Resource limits and an empty environment only, and an unprivileged user if the server is root."""

    description = "unprotected"

    def enter(self) -> None:
        kernel.prctl(kernel.NO_NEW_PRIVILEGES, 1)


def start(isolation: Isolation, program: Program, group: MemoryGroup | None) -> tuple[int, list[int]]:
    """Start a process for a program, in a control group if there is one; as `USER` if the server is root.

    Returns its id, and the ends of the pipes for its standard output, standard error, report and begin mark.
    """
    ours: list[int] = []
    inherited: list[int] = []
    call = (program.prelude, program.source, program.fn_name, program.arguments or "[]")
    request = isolation.driver + marshal.dumps((resource_limits(program.limits, isolation), *call))
    # Of the descriptors 0 to 5, those that are written to are pipes. The driver closes the last one first.
    contents = (program.stdin.encode("utf-8", "replace"), None, None, request, None, None)
    try:
        for content in contents:
            if content is not None:
                inherited.append(sealed_file(content))
                continue
            read_end, write_end = os.pipe()
            os.set_blocking(read_end, False)
            ours.append(read_end)
            inherited.append(write_end)
        inherited += isolation.descriptors(program)
        pid = os.fork()
        if pid == 0:
            _become_program(isolation, program, inherited, group)
        return pid, ours
    except BaseException:
        for descriptor in ours:
            os.close(descriptor)
        raise
    finally:
        for descriptor in inherited:
            os.close(descriptor)


def _become_program(isolation: Isolation, program: Program, inherited: list[int], group: MemoryGroup | None) -> None:
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
        if os.geteuid() == 0:
            os.setgroups([])
            os.setresgid(USER, USER, USER)
            os.setresuid(USER, USER, USER)
        kernel.prctl(kernel.DIE_WITH_PARENT, signal.SIGKILL)  # after the change of user, which clears it
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


def resource_limits(limits: Limits, isolation: Isolation) -> list[tuple[int, int, int]]:
    """Arguments of the driver's `setrlimit` calls, (resource, soft, hard), at most this process's own hard limits."""
    seconds = math.ceil(limits.cpu_seconds)
    limits_of_kind = [
        (resource.RLIMIT_CPU, seconds, seconds + 1),  # SIGXCPU, then SIGKILL
        (resource.RLIMIT_AS, limits.memory_bytes, limits.memory_bytes),
        (resource.RLIMIT_FSIZE, _FILE_BYTES, _FILE_BYTES),
        (resource.RLIMIT_NOFILE, limits.open_files, limits.open_files),
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_SIGPENDING, _SIGNALS, _SIGNALS),
    ]
    if isolation.counts_own_users:
        tasks = limits.processes + OWN_TASKS
        limits_of_kind.append((resource.RLIMIT_NPROC, tasks, tasks))
    bounded = []
    for kind, *values in limits_of_kind:
        ceiling = resource.getrlimit(kind)[1] % (1 << 64)  # "infinity" is -1
        bounded.append((kind, *(min(value, ceiling) for value in values)))
    stack = resource.getrlimit(resource.RLIMIT_STACK)[1]
    bounded.append((resource.RLIMIT_STACK, _STACK_BYTES if stack < 0 else min(_STACK_BYTES, stack), stack))
    return bounded
