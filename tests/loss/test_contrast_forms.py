"""Forms, gate and baselines of the contrast: identities, and the kernels against the dense reference."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_kernels import Allocations
from torch.testing import assert_close

from credit_trl import objective
from credit_trl.loss import CreditLoss
from credit_trl.objective import ContrastRule
from dense_reference import PAPER, SUPPORTS, assert_same, assert_same_gradients, dense, make_case, ours

RULES = [ContrastRule(form, gate) for form in ("subtract", "guide") for gate in (0.0, 0.3)]
shapes = st.tuples(st.integers(1, 6), st.integers(2, 40))
seeds = st.integers(0, 2**16)


def logps(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64).mul(2).log_softmax(dim=-1)


@given(shapes, seeds, st.floats(0, 5))
def test_guide_is_the_papers_target_unflattened(shape, seed, coef):
    """f + λ (f − Ĝ) = (f − μ Ĝ) / (1 − μ) with μ = λ / (1 + λ)."""
    g = torch.Generator().manual_seed(seed)
    teacher, generic, mu = logps(g, *shape), logps(g, *shape), coef / (1 + coef)
    guide = objective.credit_target(teacher, generic, coef, "guide")
    paper = objective.credit_target(teacher, generic, mu)
    assert_close(guide, paper / (1 - mu), rtol=1e-9, atol=1e-9)


@given(shapes, seeds, st.floats(0, 5), st.integers(1, 4), st.sampled_from(["mean_log", "log_mean"]))
def test_guide_adds_the_input_specific_part(shape, seed, coef, count, baseline):
    g = torch.Generator().manual_seed(seed)
    teacher, contrasts, student = logps(g, *shape), logps(g, count, *shape), logps(g, *shape)
    advantages = objective.credit_advantages(teacher, contrasts, student, coef, "guide", baseline)
    specific = objective.input_specific(teacher, contrasts, baseline)
    expected = objective.self_distillation_reward(teacher, student) + coef * specific
    assert_close(advantages, expected, rtol=1e-9, atol=1e-9)


@given(shapes, seeds, st.floats(0, 5))
def test_guide_keeps_and_subtract_flattens_where_f_equals_g(shape, seed, coef):
    g = torch.Generator().manual_seed(seed)
    teacher = logps(g, *shape)
    assert torch.equal(objective.credit_target(teacher, teacher.clone(), coef, "guide"), teacher)
    flattened = objective.credit_target(teacher, teacher, coef / 5)
    assert_close(flattened, teacher * (1 - coef / 5), rtol=1e-9, atol=1e-12)


@given(shapes, seeds, st.integers(1, 5))
def test_log_mean_is_the_marginal(shape, seed, count):
    contrasts = logps(torch.Generator().manual_seed(seed), count, *shape)
    marginal = objective.input_generic(contrasts, "log_mean")
    assert_close(marginal.exp(), contrasts.exp().mean(0), rtol=1e-9, atol=1e-12)
    assert (marginal - objective.input_generic(contrasts) >= -1e-12).all()
    assert_close(marginal.exp().sum(-1), torch.ones(shape[0], dtype=torch.float64))


@given(shapes, seeds)
def test_total_variation_is_the_largest_event_difference(shape, seed):
    g = torch.Generator().manual_seed(seed)
    teacher, generic = logps(g, *shape), logps(g, *shape)
    p, q = teacher.exp(), generic.exp()
    event = p > q
    expected = (p * event).sum(-1) - (q * event).sum(-1)
    assert_close(objective.total_variation(teacher, generic + 3.0), expected, rtol=1e-9, atol=1e-12)


def settled(case, *problem, rule, baseline) -> bool:
    """Whether the gate decides every position with a margin above fp32 rounding."""
    loss, coef = [], []
    for factor in (1 - 1e-4, 1 + 1e-4):
        moved = ContrastRule(rule.form, rule.gate * factor)
        result = dense(case, *problem, rule=moved, baseline=baseline)
        loss.append(result.token_loss)
        coef.append(result.contrastive_coef)
    return torch.equal(*coef) and torch.allclose(*loss, rtol=1e-9)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize(("support", "tail", "alpha"), SUPPORTS)
@given(
    shape=st.fixed_dictionaries({"n": st.integers(1, 9), "v": st.integers(2, 70), "h": st.integers(1, 12)}),
    contrasts=st.sampled_from([0, 1, 3]),
    baseline=st.sampled_from(["mean_log", "log_mean"]),
    strength=st.sampled_from([1.0, 3.0]),
    seed=seeds,
    data=st.data(),
)
@settings(max_examples=6, derandomize=True, deadline=None)
def test_every_form_gate_and_baseline_equals_dense(
    rule, support, tail, alpha, shape, contrasts, baseline, strength, seed, data
):
    problem = (support, tail, alpha, data.draw(st.integers(1, shape["v"])), data.draw(st.sampled_from([None, 2.0])))
    case = make_case(**shape, contrasts=contrasts, bias=True, seed=seed)
    if rule.form == "guide":
        case.coef *= strength  # λ above 1
    exact = case.copy(torch.float64)
    assume(settled(exact, *problem, rule=rule, baseline=baseline))
    result = ours(case, *problem, data.draw(st.integers(1, 10)), rule=rule, baseline=baseline)
    expected = dense(exact, *problem, rule=rule, baseline=baseline)
    result.loss.backward()
    expected.loss.backward()
    assert_same(result, expected, exact.weights)
    assert_same_gradients(case, exact, expected.ratio, tolerance=3e-5)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("baseline", ["mean_log", "log_mean"])
@pytest.mark.parametrize(("support", "tail", "alpha"), [case for case in SUPPORTS if case[2] == 1.0])
def test_what_is_logged_equals_the_dense_reference_in_every_form(rule, baseline, support, tail, alpha):
    case = make_case(n=40, v=60, contrasts=3, bias=True, seed=1)
    if rule.gate:  # one that some positions exceed and some do not
        rule = replace(
            rule, gate={"sampled": 0.01, "student_topk": 0.12 if tail == "bucket" else 0.3}.get(support, 0.3)
        )
    exact = case.copy(torch.float64)
    assert settled(exact, support, tail, alpha, 9, rule=rule, baseline=baseline)
    result = ours(case, support, tail, alpha, 9, chunk_size=7, rule=rule, baseline=baseline)
    expected = dense(exact, support, tail, alpha, 9, rule=rule, baseline=baseline)
    names = {"kl_to_target", "kl_to_teacher", "contrastive_coef", "advantages", "teacher_token_logps"}
    for name in names | {"generic_token_logps", "token_loss"}:
        assert_close(getattr(result, name).double(), getattr(expected, name).detach(), rtol=2e-5, atol=2e-5, msg=name)
    if rule.gate:
        shut = (result.contrastive_coef == 0) & (case.coef > 0)
        assert 0 < shut.sum() < (case.coef > 0).sum()


@pytest.mark.parametrize(("support", "tail", "alpha"), SUPPORTS)
def test_guide_without_contrast_is_bitwise_sdpo(support, tail, alpha):
    results = []
    for form, zero in (("subtract", "coefficient"), ("guide", "coefficient"), ("guide", "gate")):
        case = make_case(contrasts=2, seed=3)
        if zero == "coefficient":
            case.coef.zero_()
        rule = ContrastRule(form, gate=1.0 if zero == "gate" else 0.0)
        result = ours(case, support, tail, alpha, 5, rule=rule)
        result.loss.backward()
        results.append([result.loss, result.advantages, *(leaf.grad for leaf in case.leaves())])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("support", ["teacher_topk", "student_topk"])
@pytest.mark.parametrize("tail", ["bucket", "renormalize"])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_support_of_all_tokens_but_none_is_the_vocabulary(support, tail, rule):
    whole, full = (make_case(n=9, v=31, contrasts=2, seed=4, dtype=torch.float64) for _ in range(2))
    ours(whole, support, tail, 1.0, 31, rule=rule).loss.backward()
    ours(full, "full", tail, 1.0, 31, rule=rule).loss.backward()
    for leaf, other in zip(whole.leaves(), full.leaves(), strict=True):
        assert (leaf.grad - other.grad).abs().max() <= 1e-5 * other.grad.abs().max()


def products(support: str, tail: str, rule: ContrastRule, baseline: str = "mean_log") -> list[int]:
    case = make_case(n=8, v=5000, h=16, contrasts=3, bias=True)
    with Allocations() as allocations:
        ours(case, support, tail, 1.0, 5, rule=rule, baseline=baseline).loss.backward()
    return allocations.products


@pytest.mark.parametrize(("support", "tail"), [("teacher_topk", "bucket"), ("teacher_topk", "renormalize")])
def test_no_form_projects_more_than_the_papers(support, tail):
    paper = products(support, tail, PAPER)
    for rule in RULES:
        assert products(support, tail, rule) == paper
        assert products(support, tail, rule, "log_mean") == paper


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_the_full_support_keeps_to_its_buffers_in_every_form(rule):
    n, v, chunk = 256, 1000, 16
    case = make_case(n=n, v=v, h=8, contrasts=4)
    with Allocations() as allocations:
        ours(case, "full", "bucket", 1.0, 5, 2.0, chunk, rule=rule, baseline="log_mean").loss.backward()
    assert max(allocations.sizes) <= 3 * chunk * v < n * v / 4


def test_the_gate_contrasts_positions_above_it():
    """Two positions by hand: teacher and contrast differ at the first only."""
    teacher = torch.tensor([[0.7, 0.2, 0.1], [0.5, 0.3, 0.2]]).log()
    generic = torch.tensor([[0.1, 0.2, 0.7], [0.5, 0.25, 0.25]]).log()
    tv = objective.total_variation(teacher, generic)
    assert_close(tv, torch.tensor([0.6, 0.05]))
    coef = torch.tensor([1.0, 1.0]) * (tv > 0.05 + 1e-6)
    target = objective.credit_target(teacher, generic, coef, "guide")
    expected = [math.log(0.7) + math.log(7), math.log(0.2), math.log(0.1) - math.log(7)]
    assert_close(target[0], torch.tensor(expected))
    assert torch.equal(target[1], teacher[1])


def test_every_field_of_the_loss_is_per_token():
    result = ours(make_case(n=7, contrasts=1), "teacher_topk", "bucket", 1.0, 5, rule=ContrastRule("guide", 0.1))
    assert all(getattr(result, f.name).shape == (7,) for f in fields(CreditLoss) if f.name != "loss")
