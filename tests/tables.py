"""Tables of cases, which lie in data files beside their tests."""

import json
from pathlib import Path
from typing import Any

import yaml


def tables_of(test: str) -> dict[str, Any]:
    """Tables of the file `test_NAME.py`, given by its `__file__`: what `cases/NAME.yaml` beside it contains."""
    path = Path(test)
    file = path.parent / "cases" / f"{path.stem.removeprefix('test_')}.yaml"
    return yaml.safe_load(file.read_text("utf-8"))


def rows_of(test: str, name: str) -> list[Any]:
    """Rows of `cases/NAME.jsonl` beside a test, given by its `__file__`."""
    lines = (Path(test).parent / "cases" / f"{name}.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines]
