"""Isolation by namespaces, made with bubblewrap.

A program has its own user, process, IPC, network, UTS, cgroup and mount namespace. It sees the interpreter and the
shared libraries that it uses read-only, and three devices. It has no /proc, no /etc, no home, no network interface but
a loopback that is down, and no process but its own.
"""

import os
import re
import shutil
import subprocess

from credit_trl.sandbox import seccomp
from credit_trl.sandbox.interpreter import Interpreter, loaders, package_directories
from credit_trl.sandbox.launch import DEVICES, Isolation, sealed_file
from credit_trl.sandbox.protocol import Program, SandboxError

_NAMESPACES = (
    *("--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"),
    *("--uid", "65534", "--gid", "65534", "--hostname", "sandbox", "--cap-drop", "ALL"),
    *("--clearenv", "--die-with-parent", "--new-session"),
)
_PROCESS_ID = 2  # of a program: the child of its namespace's first process
_SYSTEM_LIBRARIES = ("/usr/lib", "/usr/lib32", "/usr/lib64", "/lib", "/lib64")
_INSTALL = "Install it: `apt-get install bubblewrap` (Debian, Ubuntu) or `dnf install bubblewrap` (Fedora)."


class Bubblewrap(Isolation):
    """See `Isolation`."""

    def __init__(self, interpreter: Interpreter) -> None:
        super().__init__(interpreter)
        path = shutil.which("bwrap", path="/usr/local/bin:/usr/bin:/bin")
        if path is None:
            raise SandboxError(f"bubblewrap (bwrap) is not installed. {_INSTALL}")
        version = _version(path)
        number = ".".join(map(str, version))
        if version < (0, 5):
            raise SandboxError(f"{path} is version {number}, 0.5 or newer is needed. {_INSTALL}")
        self.description = f"bubblewrap {number}"
        self.counts_own_users = tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) >= (5, 14)
        self._filter = seccomp.with_process_id(seccomp.program_filter(), _PROCESS_ID)
        self._namespaces = [path, *_NAMESPACES]
        for name, value in interpreter.environment.items():
            self._namespaces += ["--setenv", name, value]
        self._mounts = [*_mounts(interpreter), "--remount-ro", "/", "--seccomp", "6"]

    def command(self, program: Program) -> tuple[list[str], dict[str, str]]:
        # /dev/stdin is a link into /proc, which does not exist here, so programs get a file instead.
        return [*self._namespaces, "--ro-bind-data", "7", "/dev/stdin", *self._mounts, *self._command], {}

    def descriptors(self, program: Program) -> list[int]:
        read_end, write_end = os.pipe()
        os.write(write_end, self._filter)  # a few KiB: fits a pipe
        os.close(write_end)
        return [read_end, sealed_file(program.stdin.encode("utf-8", "replace"))]


def _mounts(interpreter: Interpreter) -> list[str]:
    """Arguments that bind the interpreter and its shared libraries read-only, and make the links that name these.

    Directories of installed packages in the standard library are covered by an empty one.
    """
    arguments: list[str] = []
    for directory in _SYSTEM_LIBRARIES:
        if os.path.islink(directory):
            arguments += ["--symlink", os.readlink(directory), directory]
    linked = tuple(directory + "/" for directory in _SYSTEM_LIBRARIES if os.path.islink(directory))
    needed = [os.path.join(os.path.realpath(folder), name) for folder, name in map(os.path.split, loaders())]
    bound: list[str] = []
    for path in dict.fromkeys((*needed, *map(os.path.realpath, interpreter.paths), *interpreter.paths)):
        if not path.startswith(linked) and not any(path.startswith(directory + "/") for directory in bound):
            arguments += ["--ro-bind", path, path]
            bound.append(path)
    libraries = {path for path in interpreter.libraries if path in bound}
    for directory in sorted(set(map(os.path.dirname, libraries))):
        for link in (os.path.join(directory, name) for name in os.listdir(directory)):
            if link not in bound and os.path.islink(link) and os.path.realpath(link) in libraries:
                arguments += ["--symlink", os.path.realpath(link), link]
    for packages in package_directories(bound):
        arguments += ["--tmpfs", packages, "--remount-ro", packages]
    for device in DEVICES:
        arguments += ["--dev-bind", device, device]
    return arguments


def _version(path: str) -> tuple[int, ...]:
    answer = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    return tuple(int(part) for part in re.findall(r"\d+", answer)[:3]) or (0,)
