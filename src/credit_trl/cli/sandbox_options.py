"""Sandbox options of commands that may run model-written programs."""

from __future__ import annotations

import argparse


def add_sandbox_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--sandbox`, `--allow_unsandboxed` and `--sandbox_packages`."""
    group = parser.add_argument_group("sandbox, for tasks that run model-written programs")
    group.add_argument(
        "--sandbox", help="auto (default: the first available), bubblewrap, landlock, or the address of a remote one"
    )
    group.add_argument(
        "--allow_unsandboxed", action="store_true", help="if no sandbox is available, run unprotected, with a warning"
    )
    group.add_argument(
        "--sandbox_packages", nargs="+", metavar="NAME", help="installed packages that programs may import, as numpy"
    )
