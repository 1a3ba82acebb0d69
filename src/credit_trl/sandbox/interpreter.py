"""The interpreter that runs the programs: where its files lie, and a copy where other users cannot read them."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass

from credit_trl.sandbox.protocol import SandboxError

# Read by root only where the interpreter lies in a directory closed to others, such as /root.
COPIES = "/var/cache/credit-trl"

# Where installers put packages, this project with its tasks' tests and solutions among them.
_PACKAGES = ("site-packages", "dist-packages")

# Extension modules whose own shared libraries (libssl, libffi, libsqlite3, ...) a program may need.
_QUERY = """
import json, os, sys, sysconfig
for name in ("_bz2", "_ctypes", "_decimal", "_hashlib", "_lzma", "_sqlite3", "_ssl", "_uuid", "zlib"):
    try:
        __import__(name)
    except ImportError:
        pass
libraries = set()
with open("/proc/self/maps") as maps:
    for line in maps:
        path = line[line.find("/"):].rstrip() if "/" in line else ""
        if ".so" in path and os.path.exists(path):
            libraries.add(path)
executable = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
print(json.dumps({
    "executable": executable,
    "stdlib": sorted({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}),
    "libraries": sorted(libraries),
    "version": sys.version.split()[0],
}))
"""


@dataclass(frozen=True)
class Interpreter:
    """What it takes to run an interpreter.

    Args:
        executable: real path of the interpreter, outside any virtual environment.
        stdlib: directories of the standard library.
        libraries: shared libraries that it and its extension modules map.
        version: e.g. `"3.11.7"`.
        environment: variables that it needs to start.
        home: a directory that holds all of it that the system's library directories do not, if there is one.
    """

    executable: str
    stdlib: tuple[str, ...]
    libraries: tuple[str, ...]
    version: str
    environment: tuple[tuple[str, str], ...] = ()
    home: str | None = None

    @property
    def paths(self) -> tuple[str, ...]:
        """Files and directories that it reads."""
        own = (self.home,) if self.home else (*self.stdlib, self.executable)
        real = (path for library in self.libraries for path in dict.fromkeys((library, os.path.realpath(library))))
        return (*own, *real)


def find_interpreter(python: str | None = None) -> Interpreter:
    """Ask an interpreter (default: the one that runs this process) where its files lie.

    Raises:
        SandboxError: it does not start.
    """
    asked = python or sys.executable
    path = os.environ.get("LD_LIBRARY_PATH")
    environment: dict[str, str] = {}
    query = _query(asked, environment)
    if query.returncode and path:  # some installations find their own libraries only by this variable
        environment = {"LD_LIBRARY_PATH": path}
        query = _query(asked, environment)
    if query.returncode:
        raise SandboxError(f"The interpreter {asked} does not start: {query.stderr.strip()[-500:]}")
    answer = json.loads(query.stdout)
    return Interpreter(
        executable=answer["executable"],
        stdlib=tuple(answer["stdlib"]),
        libraries=tuple(answer["libraries"]),
        version=answer["version"],
        environment=tuple(environment.items()),
    )


def _query(executable: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            [executable, "-I", "-S", "-c", _QUERY],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=environment,
            check=False,
        )
    except OSError as error:
        return subprocess.CompletedProcess([executable], 127, "", str(error))


def package_directories(directories: Iterable[str]) -> list[str]:
    """Where packages are installed in these directories or one level below them: no program may read there.

    Many interpreters keep `site-packages` inside the standard library (python.org's images, conda, uv).
    """
    found = set()
    for directory in directories:
        root = os.path.realpath(directory)
        for kind in _PACKAGES:
            for below in ("", "*"):
                for path in glob.glob(os.path.join(glob.escape(directory), below, kind)):
                    real = os.path.realpath(path)
                    if os.path.isdir(real) and real.startswith(root + "/"):
                        found.add(directory + real[len(root) :])
    return [path for path in sorted(found) if not any(path.startswith(other + "/") for other in found)]


def readable_by_others(path: str) -> bool:
    """Whether any user may read this file or directory: read permission on it, search permission on the way."""
    path = os.path.realpath(path)
    if not os.stat(path).st_mode & 0o004:
        return False
    while path != "/":
        path = os.path.dirname(path)
        if not os.stat(path).st_mode & 0o001:
            return False
    return True


def public_copy(interpreter: Interpreter) -> Interpreter:
    """The interpreter itself where every user can read it, else a copy of it that they can, made once by root.

    Programs run as a user without rights, who cannot enter root's home; interpreters installed there (pyenv, uv) are
    copied to `COPIES`: executable, standard library without its tests, private shared libraries.

    Raises:
        SandboxError: the copy cannot be made.
    """
    private = [library for library in interpreter.libraries if not readable_by_others(library)]
    if not private and all(readable_by_others(path) for path in (interpreter.executable, *interpreter.stdlib)):
        return interpreter
    stamp = f"{interpreter.executable}\n{os.stat(interpreter.executable).st_mtime_ns}\n{interpreter.stdlib}"
    digest = hashlib.sha256(stamp.encode()).hexdigest()[:12]
    home = os.path.join(COPIES, f"python-{interpreter.version}-{digest}")
    try:
        if not os.path.isdir(home):
            _copy(interpreter, private, home)
        if os.stat(home).st_uid != os.geteuid():
            raise SandboxError(f"{home} belongs to another user; remove it.")
    except OSError as error:
        raise SandboxError(
            f"Programs run as an unprivileged user, who cannot read the interpreter {interpreter.executable}, and it "
            f"cannot be copied to {COPIES} ({error}). Pass python= an interpreter that every user can read, for "
            "example /usr/bin/python3."
        ) from error
    version = "python" + ".".join(interpreter.version.split(".")[:2])
    copies = tuple(os.path.join(home, "lib", os.path.basename(library)) for library in private)
    shared = tuple(library for library in interpreter.libraries if library not in private)
    return Interpreter(
        executable=os.path.join(home, "bin", version),
        stdlib=(os.path.join(home, "lib", version),),
        libraries=(*(copy for copy in copies if os.path.exists(copy)), *shared),
        version=interpreter.version,
        environment=(("LD_LIBRARY_PATH", _joined(os.path.join(home, "lib"), interpreter.environment)),),
        home=home,
    )


def _joined(directory: str, environment: tuple[tuple[str, str], ...]) -> str:
    return os.pathsep.join([directory, *(value for name, value in environment if name == "LD_LIBRARY_PATH")])


def _copy(interpreter: Interpreter, private: list[str], home: str) -> None:
    os.makedirs(COPIES, mode=0o755, exist_ok=True)
    os.chmod(COPIES, 0o755)
    version = "python" + ".".join(interpreter.version.split(".")[:2])
    ignored = shutil.ignore_patterns("test", "tests", "idlelib", "ensurepip", *_PACKAGES, "config-*", "tkinter")
    building = tempfile.mkdtemp(dir=COPIES)
    try:
        os.chmod(building, 0o755)
        os.mkdir(os.path.join(building, "bin"))
        shutil.copy2(interpreter.executable, os.path.join(building, "bin", version))
        for directory in interpreter.stdlib:
            shutil.copytree(
                directory, os.path.join(building, "lib", version), ignore=ignored, dirs_exist_ok=True, symlinks=False
            )
        for library in private:
            if not any(library.startswith(directory + "/") for directory in interpreter.stdlib):
                shutil.copy2(library, os.path.join(building, "lib", os.path.basename(library)))
        os.rename(building, home)
    except OSError:
        shutil.rmtree(building, ignore_errors=True)
        if not os.path.isdir(home):  # another process may have finished the same copy first
            raise
