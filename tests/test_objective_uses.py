"""Weights of the credit beside a verifier's reward, against the papers' formulas written out with numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from credit_trl import objective

sizes = st.tuples(st.integers(1, 5), st.integers(1, 7))
seeds = st.integers(0, 2**16)


def case(size, seed):
    """Credit (b, t), advantages (b,) with zeros among them, and a mask with a token of each sample."""
    rng = np.random.default_rng(seed)
    credit, advantages = rng.normal(0, 2, size), rng.normal(0, 1, size[0]) * (rng.random(size[0]) > 0.2)
    mask = rng.random(size) > 0.3
    mask[:, 0] = True
    return credit, advantages, mask


@given(size=sizes, seed=seeds, clip=st.floats(0.05, 1.0), temperature=st.floats(0.1, 5.0))
@settings(max_examples=40, deadline=None)
def test_ratio_weights_are_rlsds_clipped_ratio(size, seed, clip, temperature):
    credit, advantages, _ = case(size, seed)
    ours = objective.ratio_weights(torch.tensor(credit), torch.tensor(advantages), clip, temperature)
    for i, advantage in enumerate(advantages):
        ratio = np.exp(credit[i]) ** (np.sign(advantage) / temperature)  # (P_T / P_S) ** sign(A)
        np.testing.assert_allclose(ours[i].numpy(), np.clip(ratio, 1 - clip, 1 + clip), rtol=1e-12)


@given(size=sizes, seed=seeds, clip=st.floats(0.05, 1.0), temperature=st.floats(0.02, 5.0))
@settings(max_examples=40, deadline=None)
def test_residual_weights_are_rlcsds_anchored_residual(size, seed, clip, temperature):
    credit, advantages, _ = case(size, seed)
    ours = objective.residual_weights(torch.tensor(credit), torch.tensor(advantages), clip, temperature)
    changed = objective.modulated_advantages(torch.tensor(advantages), ours).numpy()
    residual = clip * np.tanh(credit / temperature)
    for i, advantage in enumerate(advantages):
        moved = advantage + residual[i]
        anchored = {1.0: np.maximum(moved, 0.0), -1.0: np.minimum(moved, 0.0), 0.0: 0.0 * moved}[np.sign(advantage)]
        np.testing.assert_allclose(changed[i], anchored, rtol=1e-9, atol=1e-12)


def test_residual_weights_of_equal_rewards_are_one():
    """TRL's advantages of equal rewards are what rounding leaves of (r − mean) / (std + 1e-4)."""
    rewards = torch.full((8,), 0.7)
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    assert (advantages != 0.0).any()
    credit = torch.linspace(-3, 3, 40).view(8, 5)
    assert torch.equal(objective.residual_weights(credit, advantages, 0.2), torch.ones(8, 5))


@given(size=sizes, seed=seeds, share=st.floats(0.0, 1.0))
@settings(max_examples=40, deadline=None)
def test_modulation_keeps_the_verifiers_sign(size, seed, share):
    credit, advantages, mask = (torch.tensor(x) for x in case(size, seed))
    for form in (objective.ratio_weights, objective.residual_weights):
        weights = objective.normalize_weights(form(credit, advantages, 0.5), mask)
        changed = objective.modulated_advantages(advantages, weights, share)
        assert (changed * advantages[:, None] >= 0).all()
        expected = advantages[:, None] * ((1 - share) + share * weights)
        torch.testing.assert_close(changed, expected, rtol=1e-9, atol=1e-12)


@given(size=sizes, seed=seeds)
@settings(max_examples=40, deadline=None)
def test_normalised_weights_have_mean_one_a_sample(size, seed):
    credit, advantages, mask = (torch.tensor(x) for x in case(size, seed))
    weights = objective.normalize_weights(objective.ratio_weights(credit, advantages, 0.9), mask)
    for own, kept in zip(weights, mask, strict=True):
        assert own[kept].mean().item() == pytest.approx(1.0, rel=1e-9)


@given(size=sizes, seed=seeds, share=st.floats(0.0, 1.0))
@settings(max_examples=40, deadline=None)
def test_weights_of_one_leave_the_advantage_bit_for_bit(size, seed, share):
    _, advantages, mask = (torch.tensor(x) for x in case(size, seed))
    advantages = advantages.float()
    ones = objective.normalize_weights(torch.ones(size), mask)
    assert torch.equal(objective.modulated_advantages(advantages, ones, share), advantages[:, None].expand(size))


def test_routed_samples_are_failures_with_a_teacher():
    successful, teacher = torch.tensor([1, 1, 0, 0]).bool(), torch.tensor([1, 0, 1, 0]).bool()
    assert objective.routed(successful, teacher).tolist() == [False, False, True, False]


@given(size=sizes, seed=seeds, beta=st.floats(0.1, 4.0))
@settings(max_examples=20, deadline=None)
def test_entropy_weights_are_srpos_dynamic_weight(size, seed, beta):
    entropy = np.abs(case(size, seed)[0])
    ours = objective.entropy_weights(torch.tensor(entropy), 1 / beta)
    np.testing.assert_allclose(ours.numpy(), np.exp(-beta * entropy), rtol=1e-9)
