"""Tier two: Landlock, for machines where no namespaces can be had.

A program may read the interpreter's library and the system's shared libraries and execute the interpreter, and
nothing else: no other file opens, no directory lists, nothing can be written. Landlock does not hide names: `stat`
tells whether a path exists, and packages installed inside a library can be listed, though not read. Signals,
processes, sockets and file attributes are the seccomp filter's part.
"""

from __future__ import annotations

import ctypes
import fcntl
import glob
import os
import struct
from collections.abc import Collection, Iterable

from credit_trl.sandbox import kernel, seccomp
from credit_trl.sandbox.interpreter import Interpreter, package_directories
from credit_trl.sandbox.launch import interpreter_command
from credit_trl.sandbox.protocol import Program, SandboxError

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_QUERY_VERSION, _RULE_PATH_BENEATH = 1, 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
# Number of file rights by version: 13, then REFER (2), TRUNCATE (3), IOCTL_DEV (5).
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
_NETWORK_RIGHTS = 0b11  # bind and connect TCP, from version 4
_SCOPES = 0b11  # abstract Unix sockets and signals, from version 6

_READABLE = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/etc/ld.so.cache")
_DEVICES = ("/dev/null", "/dev/random", "/dev/urandom")  # /dev/zero, mapped, is uncounted shared memory


def version() -> int:
    """The kernel's Landlock version, 0 where it has none or it is not among the enabled security modules."""
    try:
        return kernel.syscall(_CREATE_RULESET, None, 0, _QUERY_VERSION)
    except OSError:
        return 0


class Ruleset:
    """A Landlock ruleset that grants reading `readable` (files and directories) and executing `executable`.

    What lies in `hidden` (real paths of directories) stays unreadable also inside of a readable directory.

    It handles every right that the kernel knows, so what no rule grants is refused. One ruleset serves any number of
    processes: each calls `restrict_self` after its fork.

    Raises:
        OSError: the kernel has no Landlock, or a path does not exist.
    """

    def __init__(
        self,
        readable: Iterable[str],
        executable: Iterable[str],
        devices: Iterable[str] = (),
        hidden: Collection[str] = (),
    ) -> None:
        abi = version()
        attributes = struct.pack("<Q", (1 << _FILE_RIGHTS[min(abi, 5)]) - 1 if abi else 0)
        if abi >= 4:
            attributes += struct.pack("<Q", _NETWORK_RIGHTS)
        if abi >= 6:
            attributes += struct.pack("<Q", _SCOPES)
        descriptor = kernel.syscall(_CREATE_RULESET, ctypes.c_char_p(attributes), len(attributes), 0)
        # Out of the way of the low numbers that a program's own descriptors are moved to.
        self.descriptor = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 64)
        os.close(descriptor)
        for path in dict.fromkeys(map(os.path.realpath, readable)):
            self._grant_reading(path, hidden)
        for path in executable:
            self._grant(path, _READ_FILE | _EXECUTE)
        for path in devices:
            self._grant(path, _READ_FILE | _WRITE_FILE)

    def _grant_reading(self, path: str, hidden: Collection[str]) -> None:
        """A rule holds for all that is below its directory, so one with hidden parts is granted entry by entry."""
        if not os.path.isdir(path):
            self._grant(path, _READ_FILE)
        elif not any(inside.startswith(path + "/") for inside in hidden):
            self._grant(path, _READ_FILE | _READ_DIR)
        else:
            self._grant(path, _READ_DIR)
            for entry in os.scandir(path):
                if entry.path not in hidden and not entry.is_symlink():  # a link's target needs a grant of its own
                    self._grant_reading(entry.path, hidden)

    def _grant(self, path: str, rights: int) -> None:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            rule = struct.pack("<Qi", rights, descriptor)
            kernel.syscall(_ADD_RULE, self.descriptor, _RULE_PATH_BENEATH, ctypes.c_char_p(rule), 0)
        finally:
            os.close(descriptor)

    def restrict_self(self) -> None:
        """Apply the rules to the calling process, for good. Needs no new privileges."""
        kernel.syscall(_RESTRICT_SELF, self.descriptor, 0)


class LandlockWalls:
    """See `credit_trl.sandbox.launch.Walls`.

    Raises:
        SandboxError: the kernel lacks Landlock or seccomp filters, or the table does not know this architecture.
    """

    own_tasks = 0
    counts_own_users = False
    scratch = None

    def __init__(self, interpreter: Interpreter, driver: bytes) -> None:
        self.driver = driver
        self.version = version()
        if not self.version:
            raise SandboxError(
                "The kernel offers no Landlock. It needs Linux 5.13 or newer with `landlock` among its security "
                "modules (kernel parameter lsm=landlock,...), and a container runtime that lets its calls through."
            )
        if not seccomp.supported():
            raise SandboxError("The system call filter knows x86_64 and aarch64 only. Use a remote sandbox (url=...).")
        self._filter = seccomp.landlock_filter(truncation_mediated=self.version >= 3)
        system = [path for path in _READABLE if os.path.exists(path)]
        self._ruleset = Ruleset(
            readable=[*interpreter.paths, *system],
            executable=[interpreter.executable, *_loaders()],
            devices=_DEVICES,
            hidden=package_directories(map(os.path.realpath, (*system, *interpreter.paths, *interpreter.stdlib))),
        )
        self._command = interpreter_command(interpreter)
        self._environment = dict(interpreter.environment)

    def command(self, program: Program) -> tuple[list[str], dict[str, str]]:
        return self._command, self._environment

    def descriptors(self, program: Program) -> list[int]:
        return []

    def enter(self) -> None:
        kernel.no_new_privileges()
        self._ruleset.restrict_self()
        kernel.install_seccomp(seccomp.with_process_id(self._filter, os.getpid()))


def _loaders() -> list[str]:
    """The dynamic loaders, which the kernel executes on the interpreter's behalf."""
    return [path for path in glob.glob("/lib*/ld-linux*.so.*") + glob.glob("/lib/ld-musl*") if os.path.exists(path)]
