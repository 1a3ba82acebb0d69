"""The guard of counts and ratios."""

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import bench

from tables import tables_of


def test_counts_equal_the_committed_baselines():
    """Tokens that an update reads do not depend on the machine."""
    assert bench.counts() == json.loads(bench.BASELINES.read_text())["counts"]


@pytest.mark.parametrize(("measured", "tolerance", "worse"), tables_of(__file__)["compared"])
def test_a_value_above_its_baseline_and_tolerance_is_worse(measured, tolerance, worse):
    assert bench.compare(measured, {"tokens": 100, "ratio": 0.6}, tolerance) == worse
