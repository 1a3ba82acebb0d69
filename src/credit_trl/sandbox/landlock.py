"""Isolation by Landlock and seccomp, for machines that offer no namespaces.

A program may read the interpreter's library and the system's shared libraries, and execute the interpreter. It can
open no other file, list no other directory and write nothing. Landlock does not hide names: `stat` shows whether a
path exists, and packages installed inside a library can be listed, though not read. The seccomp filter restricts
signals, processes, sockets and file attributes.
"""

import ctypes
import fcntl
import os
import struct
from collections.abc import Collection

from credit_trl.sandbox import kernel, seccomp
from credit_trl.sandbox.interpreter import Interpreter, loaders, package_directories
from credit_trl.sandbox.launch import DEVICES, Isolation
from credit_trl.sandbox.protocol import SandboxError

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_QUERY_VERSION, _RULE_PATH_BENEATH = 1, 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
# Number of file rights by version: 13, then also REFER (2), TRUNCATE (3), IOCTL_DEV (5).
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
_NETWORK_RIGHTS = 0b11  # bind and connect TCP, from version 4
_SCOPES = 0b11  # abstract Unix sockets and signals, from version 6

_READABLE = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/etc/ld.so.cache")


def version() -> int:
    """The kernel's Landlock version, 0 if it has none or does not enable it."""
    try:
        return kernel.syscall(_CREATE_RULESET, None, 0, _QUERY_VERSION)
    except OSError:
        return 0


def _create_ruleset(abi: int) -> int:
    """Ruleset that handles every right that the kernel knows, so all that no rule grants is refused."""
    attributes = struct.pack("<Q", (1 << _FILE_RIGHTS[min(abi, 5)]) - 1)
    if abi >= 4:
        attributes += struct.pack("<Q", _NETWORK_RIGHTS)
    if abi >= 6:
        attributes += struct.pack("<Q", _SCOPES)
    descriptor = kernel.syscall(_CREATE_RULESET, ctypes.c_char_p(attributes), len(attributes), 0)
    # Out of the way of the low numbers that a program's own descriptors are moved to.
    ruleset = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 64)
    os.close(descriptor)
    return ruleset


class Landlock(Isolation):
    """See `Isolation`. Each program applies the same ruleset after its fork."""

    def __init__(self, interpreter: Interpreter) -> None:
        super().__init__(interpreter)
        abi = version()
        if not abi:
            raise SandboxError(
                "The kernel offers no Landlock. It needs Linux 5.13 or newer with `landlock` among its security "
                "modules (kernel parameter lsm=landlock,...), and a container runtime that lets its calls through."
            )
        self.description = f"Landlock version {abi} and seccomp"
        self._filter = seccomp.program_filter(truncation_mediated=abi >= 3)
        self._ruleset = _create_ruleset(abi)
        system = [path for path in _READABLE if os.path.exists(path)]
        hidden = package_directories(map(os.path.realpath, (*system, *interpreter.paths)))
        for path in dict.fromkeys(map(os.path.realpath, (*interpreter.paths, *system))):
            self._grant_reading(path, hidden)
        for path in (interpreter.executable, *loaders()):  # a loader starts the interpreter
            self._grant(path, _READ_FILE | _EXECUTE)
        for path in DEVICES:
            self._grant(path, _READ_FILE | _WRITE_FILE)

    def _grant_reading(self, path: str, hidden: Collection[str]) -> None:
        """Grant a file, or a directory: entry by entry if it has hidden parts, as a rule covers all that is below."""
        if not os.path.isdir(path):
            self._grant(path, _READ_FILE)
        elif not any(path_within.startswith(path + "/") for path_within in hidden):
            self._grant(path, _READ_FILE | _READ_DIR)
        else:
            self._grant(path, _READ_DIR)
            for entry in os.scandir(path):
                if entry.path not in hidden and not entry.is_symlink():  # the target needs its own grant
                    self._grant_reading(entry.path, hidden)

    def _grant(self, path: str, rights: int) -> None:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            rule = struct.pack("<Qi", rights, descriptor)
            kernel.syscall(_ADD_RULE, self._ruleset, _RULE_PATH_BENEATH, ctypes.c_char_p(rule), 0)
        finally:
            os.close(descriptor)

    def enter(self) -> None:
        kernel.prctl(kernel.NO_NEW_PRIVILEGES, 1)
        kernel.syscall(_RESTRICT_SELF, self._ruleset, 0)
        kernel.install_seccomp(seccomp.with_process_id(self._filter, os.getpid()))
