"""The finite-time law of a branch against a tabular simulation with the real objective."""

from __future__ import annotations

import math

import pytest
import torch

from credit_trl.lab.analysis.drift import BranchDrift, holding_coef
from credit_trl.objective import credit_target

START, DELTA, S = -3.0, 0.7, 10.0
ARMS = [("subtract", 0.0), ("subtract", 0.05), ("subtract", 0.1), ("subtract", 0.5), ("guide", 0.2), ("guide", 1.0)]


def simulate(form: str, coef: float, rate: float, batches: int) -> list[float]:
    """Log-odds of a policy over two tokens that equals the normalised target after every generation batch."""
    raise_generic = torch.tensor([DELTA, 0.0], dtype=torch.float64)
    lower_specific = torch.tensor([S, 0.0], dtype=torch.float64)
    teacher = torch.tensor([START, 0.0], dtype=torch.float64)
    found = []
    for _ in range(batches):
        f = torch.log_softmax(teacher + raise_generic, -1)
        g = torch.log_softmax(teacher + raise_generic + lower_specific, -1)
        student = torch.log_softmax(credit_target(f, g, coef, form), -1)
        teacher = (1 - rate) * teacher + rate * student
        found.append((student[0] - student[1]).item())
    return found


@pytest.mark.parametrize(("form", "coef"), ARMS)
@pytest.mark.parametrize("rate", [0.0, 0.01, 0.05, 0.5])
def test_path_at_full_speed_equals_the_simulation(form, coef, rate):
    branch = BranchDrift(START, DELTA, S, coef, rate, form)
    assert branch.path([1.0] * 60) == pytest.approx(simulate(form, coef, rate, 60), abs=1e-9)


@pytest.mark.parametrize(("form", "coef"), ARMS)
@pytest.mark.parametrize("rate", [0.0, 0.01, 0.05])
def test_closed_form_is_the_path_one_update_of_the_teacher_later(form, coef, rate):
    """The closed form counts T updates of the teacher, the path T − 1 before its last target."""
    branch = BranchDrift(START, DELTA, S, coef, rate, form)
    assert branch.after(60) == pytest.approx(branch.path([1.0] * 61)[-1], abs=1e-9)


@pytest.mark.parametrize("coef", [0.05, 0.1, 0.5])
def test_long_runs_reach_the_end_point(coef):
    branch = BranchDrift(START, DELTA, S, coef, 0.05)
    assert branch.after(10_000) == pytest.approx(branch.end_point, abs=1e-6)


def test_end_points_without_a_bound_have_the_sign_of_the_drift():
    assert BranchDrift(START, DELTA, S, 0.0, 0.05).end_point == math.inf
    assert BranchDrift(START, DELTA, S, 1.0, 0.05, "guide").end_point == -math.inf


@pytest.mark.parametrize("form", ["subtract", "guide"])
@pytest.mark.parametrize("rate", [0.01, 0.05])
def test_holding_coef_separates_rise_from_fall(form, rate):
    hold = holding_coef(START, DELTA, S, form)
    below = BranchDrift(START, DELTA, S, 0.8 * hold, rate, form).after(200)
    at = BranchDrift(START, DELTA, S, hold, rate, form).after(200)
    above = BranchDrift(START, DELTA, S, 1.2 * hold, rate, form).after(200)
    assert at == pytest.approx(START, abs=1e-9)
    assert below > START > above


def test_holding_coef_at_the_limits():
    assert holding_coef(START, -0.1, S) == 0.0
    assert holding_coef(-20.0, DELTA, S) == math.inf
