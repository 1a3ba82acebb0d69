"""The one reader of YAML and JSON files of options, with limits on depth, size and merged keys."""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from credit_trl.run_directory import RUN_FILE

MAX_DEPTH = 32  # nested mappings and lists
MAX_NODES = 20_000  # keys and values, those of aliases and merged mappings counted each time they are used
_TOO_DEEP = f"nested more than {MAX_DEPTH} levels deep, aliases expanded. Write options at the top level."


def read_options(path: str | Path) -> dict[str, Any]:
    """Options of a YAML or JSON file, or of the run that a `run.json` describes.

    Raises:
        ValueError: the file has another form, exceeds a limit, or sets an option twice, of which YAML would ignore
            the first.
    """
    load = json.loads if Path(path).suffix == ".json" else load_yaml  # YAML reads JSON's 1e-05 as text
    try:
        content = load(Path(path).read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text file in UTF-8 ({error}). Save it as UTF-8.") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f" (line {mark.line + 1})" if mark else ""
        problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
        advice = (
            "A path with backslashes needs single quotes, or none." if "escape" in problem else "Correct the line."
        )
        raise ValueError(f"{path} is not YAML of options: {problem}{place}. {advice}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from error
    if isinstance(content, dict) and Path(path).name == RUN_FILE:
        content = content.get("config")
    if not (isinstance(content, dict) and all(isinstance(name, str) for name in content)):
        raise ValueError(f"{path} must contain a YAML mapping, `option: value` on each line.")
    if not isinstance(content.get("env") or {}, dict):
        raise ValueError(f"{path}: `env` must be a mapping of names to values, got {content['env']!r}.")
    is_no = {name for name, value in content.items() if value is False and str(name).endswith("_strategy")}
    return content | dict.fromkeys(is_no, "no")  # which YAML reads as false


def load_yaml(text: str) -> Any:
    """Content of a YAML text.

    Raises:
        ValueError: it is nested too deeply, too large with its aliases expanded, or sets a key twice.
    """
    try:
        node = yaml.compose(text, yaml.SafeLoader)
        is_large = next(islice(_expanded_nodes(node), MAX_NODES, None), None) is not None
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    if is_large:
        raise ValueError(
            f"more than {MAX_NODES} keys and values, aliases expanded. Remove most: a file of options has few."
        )
    content = yaml.safe_load(text)
    if isinstance(content, dict):
        names = [key.value for key, _ in node.value]
        repeated = [name for name in content if names.count(name) > 1]
        if repeated:
            raise ValueError(f"`{repeated[0]}` is set twice. Remove one, of which YAML would ignore the first.")
    return content


def _expanded_nodes(node: yaml.Node | None, depth: int = 0) -> Iterator[yaml.Node]:
    """The nodes of a graph, those of an alias each time that it is used."""
    yield node
    if isinstance(node, yaml.CollectionNode):
        if depth > MAX_DEPTH:
            raise ValueError(_TOO_DEEP)
        for item in node.value:
            for child in item if isinstance(item, tuple) else [item]:  # a key with its value, or an element
                yield from _expanded_nodes(child, depth + 1)


def config_file(argv: list[str]) -> dict[str, Any]:
    """Contents of the YAML file that a command line names, or an empty mapping."""
    return read_options(argv[argv.index("--config") + 1]) if "--config" in argv[:-1] else {}
