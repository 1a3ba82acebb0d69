"""Types of arguments, and arguments that several commands share."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable


def json_object(text: str) -> dict[str, object]:
    """Argument type of a JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON ({error}): {text!r}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'a JSON object such as {{"key": "value"}}, not {text!r}')
    return value


def at_least(minimum: int) -> Callable[[str], int]:
    """Argument type of a whole number from `minimum`."""

    def parse(text: str) -> int:
        value = int(text)
        if value < minimum:
            raise argparse.ArgumentTypeError(f"must be at least {minimum}, got {value}")
        return value

    parse.__name__ = "whole number"  # in argparse's error for other text
    return parse


def add_sandbox_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--sandbox` and `--allow_unsandboxed`."""
    group = parser.add_argument_group("sandbox, for tasks that run model-written programs")
    group.add_argument(
        "--sandbox", metavar="NAME", help="auto (default), bubblewrap, landlock, or the address of a remote one"
    )
    group.add_argument("--allow_unsandboxed", action="store_true", help="without a sandbox, run unprotected")
