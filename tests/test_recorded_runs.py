"""Training gives the results that version 0.1.0 recorded."""

from __future__ import annotations

import json

import pytest

import recorded_runs

RECORDED = json.loads((recorded_runs.RECORDED / "runs.json").read_text())
SAME_MACHINE = recorded_runs.machine() == RECORDED["machine"]


def assert_same(result: dict, recorded: dict) -> None:
    """Bit for bit on the kind of machine that recorded; elsewhere sums may be ordered otherwise."""
    if SAME_MACHINE:
        assert result == recorded
    for name in ("loss", "grad_norm"):
        assert result[name] == pytest.approx(recorded[name], rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("name", recorded_runs.CASES)
def test_run_equals_the_recorded_run(name, tmp_path):
    assert_same(recorded_runs.run(name, tmp_path), RECORDED["runs"][name])
