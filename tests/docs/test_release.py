"""The version stands in one place, and the changelog is what a release needs."""

import re
import tomllib
from datetime import date

from pages import ROOT

SECTIONS = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text("utf-8"), flags=re.MULTILINE)[1:]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]


def test_topmost_section_has_the_version_and_its_date():
    version, _, day = SECTIONS[0].splitlines()[0].partition(" - ")
    assert version == VERSION
    assert day == "unreleased" or date.fromisoformat(day)


def test_version_is_written_in_pyproject_alone():
    files = [ROOT / "CITATION.cff", *(ROOT / "src").rglob("*.py"), *(ROOT / "skills").rglob("*.md")]
    assert [file.name for file in files if VERSION in file.read_text("utf-8")] == []


def test_a_version_is_a_dozen_lines_and_one_table():
    for section in SECTIONS:
        lines = section.splitlines()
        assert sum(line.startswith("- ") for line in lines) <= 12, lines[0]
        assert sum(line.startswith("| ---") for line in lines) <= 1, lines[0]
        assert max(map(len, lines)) <= 180, lines[0]
