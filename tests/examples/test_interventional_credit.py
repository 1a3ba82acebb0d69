"""`examples/interventional_credit.py` at a small size."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from credit_trl.lab.analysis.interventional import Branching, estimate, smoothed_rate

SCRIPT = Path(__file__).parents[2] / "examples" / "interventional_credit.py"
SMALL = (
    "--questions 8 --epochs 1 --steps 2 --noisy_steps 2 --prompts 3 --positions 1 --candidates 2 --samples 2".split()
)


@pytest.fixture
def call(monkeypatch, tmp_path):
    """Run the script for one seed and return its output files."""

    def run(*options: str) -> dict[str, dict]:
        line = [str(SCRIPT), "--output_dir", str(tmp_path), "--seeds", "0", *SMALL, *options]
        monkeypatch.setattr(sys, "argv", line)
        runpy.run_path(str(SCRIPT), run_name="__main__")
        return {path.stem: json.loads(path.read_text("utf-8")) for path in tmp_path.rglob("*.json")}

    return run


def test_students_that_fail_the_gate_are_not_measured(call, capsys):
    first = call("--pieces", "1")
    assert "measured-base" in first
    assert "student-exact" not in first
    assert "seed 0, base: 3 prefixes" in capsys.readouterr().out
    done = call()  # after two steps the student fails the gate
    assert done["measured-base"] == first["measured-base"]
    assert done["student-exact"]["passed"] is False
    assert "measured-exact" not in done
    assert "separates verdicts by under 1 nats: not measured" in capsys.readouterr().out
    result = done["result"]
    assert result["seeds"]["0"]["student-exact"]["separation"] < result["settings"]["gate"] == 1.0
    assert {row["student"] for row in result["over_seeds"] if row["seeds"]} == {"base"}


def test_intervals_over_seeds_skip_missing_values():
    over_seeds = runpy.run_path(str(SCRIPT))["over_seeds"]
    values = [0.5, 0.7, 0.9]
    got = over_seeds([*values, None, float("nan")])
    assert got["mean"] == pytest.approx(0.7)
    assert got["standard_error"] == pytest.approx(np.std(values, ddof=1) / 3**0.5)
    assert got["interval"] == pytest.approx([0.7 - 4.302653 * 0.1154701, 0.7 + 4.302653 * 0.1154701], rel=1e-5)
    assert over_seeds([0.5]) == {"mean": 0.5, "standard_error": None, "interval": None}


def test_gap_to_theory_is_zero_for_rewards_of_equation_34():
    module = runpy.run_path(str(SCRIPT))
    successes, noise = np.array([2, 30, 14]), 0.2
    expected = noise + (1 - 2 * noise) * smoothed_rate(successes, 32)
    before = noise + (1 - 2 * noise) * smoothed_rate(np.array(30), 64)
    rewards = torch.from_numpy(np.log(expected) - np.log(before))
    credit = estimate(Branching((), (0, 1, 2), rewards, rewards, rewards), successes, 32, 30, 64)
    assert module["gaps"]([credit], noise, "right")["gap_to_theory"] == pytest.approx(0.0, abs=1e-12)
    assert module["gaps"]([credit], 0.0, "right")["gap_to_theory"] > 0.1
    exact = Branching((), (0, 1, 2), torch.from_numpy(credit.credit), rewards, rewards)
    assert module["gaps"]([estimate(exact, successes, 32, 30, 64)], 0.0, "right")["gap"] == pytest.approx(0.0)
