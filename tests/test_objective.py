"""The objective against independent formulas and against TRL's own loss."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial.distance import jensenshannon
from scipy.special import rel_entr, softmax
from torch.testing import assert_close
from trl.experimental.sdpo import loss_utils

from credit_trl import objective

shapes = st.tuples(st.integers(1, 6), st.integers(2, 40))
seeds = st.integers(0, 2**16)
counts = st.integers(1, 5)


def logps(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Random log-probabilities over the last dimension."""
    return torch.randn(*shape, generator=generator, dtype=torch.float64).mul(2).log_softmax(dim=-1)


@given(shapes, seeds, counts, st.floats(0, 1))
def test_the_advantage_is_eq_8_and_at_zero_lambda_the_reward(shape, seed, count, coef):
    g = torch.Generator().manual_seed(seed)
    teacher, student, contrasts = logps(g, *shape), logps(g, *shape), logps(g, count, *shape)
    advantages = objective.credit_advantages(teacher, contrasts, student, coef)
    for t in range(shape[0]):
        for v in range(shape[1]):
            expected = teacher[t, v] - student[t, v] - coef / count * sum(contrasts[k, t, v] for k in range(count))
            assert_close(advantages[t, v], expected, rtol=0, atol=1e-12)
    reward = objective.self_distillation_reward(teacher, student)
    assert torch.equal(objective.credit_advantages(teacher, contrasts, student, 0.0), reward)
    assert torch.equal(reward, teacher - student)


@given(shapes, seeds)
def test_expected_reward_is_minus_and_plus_a_kl(shape, seed):
    g = torch.Generator().manual_seed(seed)
    teacher, student = logps(g, *shape), logps(g, *shape)
    reward = objective.self_distillation_reward(teacher, student)
    f, p = teacher.exp().numpy(), student.exp().numpy()
    assert_close((p * reward.numpy()).sum(-1), -rel_entr(p, f).sum(-1), rtol=1e-9, atol=1e-12)
    assert_close((f * reward.numpy()).sum(-1), rel_entr(f, p).sum(-1), rtol=1e-9, atol=1e-12)


@given(shapes, seeds, counts)
def test_input_specific_and_input_generic_add_up_to_the_teacher(shape, seed, count):
    g = torch.Generator().manual_seed(seed)
    teacher, contrasts = logps(g, *shape), logps(g, count, *shape)
    specific, generic = objective.input_specific(teacher, contrasts), objective.input_generic(contrasts)
    assert_close(specific + generic, teacher, rtol=0, atol=1e-12)
    assert_close(generic.numpy(), np.mean(contrasts.numpy(), axis=0), rtol=0, atol=1e-12)


@given(shapes, seeds, counts, st.floats(0, 1))
def test_gradient_of_the_reverse_kl_is_algorithm_1(shape, seed, count, coef):
    """Line 8: −Σ_v ∇p_t(v) · sg[R_t(v)], on the whole vocabulary, through the student's logits."""
    g = torch.Generator().manual_seed(seed)
    teacher, contrasts = logps(g, *shape), logps(g, count, *shape)
    logits = torch.randn(*shape, generator=g, dtype=torch.float64, requires_grad=True)
    target = objective.credit_target(teacher, objective.input_generic(contrasts), coef)
    loss = objective.distillation_loss(logits.log_softmax(-1), target, alpha=1.0).sum()
    (gradient,) = torch.autograd.grad(loss, logits)
    advantages = objective.credit_advantages(teacher, contrasts, logits.log_softmax(-1), coef).detach()
    (expected,) = torch.autograd.grad(-(logits.softmax(-1) * advantages).sum(), logits)
    assert_close(gradient, expected, rtol=1e-9, atol=1e-12)


@given(shapes, seeds, st.floats(0.01, 0.99))
def test_losses_are_divergences_of_scipy_and_get_no_gradient_through_the_target(shape, seed, alpha):
    g = torch.Generator().manual_seed(seed)
    student, target = logps(g, *shape), torch.randn(*shape, generator=g, dtype=torch.float64).requires_grad_()
    p, q = student.exp().numpy(), softmax(target.detach().numpy(), axis=-1)
    m = (1 - alpha) * p + alpha * q
    expected = {
        0.0: rel_entr(q, p).sum(-1),
        1.0: rel_entr(p, q).sum(-1),
        0.5: jensenshannon(p, q, axis=-1) ** 2,
        alpha: (1 - alpha) * rel_entr(p, m).sum(-1) + alpha * rel_entr(q, m).sum(-1),
    }
    for skew, divergence in expected.items():
        actual = objective.distillation_loss(student, target.log_softmax(-1) if skew == 1.0 else target, skew)
        assert not actual.requires_grad
        assert_close(actual.numpy(), divergence, rtol=1e-7, atol=1e-12)


@given(shapes, seeds, st.sampled_from([0.0, 0.3, 0.5, 1.0]))
def test_loss_and_gradient_equal_trls_divergence(shape, seed, alpha):
    g = torch.Generator().manual_seed(seed)
    teacher = logps(g, *shape)
    logits = torch.randn(*shape, generator=g, dtype=torch.float64, requires_grad=True)
    ours = objective.distillation_loss(logits.log_softmax(-1), teacher, alpha)
    trls = loss_utils.compute_divergence(logits.log_softmax(-1), teacher, alpha)
    # TRL rounds α and 1 − α to log-space in the tensors' precision.
    assert_close(ours, trls, rtol=1e-9, atol=1e-12)
    gradients = [torch.autograd.grad(loss.sum(), logits, retain_graph=True)[0] for loss in (ours, trls)]
    assert_close(*gradients, rtol=1e-9, atol=1e-12)


@given(st.integers(1, 6), st.integers(3, 40), seeds, st.data())
def test_the_tail_bucket_is_the_mass_that_the_support_leaves(t, v, seed, data):
    g = torch.Generator().manual_seed(seed)
    k = data.draw(st.integers(1, v - 1))
    full_logps = logps(g, t, v)
    support = full_logps.topk(k, dim=-1).values
    buckets = objective.add_tail_bucket(support)
    assert_close(buckets.exp().sum(-1), torch.ones(t, dtype=torch.float64), rtol=0, atol=1e-12)
    outside_mass = full_logps.sort(dim=-1, descending=True).values[:, k:].logsumexp(-1)
    assert_close(buckets[:, -1], outside_mass, rtol=0, atol=1e-6)
    assert_close(buckets, loss_utils.add_tail_bucket(support))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_full_support_leaves_a_finite_tail(dtype):
    logits = torch.tensor([[3.0, 1.0, -2.0]], dtype=dtype, requires_grad=True)
    tail = objective.add_tail_bucket(logits.log_softmax(-1) + 1e-6)[:, -1]  # rounding may push the sum above 1
    assert -17 < tail.item() < -15
    assert torch.autograd.grad(tail.sum(), logits)[0].abs().max() == 0


@given(shapes, seeds, st.floats(-20, 20))
def test_renormalising_forgets_the_normaliser(shape, seed, shift):
    g = torch.Generator().manual_seed(seed)
    support = logps(g, 2, *shape)
    within = objective.renormalize(support + shift)
    assert_close(within.exp().sum(-1), torch.ones(2, shape[0], dtype=torch.float64), rtol=0, atol=1e-12)
    assert_close(within, objective.renormalize(support), rtol=0, atol=1e-12)
    assert_close(within[..., 0] - within[..., -1], support[..., 0] - support[..., -1], rtol=0, atol=1e-9)


@given(shapes, seeds, st.floats(0, 5))
def test_guide_is_the_papers_target_unflattened(shape, seed, coef):
    """f + λ (f − Ĝ) = (f − μ Ĝ) / (1 − μ) with μ = λ / (1 + λ)."""
    g = torch.Generator().manual_seed(seed)
    teacher, generic, mu = logps(g, 2, *shape), logps(g, 2, *shape), coef / (1 + coef)
    coefs = torch.full((2, shape[0]), coef, dtype=torch.float64)
    guide = objective.credit_target(teacher, generic, coefs, "guide")
    paper = objective.credit_target(teacher, generic, mu)
    assert_close(guide, paper / (1 - mu), rtol=1e-9, atol=1e-9)
