"""Sandbox options of commands that may run model-written programs."""

from __future__ import annotations

import argparse

from credit_trl.sandbox import choose_sandbox


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


def apply_sandbox_arguments(args: argparse.Namespace) -> None:
    """Select the sandbox for this process and its children."""
    choose_sandbox(args.sandbox, args.allow_unsandboxed, args.sandbox_packages)
