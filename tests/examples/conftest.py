"""Fixtures of the tests of scripts in `examples/`: their modules, imported as the scripts import them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def study():
    """A function that imports a module of `examples/study` by name."""
    yield from _imports(EXAMPLES / "study")


@pytest.fixture(scope="module")
def smollm():
    """A function that imports a module of `examples/smollm` by name."""
    yield from _imports(EXAMPLES / "smollm")


def _imports(folder: Path) -> Iterator:
    """Import from a folder. All of its modules are unloaded after the tests of a file."""
    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    yield lambda name: __import__(name, fromlist=["_"])
    sys.path.remove(str(folder))
    for name in set(sys.modules) - before:
        if str(folder) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
