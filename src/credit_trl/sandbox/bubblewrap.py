"""Isolation by namespaces, made with bubblewrap.

A program has its own user, process, IPC, network, UTS, cgroup and mount namespace. It sees the interpreter and the
system's shared libraries read-only, three devices, and a scratch directory in memory. It has no /proc, no /etc, no
home, no network interface but a loopback that is down, and no process but its own.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Collection, Iterable, Iterator

from credit_trl.sandbox import seccomp
from credit_trl.sandbox.interpreter import Interpreter, loaders, package_directories
from credit_trl.sandbox.launch import Isolation, sealed_file
from credit_trl.sandbox.protocol import Program, SandboxError

_SYSTEM_LIBRARIES = ("/usr/lib", "/usr/lib32", "/usr/lib64", "/lib", "/lib64")
_DEVICES = ("/dev/null", "/dev/random", "/dev/urandom")  # /dev/zero, mapped, is uncounted shared memory
_INSTALL = "Install it: `apt-get install bubblewrap` (Debian, Ubuntu) or `dnf install bubblewrap` (Fedora)."


class Bubblewrap(Isolation):
    """See `Isolation`."""

    own_tasks = 1  # the reaper, process 1 of the namespace

    def __init__(self, interpreter: Interpreter, driver: bytes) -> None:
        super().__init__(interpreter, driver)
        path = shutil.which("bwrap", path="/usr/local/bin:/usr/bin:/bin")
        if path is None:
            raise SandboxError(f"bubblewrap (bwrap) is not installed. {_INSTALL}")
        seccomp.require_supported()
        version = _version(path)
        number = ".".join(map(str, version))
        if version < (0, 5):
            raise SandboxError(f"{path} is version {number}, 0.5 or newer is needed. {_INSTALL}")
        self.description = f"bubblewrap {number}"
        self.scratch = "/tmp" if version >= (0, 7) else None  # older versions cannot limit the size of a tmpfs
        self.counts_own_users = tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) >= (5, 14)
        self._filter = seccomp.namespace_filter()
        self._namespaces = [path, *_namespaces()]
        for name, value in interpreter.environment:
            self._namespaces += ["--setenv", name, value]
        self._mounts = [*_mounts(interpreter), "--remount-ro", "/", "--seccomp", "5"]

    def command(self, program: Program) -> tuple[list[str], dict[str, str]]:
        scratch: list[str] = []
        if self.scratch is not None:
            size = str(program.limits.file_bytes)
            scratch = ["--size", size, "--tmpfs", self.scratch, "--chdir", self.scratch]
        # /dev/stdin is a link into /proc, which does not exist here, so programs get a file instead.
        mounts = [*scratch, "--ro-bind-data", "6", "/dev/stdin", *self._mounts]
        return [*self._namespaces, *mounts, *self._command], {}

    def descriptors(self, program: Program) -> list[int]:
        read_end, write_end = os.pipe()
        os.write(write_end, self._filter)  # a few KiB: fits a pipe
        os.close(write_end)
        return [read_end, sealed_file(program.stdin.encode("utf-8", "replace"))]

    def enter(self) -> None:
        """Does nothing: bubblewrap restricts the process itself."""


def _namespaces() -> list[str]:
    kinds = ("user", "pid", "ipc", "net", "uts", "cgroup-try")
    return [
        *(f"--unshare-{kind}" for kind in kinds),
        *("--uid", "65534", "--gid", "65534", "--hostname", "sandbox", "--cap-drop", "ALL"),
        *("--clearenv", "--die-with-parent", "--new-session"),
    ]


def _mounts(interpreter: Interpreter) -> list[str]:
    """Arguments that bind the interpreter and the directories of its shared libraries read-only.

    Directories of installed packages and of executables in them are covered by an empty one.
    """
    arguments: list[str] = []
    for directory in _SYSTEM_LIBRARIES:
        if os.path.islink(directory):
            arguments += ["--symlink", os.readlink(directory), directory]
    needed = [os.path.join(os.path.realpath(folder), name) for folder, name in map(os.path.split, loaders())]
    needed += map(os.path.realpath, interpreter.paths)
    system = tuple(directory + "/" for directory in _SYSTEM_LIBRARIES if not os.path.islink(directory))
    libraries = (os.path.dirname(path) for path in map(os.path.realpath, interpreter.libraries))
    bound = _outermost(directory for directory in libraries if f"{directory}/".startswith(system))
    arguments += itertools.chain.from_iterable(("--ro-bind", path, path) for path in bound)
    for executables in itertools.chain.from_iterable(_executables(directory, needed) for directory in bound):
        is_file = os.path.isfile(executables)
        cover = ["--ro-bind", "/dev/null"] if is_file else ["--tmpfs", executables, "--remount-ro"]
        arguments += [*cover, executables]
    links = tuple(directory + "/" for directory in _SYSTEM_LIBRARIES if os.path.islink(directory))
    for path in dict.fromkeys((*needed, *interpreter.paths)):
        if not path.startswith(links) and not any(path.startswith(directory + "/") for directory in bound):
            arguments += ["--ro-bind", path, path]
            bound.append(path)
    for packages in package_directories(bound):
        arguments += ["--tmpfs", packages, "--remount-ro", packages]
    for device in _DEVICES:
        arguments += ["--dev-bind", device, device]
    return arguments


def _outermost(directories: Iterable[str]) -> list[str]:
    """The directories that are not inside another one of them."""
    found = sorted(set(directories))
    return [path for path in found if not any(path.startswith(other + "/") for other in found)]


def _executables(libraries: str, needed: Collection[str]) -> Iterator[str]:
    """Executables below a directory of libraries, or their directories if the interpreter needs nothing in these."""
    for directory, inside, names in os.walk(libraries):
        if directory in needed:
            inside.clear()
            continue
        paths = (os.path.join(directory, name) for name in names if ".so" not in name)
        executables = [path for path in paths if _is_executable(path)]
        if any(path.startswith(directory + "/") for path in needed):
            yield from executables
        elif executables:
            inside.clear()
            yield directory


def _is_executable(path: str) -> bool:
    mode = os.lstat(path).st_mode
    return stat.S_ISREG(mode) and mode & 0o111 != 0


def _version(path: str) -> tuple[int, ...]:
    answer = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    return tuple(int(part) for part in re.findall(r"\d+", answer)[:3]) or (0,)
