"""Where a companion command runs model-written programs, for tasks that have such."""

from __future__ import annotations

import argparse

from credit_trl.sandbox import choose_sandbox


def add_sandbox_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("where model-written programs run, for tasks that have such")
    group.add_argument(
        "--sandbox", help="auto (default: the first that holds), bubblewrap, landlock, or the address of a remote one"
    )
    group.add_argument(
        "--allow_unsandboxed", action="store_true", help="run them unprotected where no sandbox holds, with a warning"
    )


def apply_sandbox_arguments(args: argparse.Namespace) -> None:
    """Make the choice for this process and those that it starts.

    Raises:
        ValueError: `--sandbox` is neither a tier nor an address.
    """
    choose_sandbox(args.sandbox, args.allow_unsandboxed)
