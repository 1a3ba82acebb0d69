"""Tables of cases, which lie in data files beside their tests."""

import json
import re
from pathlib import Path
from typing import Any

import yaml

# What an error tells its reader to do.
_REMEDY = re.compile(
    r"\b(Add|All options|Change|Check|choose from|Correct|Define|Derive|Did you mean|Drop|expected|Give|Import"
    r"|Increase|Install|is needed|It is|Let|Load|Lower|must (be|contain|have|return)|Name|needs|Pass|please|Raise|Read"
    r"|Remove|Rename|requires at least|Restore|Return|Run|Save|Set|Should be one of|Store|take|unexpected"
    r"|Use|Wait|Write)\b",
    re.IGNORECASE,
)


def says_what_to_do(text: str) -> bool:
    """Whether an error is one line with a remedy."""
    return "\n" not in text.strip() and _REMEDY.search(text) is not None


def tables_of(test: str) -> dict[str, Any]:
    """Tables of the file `test_NAME.py`, given by its `__file__`: what `cases/NAME.yaml` beside it contains."""
    path = Path(test)
    file = path.parent / "cases" / f"{path.stem.removeprefix('test_')}.yaml"
    return yaml.safe_load(file.read_text("utf-8"))


def rows_of(test: str, name: str) -> list[Any]:
    """Rows of `cases/NAME.jsonl` beside a test, given by its `__file__`."""
    lines = (Path(test).parent / "cases" / f"{name}.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines]
