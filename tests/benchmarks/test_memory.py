"""Peak memory of one update beside TRL's SDPO, measured from outside the process."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from measure import in_turns, trials
from updates import build
from workload import Workload


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"tail": "renormalize"}, {"padding": "packed", "topk": 20}], ids=str)
def test_an_update_takes_a_small_share_of_sdpos_memory(monkeypatch, changes):
    for name in ("MMAP", "TRIM"):  # freed memory goes back at once, so that a peak is that of live bytes
        monkeypatch.setenv(f"MALLOC_{name}_THRESHOLD_", "65536")
    kinds = {"credit": ("credit", Workload().with_(**changes)), "sdpo": ("sdpo", Workload())}
    with trials(build, kinds) as running:
        in_turns(running, 1, {"completion": 64})
        peaks = {name: trial.ask({"completion": 512}).peak_mb for name, trial in running.items()}
    assert peaks["credit"] <= 0.12 * peaks["sdpo"], peaks
