"""Installed packages that programs may import, chosen by name; all others stay hidden."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from credit_trl.sandbox import interpreter
from credit_trl.sandbox.protocol import SandboxError

# Prints the paths of each distribution's top-level files and directories, with an error for those without any.
_QUERY = """
import importlib.metadata as metadata, json, os, sys
found = {}
for name in sys.argv[1:]:
    try:
        files = metadata.files(name) or []
    except metadata.PackageNotFoundError:
        sys.exit(f"{name} is not installed")
    tops = {file.parts[0]: str(file.locate().parents[len(file.parts) - 1]) for file in files if ".." not in file.parts}
    found[name] = sorted(
        os.path.realpath(os.path.join(base, top)) for top, base in tops.items()
        if not top.endswith((".dist-info", ".egg-info", ".pth", ".pyc")) and top != "__pycache__"
    )
print(json.dumps(found))
"""
_PROJECT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))


class PackageError(SandboxError):
    """A package that programs may import cannot be given to them. No other tier is tried."""


@dataclass(frozen=True)
class Packages:
    """Installed distributions that programs may import, with the paths of their modules and libraries."""

    names: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()

    def modules(self, directory: str | None = None) -> dict[str, str]:
        """Paths by the name of the module, in `directory` if they are mounted there."""
        names = {path: os.path.basename(path).partition(".")[0] for path in self.paths if _is_module(path)}
        return {name: os.path.join(directory or os.path.dirname(p), os.path.basename(p)) for p, name in names.items()}


def _is_module(path: str) -> bool:
    if os.path.isdir(path):
        return os.path.isfile(os.path.join(path, "__init__.py"))
    return path.endswith((".py", ".so"))


def find_packages(names: Sequence[str], python: str | None = None) -> Packages:
    """Find installed distributions (`numpy`) in the environment of an interpreter, by default of this process.

    Raises:
        PackageError: one is not installed, has no modules of its own (as editable installs), or contains this project.
    """
    if not names:
        return Packages()
    asked = python or sys.executable
    query = subprocess.run([asked, "-I", "-c", _QUERY, *names], capture_output=True, text=True, check=False)
    if query.returncode:
        raise PackageError(f"Packages for programs, in the environment of {asked}: {query.stderr.strip()[-500:]}")
    found: dict[str, list[str]] = json.loads(query.stdout)
    for name, paths in found.items():
        if not any(map(_is_module, paths)):
            raise PackageError(f"Packages for programs: {name} has no modules in its environment's site-packages.")
        if any(os.path.commonpath((path, _PROJECT)) in (path, _PROJECT) for path in paths):
            raise PackageError(
                f"Packages for programs: {name} contains this project, whose files programs may not see."
            )
    return Packages(tuple(found), tuple(dict.fromkeys(path for paths in found.values() for path in paths)))


def public_packages(packages: Packages) -> Packages:
    """The packages if every user can read them, else a copy that they can, made once by root."""
    if all(map(interpreter.readable_by_others, packages.paths)):
        return packages
    stamp = "\n".join(f"{path} {os.stat(path).st_mtime_ns}" for path in packages.paths)
    home = os.path.join(interpreter.COPIES, f"packages-{hashlib.sha256(stamp.encode()).hexdigest()[:12]}")
    try:
        interpreter.make_copy(home, lambda empty: _copy_packages(packages.paths, empty))
    except OSError as error:
        raise PackageError(
            f"Programs run as an unprivileged user, who cannot read {packages.paths[0]}, and it cannot be copied to "
            f"{interpreter.COPIES} ({error})."
        ) from error
    copies = tuple(os.path.join(home, os.path.basename(path)) for path in packages.paths)
    return Packages(packages.names, copies)


def _copy_packages(paths: Sequence[str], home: str) -> None:
    for path in paths:
        target = os.path.join(home, os.path.basename(path))
        if os.path.isdir(path):
            shutil.copytree(path, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(path, target)
