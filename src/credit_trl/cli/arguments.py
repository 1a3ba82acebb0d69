"""Arguments and types of arguments that several commands share."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from credit_trl.training.run_directory import RUN_FILE


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
        if (value := int(text)) < minimum:
            raise argparse.ArgumentTypeError(f"must be at least {minimum}, got {value}")
        return value

    parse.__name__ = "whole number"  # in argparse's error for other text
    return parse


def read_options(path: str | Path) -> dict[str, Any]:
    """Options of a YAML or JSON file, or of the run that a `run.json` describes.

    Raises:
        ValueError: the file has another form, or sets an option twice, of which YAML would ignore the first.
    """
    load = json.loads if Path(path).suffix == ".json" else _load_yaml  # YAML reads JSON's 1e-05 as text
    try:
        content = load(Path(path).read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text file in UTF-8: {error}") from error
    except yaml.YAMLError as error:
        backslash = "\nA path with backslashes needs single quotes, or none." if "escape" in str(error) else ""
        raise ValueError(f"{path} is not YAML: {error}{backslash}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if isinstance(content, dict) and Path(path).name == RUN_FILE:
        content = content.get("config")
    if not isinstance(content, dict):
        raise ValueError(f"{path} must contain a YAML mapping, `option: value` on each line.")
    return content


def _load_yaml(text: str) -> Any:
    """Content of a YAML file."""
    node, content = yaml.compose(text, yaml.SafeLoader), yaml.safe_load(text)
    if isinstance(content, dict):
        names = [key.value for key, _ in node.value]
        if repeated := next((name for name in content if names.count(name) > 1), None):
            raise ValueError(f"`{repeated}` is set twice. Remove one, of which YAML would ignore the first.")
    return content


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
