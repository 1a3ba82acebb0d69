"""Fixtures of the study's tests: its modules, imported as its scripts import them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

STUDY = Path(__file__).parents[3] / "examples" / "study"


@pytest.fixture(scope="module")
def study():
    """A function that imports a module of the study by name. All are unloaded after the tests of a file."""
    before = set(sys.modules)
    sys.path.insert(0, str(STUDY))
    yield lambda name: __import__(name, fromlist=["_"])
    sys.path.remove(str(STUDY))
    for name in set(sys.modules) - before:
        if str(STUDY) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
