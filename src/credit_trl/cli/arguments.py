"""Arguments that `credit-eval` and `credit-map` share, and types of arguments."""

from __future__ import annotations

import argparse
import json


def json_object(text: str) -> dict[str, object]:
    """Argument type of a JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON ({error}): {text!r}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'a JSON object such as {{"key": "value"}}, not {text!r}')
    return value


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add RUN, what replaces its parts, and the sandbox."""
    parser.add_argument("run", nargs="?", metavar="RUN", help="run directory, whose model, data and verifier are used")
    parser.add_argument("--model", metavar="NAME", help="hub name or directory, or quickstart")
    parser.add_argument("--task", metavar="NAME", help="such as sciknoweval:chemistry, my_package.task:Task")
    parser.add_argument("--split", metavar="NAME", default="test", help="split of the task's data (default test)")
    parser.add_argument("--path", metavar="PATH", help="local data file or folder")
    group = parser.add_argument_group("sandbox, for tasks that run model-written programs")
    group.add_argument(
        "--sandbox", metavar="NAME", help="auto (default), bubblewrap, landlock, or the address of a remote one"
    )
    group.add_argument("--allow_unsandboxed", action="store_true", help="without a sandbox, run unprotected")
