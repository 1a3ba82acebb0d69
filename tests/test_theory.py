"""The paper's identities on joints that can be enumerated, through the functions of `objective`.

Teacher and student are true conditionals of one joint P(y, z | x), so posterior compatibility (Assumption 1) holds.
"""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from credit_trl.objective import credit_advantages, input_generic, input_specific, self_distillation_reward

V, T, Z, X = 3, 3, 2, 4


def random_joint(seed, concentration=0.5):
    """P(y, z | x): (X, V, …, V, Z), T axes for the tokens."""
    shape = (X, V**T * Z)
    tables = np.random.default_rng(seed).dirichlet(np.full(shape[1], concentration) + 1e-3, size=X)
    return torch.tensor(tables).reshape(X, *([V] * T), Z)


def next_token(joint, x, prefix, z=None):
    """π(· | x, y_<t, z), or π(· | x, y_<t) without z: (V,) probabilities by summation over the table."""
    table = joint[x][prefix]
    table = table.sum(-1) if z is None else table[..., z]
    mass = table.reshape(V, -1).sum(-1)
    return mass / mass.sum()


def feedback(joint, x, prefix):
    """P(z | x, y_≤t): (Z,)."""
    table = joint[x][prefix].reshape(-1, Z).sum(0)
    return table / table.sum()


def rollout(joint, y, x, z, others):
    """f, g and log p along y: (T, V), (C, T, V), (T, V)."""
    prefixes = [tuple(y[:t]) for t in range(T)]
    f = torch.stack([next_token(joint, x, p, z) for p in prefixes]).log()
    g = torch.stack([torch.stack([next_token(joint, o, p, z) for p in prefixes]) for o in others]).log()
    student = torch.stack([next_token(joint, x, p) for p in prefixes]).log()
    return f, g, student


def pmi(joint, x, y, z):
    return (feedback(joint, x, tuple(y))[z] / feedback(joint, x, ())[z]).log()


def surprisal(joint, x, y):
    total = joint[x].sum()
    return -(joint[x][tuple(y)].sum() / total).log()


cases = given(
    seed=st.integers(0, 10**6),
    y=st.tuples(*[st.integers(0, V - 1)] * T),
    x=st.integers(0, X - 1),
    z=st.integers(0, Z - 1),
    coef=st.floats(0.0, 1.0),
)


@settings(max_examples=50, deadline=None)
@cases
def test_theorem_1_the_reward_is_a_bayesian_filtering_increment(seed, y, x, z, coef):
    joint = random_joint(seed)
    f, _, student = rollout(joint, y, x, z, [x])
    reward = self_distillation_reward(f, student)
    for t in range(T):
        prefix = tuple(y[:t])
        for token in range(V):
            increment = feedback(joint, x, (*prefix, token))[z].log() - feedback(joint, x, prefix)[z].log()
            assert reward[t, token] == pytest.approx(increment.item(), abs=1e-9)


@settings(max_examples=50, deadline=None)
@cases
def test_corollary_2_advantages_sum_to_the_pmi_minus_the_contrasted_and_a_bonus(seed, y, x, z, coef):
    joint = random_joint(seed)
    others = [o for o in range(X) if o != x]
    f, g, student = rollout(joint, y, x, z, others)
    advantages = credit_advantages(f, g, student, coef)
    total = sum(advantages[t, y[t]] for t in range(T)).item()
    contrasted = sum(pmi(joint, o, y, z) for o in others).item() / len(others)
    bonus = sum(surprisal(joint, o, y) for o in others).item() / len(others)
    expected = pmi(joint, x, y, z).item() - coef * contrasted + coef * bonus
    assert total == pytest.approx(expected, abs=1e-9)
    reward = self_distillation_reward(f, student)
    assert sum(reward[t, y[t]] for t in range(T)).item() == pytest.approx(pmi(joint, x, y, z).item(), abs=1e-9)


def test_identities_need_a_joint_distribution():
    joint, other = random_joint(1), random_joint(2)
    f, _, _ = rollout(joint, (0, 1, 2), 0, 1, [0])
    _, _, student = rollout(other, (0, 1, 2), 0, 1, [0])
    total = sum(self_distillation_reward(f, student)[t, y] for t, y in enumerate((0, 1, 2)))
    assert abs(total.item() - pmi(joint, 0, (0, 1, 2), 1).item()) > 1e-2


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), x=st.integers(0, X - 1), z=st.integers(0, Z - 1))
def test_expected_reward_is_minus_and_plus_a_kl(seed, x, z):
    joint = random_joint(seed)
    f, _, student = rollout(joint, (0,) * T, x, z, [x])
    reward = self_distillation_reward(f, student)
    assert ((student.exp() * reward).sum(-1) <= 1e-12).all()
    assert ((f.exp() * reward).sum(-1) >= -1e-12).all()


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), x=st.integers(0, X - 1), z=st.integers(0, Z - 1), count=st.integers(1, 3))
def test_proposition_3_bounds_the_pcmi(seed, x, z, count):
    joint = random_joint(seed)
    f, g, _ = rollout(joint, (1, 0, 2), x, z, range(X))
    draws = list(itertools.product(range(X), repeat=count))
    expected = torch.stack([input_specific(f, g[list(draw)]) for draw in draws]).mean(0)
    pcmi = f - g.exp().mean(0).log()
    assert (expected >= pcmi - 1e-9).all()
    torch.testing.assert_close(f - expected, input_generic(g))


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_expected_reward_is_the_conditional_mutual_information(seed):
    """E[Σ_t r_t(y_t)] = I(Y; Z | X) over P(x) P(y, z | x), with x uniform, against the sum of entropies."""
    joint = random_joint(seed)
    expected = information = 0.0
    for x in range(X):
        table = joint[x].reshape(-1, Z) / joint[x].sum()
        for y, z in itertools.product(itertools.product(range(V), repeat=T), range(Z)):
            f, _, student = rollout(joint, y, x, z, [x])
            tokens = torch.tensor(y)[:, None]
            rewards = self_distillation_reward(f, student).gather(-1, tokens)
            expected += (joint[x][y][z] / joint[x].sum() * rewards.sum()).item() / X
        entropies = [torch.special.entr(part).sum().item() for part in (table.sum(1), table.sum(0), table)]
        information += (entropies[0] + entropies[1] - entropies[2]) / X
    assert expected == pytest.approx(information, abs=1e-9)
