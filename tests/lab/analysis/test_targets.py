"""Targets of arms against dense passes and enumerated distributions."""

import math

import numpy as np
import pytest
import torch

from credit_trl.lab.analysis.checkpoints import Checkpoint
from credit_trl.lab.analysis.targets import GATE, Arm, GroupPrompts, decode, importance_weights, target_logps
from credit_trl.lab.analysis.vocabulary_logps import CreditFormula

ARMS = [Arm("SDPO", 0.0), Arm("λ", 0.3), Arm("guide", 1.5, "guide")]
FORMULAS = [
    CreditFormula(0.1),
    CreditFormula(0.1, topk=2),
    CreditFormula(0.1, topk=2, tail="renormalize"),
]


def enumerated_target(logps, teacher, contrasts, arm, formula):
    """Probabilities of a target over a small vocabulary, token by token; `logps` has a list for each prompt."""
    policy, size = logps[0], len(logps[0])
    read = logps[2 : 2 + teacher + contrasts]
    means = [sum(row[v] for row in read[:teacher]) / teacher for v in range(size)]
    support = sorted(range(size), key=lambda v: -means[v])[: formula.topk or size]
    outside = [v for v in range(size) if v not in support]
    buckets = [[v] for v in support]
    if outside and formula.tail == "bucket":
        buckets.append(outside)

    def log_mass(row, bucket):
        total = sum(math.exp(row[v]) for member in buckets for v in member)
        return math.log(sum(math.exp(row[v]) for v in bucket) / total)

    target = {}
    for bucket in buckets:
        f = sum(log_mass(row, bucket) for row in read[:teacher]) / teacher
        g = sum(log_mass(row, bucket) for row in read[teacher:]) / contrasts
        a = f + arm.contrastive_coef * (f - g) if arm.form == "guide" else f - arm.contrastive_coef * g
        shares = sum(math.exp(policy[v]) for v in bucket)
        for v in bucket:
            target[v] = math.exp(a) * math.exp(policy[v]) / shares
    mass = sum(target.values())
    inside = 1.0
    if outside and formula.tail == "renormalize":
        inside = sum(math.exp(policy[v]) for v in support)
    probabilities = [target.get(v, 0.0) / mass * inside for v in range(size)]
    if formula.tail == "renormalize":
        probabilities = [math.exp(policy[v]) if v in outside else probabilities[v] for v in range(size)]
    return torch.tensor(probabilities, dtype=torch.float64)


def random_logps(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(6, 5, generator=generator, dtype=torch.float64).log_softmax(-1)


@pytest.mark.parametrize("formula", FORMULAS, ids=["vocabulary", "tail", "renormalized"])
@pytest.mark.parametrize("arm", ARMS, ids=[arm.name for arm in ARMS])
def test_target_is_that_of_an_enumerated_distribution(arm, formula):
    prompts = GroupPrompts([[0]] * 6, teacher=2, contrasts=2)
    for seed in range(5):
        logps = random_logps(seed)
        expected = enumerated_target(logps.tolist(), 2, 2, arm, formula)
        torch.testing.assert_close(target_logps(logps, prompts, arm, formula).exp(), expected, rtol=1e-6, atol=1e-7)


def test_gated_target_is_the_policy_where_the_teacher_depends_on_z():
    prompts = GroupPrompts([[0]] * 6, teacher=2, contrasts=2)
    closed = 0
    for seed in range(20):
        logps = random_logps(seed)
        logps[2:4] = 0.4 * logps[2:4] + 0.6 * logps[1]
        teacher = logps[2:4].mean(0).softmax(-1)
        variation = (teacher - logps[1].exp()).clamp(min=0).sum()  # the sum of what one has more
        gated = target_logps(logps, prompts, Arm("λ", 0.3, gated=True), FORMULAS[0])
        expected = logps[0] if variation > GATE else target_logps(logps, prompts, ARMS[1], FORMULAS[0])
        torch.testing.assert_close(gated, expected)
        closed += bool(variation > GATE)
    assert 0 < closed < 20


@pytest.fixture
def policy(make_model, tokenizer):
    return Checkpoint.from_model(make_model(dtype=torch.float64).eval(), tokenizer)


PROMPTS = GroupPrompts([[5, 6], [7, 8, 9, 10], [11], [12, 13, 14], [15, 16], [17, 18, 19]], teacher=2, contrasts=1)
FORMULA = CreditFormula(0.1, topk=20, temperature=0.9)
SOURCES = [0, 5, *ARMS, Arm("gated", 0.3, gated=True)]


def dense_logps(policy, prompt, answer, temperature):
    model = policy.student.student
    logits = model(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 :]
    return (logits / temperature).log_softmax(-1)


@torch.no_grad()
def test_decoding_with_a_cache_is_that_of_dense_passes(policy):
    uniforms = np.random.default_rng(3).random(5)
    answers = decode(policy, PROMPTS, SOURCES, FORMULA, uniforms)
    ends = policy.end_ids()
    for source, answer in zip(SOURCES, answers, strict=True):
        expected = []
        for uniform in uniforms:
            logps = torch.stack([dense_logps(policy, ids, expected, 0.9)[-1] for ids in PROMPTS.ids])
            is_prompt = isinstance(source, int)
            chosen = logps[source] if is_prompt else target_logps(logps, PROMPTS, source, FORMULA)
            expected.append(int((chosen.exp().cumsum(0) <= uniform).sum()))
            if expected[-1] in ends:
                break
        assert answer == expected
    assert len({tuple(answer) for answer in answers}) > 1


@torch.no_grad()
def test_importance_weights_are_ratios_of_dense_passes(policy):
    answer = [40, 41, 42]
    logps = torch.stack([dense_logps(policy, ids, answer, 0.9)[:-1] for ids in PROMPTS.ids])
    expected = []
    for arm in ARMS:
        ratios = target_logps(logps, PROMPTS, arm, FORMULA) - logps[0]
        log_weight = ratios[range(3), answer].sum().item()
        expected.append(math.exp(max(log_weight, -12.0)))  # the documented bound
    assert importance_weights(policy, PROMPTS, answer, ARMS, FORMULA) == pytest.approx(expected, rel=1e-6)
