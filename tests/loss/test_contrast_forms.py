"""Forms of the contrast: identities, and the kernels against the dense reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from credit_trl import objective
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
    head=st.sampled_from([{}, {"bias": True}, {"softcap": 2.0}, {"bias": True, "softcap": 2.0}]),
    contrasts=st.sampled_from([0, 1, 3]),
    strength=st.sampled_from([1.0, 3.0]),
    seed=seeds,
    data=st.data(),
)
# Deterministic draws: two tokens that tie for the last place of a support would be a legitimate difference.
@settings(max_examples=24, derandomize=True, deadline=None)
def test_loss_and_every_gradient_equal_dense(form, support, tail, alpha, shape, head, contrasts, strength, seed, data):
    topk = data.draw(st.one_of(st.none(), st.integers(1, shape["v"])))
    problem = (support, tail, alpha, topk, data.draw(st.sampled_from([None, 2.0])))
    case = make_case(**shape, **head, contrasts=contrasts, seed=seed)
    if form == "guide":
        case.coef *= strength  # λ above 1
    exact = case.copy(torch.float64)
    result = ours(case, *problem, data.draw(st.integers(1, 10)), form=form)
    expected = dense(exact, *problem, form=form)
    result.loss.backward()
    expected.loss.backward()
    assert_same(result, expected, exact.weights)
    assert_same_gradients(case, exact, expected.ratio, tolerance=3e-5)


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
