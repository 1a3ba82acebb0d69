"""Branches of token maps, λ_c and λ_hold, and the finite-time law against a tabular simulation."""

import math

import pytest
import torch

from credit_trl.lab.analysis import drift
from credit_trl.lab.analysis.drift import BranchDrift, branch_table, find_branches, holding_coef
from credit_trl.lab.analysis.tokenmap import ScoredTokens, TokenMap
from credit_trl.lab.analysis.tokentext import TokenText
from credit_trl.objective import credit_target
from lab.drawn import FORMULA, drawn_rollout

A, B, OTHER, FOREIGN, RARE = range(5)


def student_logits(count: int) -> torch.Tensor:
    """(count, 5), logits of a policy that says A or B."""
    logits = torch.full((count, 5), -12.0, dtype=torch.float64)
    logits[:, [A, B]] = 2 * torch.rand(count, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return logits


def branch_map(delta: torch.Tensor, s: torch.Tensor, *, sampled: int = A, contrasts: int = 2) -> TokenMap:
    """Map with one branch a token: z raises A by δ, and under contrast prompts FOREIGN takes the place of B.

    Args:
        delta, s: (T,), δ, and s as the mean over the contrast prompts.
        sampled: the sampled token of every position; the alternatives are all five tokens.
        contrasts: number of contrast prompts.
    """
    student = student_logits(len(delta))
    teacher = student.clone()
    teacher[:, A] += delta
    contrast = teacher.expand(contrasts, -1, -1).clone()
    contrast[..., FOREIGN] = contrast[..., B]
    contrast[..., B] -= s + torch.linspace(-0.5, 0.5, contrasts)[:, None]
    scores = {
        "ids": torch.arange(5).expand(len(delta), -1),
        "student_logps": student.log_softmax(-1),
        "teacher_logps": teacher.log_softmax(-1),
        "contrast_logps": contrast.log_softmax(-1),
        "advantage": torch.zeros_like(student),
        "policy_mean": torch.zeros_like(student),
    }
    alternatives = ScoredTokens(**scores, formula=FORMULA)
    sampled_scores = {name: tensor[..., sampled] for name, tensor in scores.items()}
    return TokenMap(
        drawn_rollout(len(delta), contrasts),
        "base",
        [TokenText("t")] * len(delta),
        ["word"] * len(delta),
        ScoredTokens(**sampled_scores, formula=FORMULA, alternatives=alternatives),
        [["x"] * 5] * len(delta),
    )


def values(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


@pytest.mark.parametrize("sampled", [A, B, RARE])
def test_delta_and_s_are_those_of_the_construction(sampled):
    delta, s = values(0.5, 2.0, 4.0, -1.0), values(3.0, 7.5, 11.4, 3.0)
    branches = find_branches(branch_map(delta, s, sampled=sampled))
    assert branches["positions"].tolist() == [0, 1, 2, 3]
    assert branches["generic_ids"].tolist() == [A] * 4
    assert branches["specific_ids"].tolist() == [B] * 4
    torch.testing.assert_close(branches["log_odds"], student_logits(4)[:, A] - student_logits(4)[:, B])
    torch.testing.assert_close(branches["delta"], delta)
    torch.testing.assert_close(branches["s"], s)


def test_positions_without_both_tokens_are_no_branches(monkeypatch):
    branches = find_branches(branch_map(values(1.0, 1.0, 1.0), values(0.3, 6.0, 0.0)))
    assert branches["positions"].tolist() == [1]
    assert len(find_branches(branch_map(values(1.0), values(6.0), contrasts=0))["s"]) == 0
    monkeypatch.setattr(drift, "MIN_PROBABILITY", 0.9)
    assert len(find_branches(branch_map(values(1.0), values(6.0)))["s"]) == 0


@pytest.mark.parametrize("rate", [0.05, 0.0])
def test_table_has_the_medians_and_each_lambda_where_delta_is_positive(rate):
    delta, s = values(0.5, 2.0, 4.0, -1.0), values(3.0, 7.5, 12.0, 3.0)
    rows = [line for line in branch_table([branch_map(delta, s)], rate, 100).splitlines() if line.startswith("| all")]
    cells = [cell.strip() for cell in rows[0].strip("|").split("|")]
    starts = find_branches(branch_map(delta, s))["log_odds"]
    hold = sorted(
        holding_coef(*branch) for branch in zip(starts.tolist()[:3], delta.tolist(), s.tolist(), strict=False)
    )
    lead = delta if rate else (starts + delta).clamp(min=0.0)
    critical = sorted((lead / (lead + s)).tolist()[:3])
    guide = sorted((delta / s).tolist()[:3])
    assert cells[1:3] == ["4", "3"]
    assert cells[4:6] == ["1.25", "5.25"]
    for cell, quartiles in zip(cells[6:9], (critical, hold, guide), strict=True):
        assert cell.startswith(f"{quartiles[1]:.2f} [")


START, DELTA, S = -3.0, 0.7, 10.0
ARMS = [("subtract", 0.0), ("subtract", 0.05), ("subtract", 0.1), ("subtract", 0.5), ("guide", 0.2), ("guide", 1.0)]


def simulate(form: str, coef: float, rate: float, batches: int) -> list[float]:
    """Log-odds of a policy over two tokens that equals the normalised target after every generation batch."""
    raise_generic = torch.tensor([DELTA, 0.0], dtype=torch.float64)
    lower_specific = torch.tensor([S, 0.0], dtype=torch.float64)
    teacher = torch.tensor([START, 0.0], dtype=torch.float64)
    log_odds = []
    for _ in range(batches):
        f = torch.log_softmax(teacher + raise_generic, -1)
        g = torch.log_softmax(teacher + raise_generic + lower_specific, -1)
        student = torch.log_softmax(credit_target(f, g, coef, form), -1)
        teacher = (1 - rate) * teacher + rate * student
        log_odds.append((student[0] - student[1]).item())
    return log_odds


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


def descend(form: str, coef: float, rate: float, batches: int, learning_rate: float) -> list[float]:
    """Log-odds under gradient descent on two logits, one step of the reverse KL divergence a generation batch."""
    logits = torch.tensor([START, 0.0], dtype=torch.float64, requires_grad=True)
    teacher = logits.detach().clone()
    lift = torch.tensor([[DELTA, 0.0], [DELTA + S, 0.0]], dtype=torch.float64)
    log_odds = []
    for _ in range(batches):
        f, g = (teacher + lift).log_softmax(-1)
        target = credit_target(f, g, coef, form).log_softmax(-1)
        logps = logits.log_softmax(-1)
        (gradient,) = torch.autograd.grad((logps.exp() * (logps - target)).sum(), logits)
        logits = (logits - learning_rate * gradient).detach().requires_grad_()
        teacher = torch.lerp(teacher, logits.detach(), rate)
        log_odds.append((logits[0] - logits[1]).item())
    return log_odds


@pytest.mark.parametrize(("form", "coef"), ARMS)
@pytest.mark.parametrize("rate", [0.0, 0.05, 1.0])
def test_path_with_slowing_1_equals_gradient_descent_on_logits(form, coef, rate):
    branch = BranchDrift(START, DELTA, S, coef, rate, form)
    assert branch.path([0.3] * 60, slowing=1.0) == pytest.approx(descend(form, coef, rate, 60, 0.6), abs=1e-9)


def test_end_points_are_reached_or_have_the_sign_of_the_drift():
    branch = BranchDrift(START, DELTA, S, 0.1, 0.05)
    assert branch.after(10_000) == pytest.approx(branch.end_point, abs=1e-6)
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
