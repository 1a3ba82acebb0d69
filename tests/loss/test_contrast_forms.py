"""Forms of the contrast: identities, and the kernels against the dense reference."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_kernels import Allocations
from torch.testing import assert_close

from credit_trl import objective
from credit_trl.loss import CreditLoss
from dense_reference import SUPPORTS, assert_same, assert_same_gradients, dense, make_case, ours

FORMS = ["subtract", "guide"]
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


@given(shapes, seeds, st.floats(0, 5), st.integers(1, 4))
def test_guide_adds_the_input_specific_part(shape, seed, coef, count):
    g = torch.Generator().manual_seed(seed)
    teacher, contrasts, student = logps(g, *shape), logps(g, count, *shape), logps(g, *shape)
    advantages = objective.credit_advantages(teacher, contrasts, student, coef, "guide")
    specific = objective.input_specific(teacher, contrasts)
    expected = objective.self_distillation_reward(teacher, student) + coef * specific
    assert_close(advantages, expected, rtol=1e-9, atol=1e-9)


@given(shapes, seeds, st.floats(0, 5))
def test_guide_keeps_and_subtract_flattens_where_f_equals_g(shape, seed, coef):
    teacher = logps(torch.Generator().manual_seed(seed), *shape)
    assert torch.equal(objective.credit_target(teacher, teacher.clone(), coef, "guide"), teacher)
    flattened = objective.credit_target(teacher, teacher, coef / 5)
    assert_close(flattened, teacher * (1 - coef / 5), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("support", "tail", "alpha"), SUPPORTS)
@given(
    shape=st.fixed_dictionaries({"n": st.integers(1, 9), "v": st.integers(2, 70), "h": st.integers(1, 12)}),
    contrasts=st.sampled_from([0, 1, 3]),
    strength=st.sampled_from([1.0, 3.0]),
    seed=seeds,
    data=st.data(),
)
@settings(max_examples=6, derandomize=True, deadline=None)
def test_every_form_equals_dense(form, support, tail, alpha, shape, contrasts, strength, seed, data):
    topk = data.draw(st.one_of(st.none(), st.integers(1, shape["v"])))
    problem = (support, tail, alpha, topk, data.draw(st.sampled_from([None, 2.0])))
    case = make_case(**shape, contrasts=contrasts, bias=True, seed=seed)
    if form == "guide":
        case.coef *= strength  # λ above 1
    exact = case.copy(torch.float64)
    result = ours(case, *problem, data.draw(st.integers(1, 10)), form=form)
    expected = dense(exact, *problem, form=form)
    result.loss.backward()
    expected.loss.backward()
    assert_same(result, expected, exact.weights)
    assert_same_gradients(case, exact, expected.ratio, tolerance=3e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("support", "tail", "alpha"), [case for case in SUPPORTS if case[2] == 1.0])
def test_what_is_logged_equals_the_dense_reference_in_every_form(form, support, tail, alpha):
    case = make_case(n=40, v=60, contrasts=3, bias=True, seed=1)
    result = ours(case, support, tail, alpha, 9, chunk_size=7, form=form)
    expected = dense(case.copy(torch.float64), support, tail, alpha, 9, form=form)
    names = {"kl_to_target", "kl_to_teacher", "advantages", "teacher_token_logps", "generic_token_logps", "token_loss"}
    for name in names:
        assert_close(getattr(result, name).double(), getattr(expected, name).detach(), rtol=2e-5, atol=2e-5, msg=name)


@pytest.mark.parametrize(("support", "tail", "alpha"), SUPPORTS)
def test_guide_without_contrast_is_bitwise_sdpo(support, tail, alpha):
    results = []
    for form in FORMS:
        case = make_case(contrasts=2, seed=3)
        case.coef.zero_()
        result = ours(case, support, tail, alpha, 5, form=form)
        result.loss.backward()
        results.append([result.loss, result.advantages, *(leaf.grad for leaf in case.leaves())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(("support", "tail"), [("teacher_topk", "bucket"), ("teacher_topk", "renormalize")])
def test_no_form_projects_more_than_the_papers(support, tail):
    products = []
    for form in FORMS:
        case = make_case(n=8, v=5000, h=16, contrasts=3, bias=True)
        with Allocations() as allocations:
            ours(case, support, tail, 1.0, 5, form=form).loss.backward()
        products.append(allocations.products)
    assert products[0] == products[1]


def test_every_field_of_the_loss_is_per_token():
    result = ours(make_case(n=7, contrasts=1), "teacher_topk", "bucket", 1.0, 5, form="guide")
    assert all(getattr(result, f.name).shape == (7,) for f in fields(CreditLoss) if f.name != "loss")
