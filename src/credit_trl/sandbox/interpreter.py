"""Interpreter of the programs, that of this process: its files, and a copy that unprivileged users can read."""

import contextlib
import glob
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from credit_trl.sandbox.protocol import SandboxError

# Used if the server is root and the interpreter is in a directory closed to others, such as /root.
COPIES = "/var/cache/credit-trl"

# Directories of installed packages, among them this project with the tests and solutions of its tasks.
_PACKAGES = ("site-packages", "dist-packages")

# Imports extension modules whose shared libraries (libssl, libffi, libsqlite3, ...) a program may need, and loads that
# of the C library's threads.
_QUERY = """
import json, os, sys, sysconfig
for name in (
    *("_bz2", "_crypt", "_ctypes", "_curses", "_curses_panel", "_dbm", "_decimal", "_gdbm", "_hashlib", "_lzma"),
    *("_sqlite3", "_ssl", "_uuid", "readline", "zlib"),
):
    try:
        __import__(name)
    except ImportError:
        pass
try:
    __import__("ctypes").CDLL("libgcc_s.so.1")
except (ImportError, OSError):
    pass
libraries = set()
with open("/proc/self/maps") as maps:
    for line in maps:
        path = line[line.find("/"):].rstrip() if "/" in line else ""
        if ".so" in path and os.path.exists(path):
            libraries.add(path)
executable = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
stdlib = sorted({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")})
print(json.dumps([executable, stdlib, sorted(libraries), sys.version.split()[0]]))
"""


@dataclass(frozen=True)
class Interpreter:
    """Files and environment of an interpreter."""

    executable: str  # its real path, outside of any virtual environment
    stdlib: tuple[str, ...]
    libraries: tuple[str, ...]  # real paths of the shared libraries that it and its extension modules map
    version: str  # e.g. "3.11.7"
    environment: dict[str, str]

    @property
    def paths(self) -> list[str]:
        """Files and directories that it reads."""
        return [*self.stdlib, self.executable, *self.libraries]


def find_interpreter() -> Interpreter:
    """Find the files of this process's interpreter."""
    path = os.environ.get("LD_LIBRARY_PATH")
    # Some installations find their own libraries only by this variable.
    for environment in ({}, {"LD_LIBRARY_PATH": path}) if path else ({},):
        query = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _QUERY], capture_output=True, text=True, env=environment, check=False
        )
        if query.returncode == 0:
            executable, stdlib, libraries, version = json.loads(query.stdout)
            return Interpreter(executable, tuple(stdlib), tuple(libraries), version, environment)
    raise SandboxError(f"The interpreter {sys.executable} does not start: {query.stderr.strip()[-500:]}")


def package_directories(directories: Iterable[str]) -> list[str]:
    """Directories of installed packages in these directories or one level below, which no program may read.

    Many interpreters have `site-packages` inside of the standard library (python.org's images, conda, uv).
    """
    real_directories = set()
    for directory in directories:
        root = os.path.realpath(directory)
        for kind in _PACKAGES:
            for below in ("", "*"):
                for path in glob.glob(os.path.join(glob.escape(directory), below, kind)):
                    real = os.path.realpath(path)
                    if os.path.isdir(real) and real.startswith(root + "/"):
                        real_directories.add(directory + real[len(root) :])
    outermost: list[str] = []
    for path in sorted(real_directories):
        if not path.startswith(tuple(f"{parent}/" for parent in outermost)):
            outermost.append(path)
    return outermost


def loaders() -> list[str]:
    """Paths of the system's dynamic loaders, by the names that executables have for them."""
    return [*glob.glob("/lib*/ld-linux*.so.*"), *glob.glob("/lib/ld-musl*")]


def readable_by_others(path: str) -> bool:
    """Whether every user may read this file or directory and search all directories above it."""
    real = Path(path).resolve()
    return bool(real.stat().st_mode & 0o004) and all(folder.stat().st_mode & 0o001 for folder in real.parents)


def public_copy(interpreter: Interpreter) -> Interpreter:
    """The interpreter if every user can read it, else a copy in `COPIES` that they can, made once by root.

    Programs of a server that is root run as an unprivileged user, who cannot enter root's home, where pyenv and uv
    install interpreters. The copy has the executable, the standard library without tests, and private libraries.
    """
    private = [library for library in interpreter.libraries if not readable_by_others(library)]
    if not private and all(map(readable_by_others, (interpreter.executable, *interpreter.stdlib))):
        return interpreter
    stamp = f"{interpreter.executable}\n{os.stat(interpreter.executable).st_mtime_ns}\n{interpreter.stdlib}"
    home = os.path.join(COPIES, f"python-{interpreter.version}-{hashlib.sha256(stamp.encode()).hexdigest()[:12]}")
    name = os.path.basename(interpreter.stdlib[0])  # such as python3.11
    try:
        if not os.path.isdir(home):
            _copy(interpreter, private, home, name)
    except OSError as error:
        raise SandboxError(
            f"Programs run as an unprivileged user, who cannot read the interpreter {interpreter.executable}, and it "
            f"cannot be copied to {COPIES} ({error}). Use an interpreter that every user can read, for example "
            "/usr/bin/python3."
        ) from error
    lib = os.path.join(home, "lib")
    copies = (os.path.join(lib, os.path.basename(library)) for library in private)
    shared = (library for library in interpreter.libraries if library not in private)
    return replace(
        interpreter,
        executable=os.path.join(home, "bin", name),
        stdlib=(os.path.join(lib, name),),
        libraries=(*filter(os.path.exists, copies), *shared),
        environment={"LD_LIBRARY_PATH": os.pathsep.join([lib, *interpreter.environment.values()])},
    )


def _copy(interpreter: Interpreter, private: list[str], home: str, name: str) -> None:
    """Copy the interpreter to a new directory, which is then renamed to `home`, so that `home` is complete."""
    ignored = shutil.ignore_patterns("test", "tests", "idlelib", "ensurepip", *_PACKAGES, "config-*", "tkinter")
    os.makedirs(COPIES, mode=0o755, exist_ok=True)
    os.chmod(COPIES, 0o755)
    with tempfile.TemporaryDirectory(dir=COPIES) as building:
        copy = os.path.join(building, "copy")
        os.makedirs(os.path.join(copy, "bin"))
        shutil.copy2(interpreter.executable, os.path.join(copy, "bin", name))
        for directory in interpreter.stdlib:
            shutil.copytree(directory, os.path.join(copy, "lib", name), ignore=ignored, dirs_exist_ok=True)
        for library in private:
            shutil.copy2(library, os.path.join(copy, "lib", os.path.basename(library)))
        with contextlib.suppress(FileExistsError):  # another process has made the same copy first
            os.rename(copy, home)
