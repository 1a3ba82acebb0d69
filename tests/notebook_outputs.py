"""Outputs of a notebook, and their comparison with those of another run."""

import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
NUMBER = re.compile(r"[-+−]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
# Seconds and times: the end of a line of the log, its summary, and the time of a warning.
TIMED = re.compile(r"seconds verdict.*|train[ _]runtime.*?(?=train[ _]loss)|\d+-\d+-\d+T[\d:+.]+|(?<=steps in )\d+ s")
TIMED_COLUMNS = ("seconds a step", "ratio")


def code_of(notebook) -> list:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def shown(notebook, kind: str) -> int:
    """How many outputs have this media type."""
    return sum(kind in output.get("data", {}) for cell in code_of(notebook) for output in cell.get("outputs", []))


def printed(notebook) -> str:
    """All text that the cells print or show."""
    return "\n".join("\n".join(lines_of(cell)) for cell in code_of(notebook))


def lines_of(cell) -> list[str]:
    """Lines that a cell prints or shows, and the media type of what is no text."""
    texts = []
    for output in cell.get("outputs", []):
        data = output.get("data", {})
        media = " ".join(name for name in ("text/html", "image/png") if name in data)
        texts.append(output.get("text") or data.get("text/markdown") or media or data.get("text/plain") or "")
    return [line.rstrip() for line in "\n".join(texts).splitlines() if line.strip()]


def without_times(lines: list[str]) -> list[str]:
    """Lines without what depends on the machine's speed, in tables too."""
    columns: list[int] = []
    timeless = []
    for line in lines:
        cells = line.split(" | ")
        if not line.startswith("|"):
            columns = []
        elif not columns:
            columns = [number for number, cell in enumerate(cells) if cell in TIMED_COLUMNS]
        cells = [cell for number, cell in enumerate(cells) if number not in columns]
        timeless.append(TIMED.sub("…", " | ".join(cells)))
    return timeless


def differences(committed, executed) -> list[str]:
    """Lines of the committed outputs that another run does not print, each with the line in its place.

    Words and counts are equal. Other numbers agree to a quarter and .1, since processors round differently.
    """
    different = []
    for cell, again in zip(code_of(committed), code_of(executed), strict=False):
        expected, lines = without_times(lines_of(cell)), without_times(lines_of(again))
        if len(expected) != len(lines):
            different.append(f"{len(expected)} lines: {expected}\n{len(lines)} lines: {lines}")
        for old, new in zip(expected, lines, strict=False):
            if not agree(old, new):
                different.append(f"{old}\n{new}")
    return different


def agree(old: str, new: str) -> bool:
    """Whether two lines have the same words and close numbers."""
    if [text.strip() for text in NUMBER.split(old)] != [text.strip() for text in NUMBER.split(new)]:
        return False
    for left, right in zip(NUMBER.findall(old), NUMBER.findall(new), strict=True):
        is_count = left.isdigit() and right.isdigit()
        if is_count and left != right:
            return False
        numbers = [float(text.replace("−", "-")) for text in (left, right)]
        if numbers[0] != pytest.approx(numbers[1], rel=0.25, abs=0.1):
            return False
    return True
