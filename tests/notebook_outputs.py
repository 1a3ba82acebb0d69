"""Outputs of a notebook, and what each notebook has to print."""

import re
from pathlib import Path

import pytest

from tables import tables_of

FOLDER = Path(__file__).parents[1] / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
RESULTS = tables_of(__file__)["results"]


def code_of(notebook) -> list:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def shown(notebook, kind: str) -> int:
    """How many outputs have this media type."""
    return sum(kind in output.get("data", {}) for cell in code_of(notebook) for output in cell.get("outputs", []))


def printed(notebook) -> str:
    """All text that the cells print or show."""
    texts = []
    for output in (output for cell in code_of(notebook) for output in cell.get("outputs", [])):
        data = output.get("data", {})
        texts.append(output.get("text") or data.get("text/markdown") or data.get("text/plain") or "")
    return "\n".join(texts)


def assert_results(notebook, name: str) -> None:
    """The notebook prints what it printed when it was committed, up to its random numbers."""
    text = printed(notebook)
    expected = RESULTS[name]
    assert [part for part in expected.get("says", ()) if not re.search(part, text, re.M)] == []
    if "rises" in expected:
        start_value, end_value = map(float, re.search(expected["rises"], text, re.M | re.S).groups())
        assert end_value > start_value + 0.2
    if "equal" in expected:
        first_number, second_number = (float(re.search(pattern, text, re.M)[1]) for pattern in expected["equal"])
        assert first_number == pytest.approx(second_number, rel=0.2)
