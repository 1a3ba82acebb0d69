"""The benchmark of generation engines: its summary of logged metrics."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import engines


def log(rollout: float, ratio: float | None = None) -> dict[str, float]:
    row = {"loss": 1.0, "grad_norm": 2.0, "reward": 0.5, "processor_seconds": 3.0}
    row |= {"credit/seconds_rollout": rollout, "credit/seconds_update": 1.0}
    if ratio is not None:
        row |= {f"{engines.RATIO}/{part}": ratio for part in ("min", "mean", "max")}
        row |= {f"{engines.DIFFERENCE}/{part}": 0.01 for part in ("mean", "max")}
    return row


def test_seconds_are_medians_without_the_first_step():
    summary = engines.summarize([log(9.0), log(2.0), log(4.0), log(3.0)])
    assert summary["stages"] == {"rollout": 3.0, "update": 1.0}
    assert summary["seconds"] == 4.0
    assert "ratio" not in summary


def test_importance_ratio_covers_all_steps():
    summary = engines.summarize([log(1.0, 0.5), log(1.0, 1.5), log(1.0, 1.0)])
    assert summary["ratio"] == {"min": 0.5, "mean": 1.0, "max": 1.5}


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_importance_ratio_that_is_not_finite_is_an_error(value):
    with pytest.raises(ValueError, match=r"importance_sampling_ratio/min is \w+ at step 2: expected a finite number"):
        engines.summarize([log(1.0, 1.0), log(1.0, value)])
