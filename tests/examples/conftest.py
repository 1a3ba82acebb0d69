"""Fixtures of the tests of `examples/`: modules of its folders, imported as the scripts import them."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def study() -> Iterator:
    yield from _imports(EXAMPLES / "study")


@pytest.fixture(scope="module")
def smollm() -> Iterator:
    yield from _imports(EXAMPLES / "smollm")


@pytest.fixture(scope="module")
def ifeval() -> Iterator:
    pytest.importorskip("if_verifiable", reason='needs IFEval\'s checkers: pip install "credit-trl[ifeval]"')
    yield from _imports(EXAMPLES / "ifeval")


def _imports(folder: Path) -> Iterator:
    """A function that imports a module of a folder by name. They are unloaded after the tests of a file."""
    modules_before = set(sys.modules)
    sys.path.insert(0, str(folder))
    yield lambda name: __import__(name, fromlist=["_"])
    sys.path.remove(str(folder))
    for name in set(sys.modules) - modules_before:
        if str(folder) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
