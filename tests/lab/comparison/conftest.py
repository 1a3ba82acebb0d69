"""Fixture that writes run directories with given scores."""

from __future__ import annotations

import pytest

from synthetic_runs import writer


@pytest.fixture
def write_run(tmp_path):
    """A function that writes one run directory below `tmp_path / "runs"`."""
    return writer(tmp_path / "runs")
