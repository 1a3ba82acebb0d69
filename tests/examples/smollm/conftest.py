"""Fixture of the tests of `examples/smollm`: its modules, imported as its scripts import them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "examples" / "smollm"


@pytest.fixture(scope="module")
def example():
    """A function that imports a module of the folder by name. All are unloaded after the tests of a file."""
    before = set(sys.modules)
    sys.path.insert(0, str(FOLDER))
    yield lambda name: __import__(name, fromlist=["_"])
    sys.path.remove(str(FOLDER))
    for name in set(sys.modules) - before:
        if str(FOLDER) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
