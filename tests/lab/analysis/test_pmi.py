"""The paper's identities on enumerable joints, and cases in which they fail."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from joints import Joint, JointLM, mapped_rewards, random_joint

from credit_trl import objective
from credit_trl.contexts.tokens import PrivilegedContext
from credit_trl.lab.analysis import pmi
from credit_trl.lab.analysis.checkpoints import Checkpoint
from credit_trl.lab.analysis.responses import Rollout, analysis_config
from credit_trl.lab.analysis.vocabulary_logps import CreditFormula, RolloutContexts

EXACT = {"atol": 1e-10, "rtol": 0}
joints = st.builds(
    random_joint,
    seed=st.integers(0, 10**6),
    inputs=st.integers(2, 3),
    feedbacks=st.integers(2, 3),
    vocabulary=st.integers(2, 4),
    length=st.integers(1, 3),
)
few = settings(max_examples=12, deadline=None)


def report(
    joint: Joint,
    x: int,
    z: int,
    y: tuple[int, ...],
    coef: float = 0.0,
    *,
    noise: float = 0.0,
    lagged: Joint | None = None,
    **formula: Any,
) -> SimpleNamespace:
    """`pmi.response_pmi` for one response of the joint's own model, or with a lagged teacher."""
    student = JointLM(joint, noise)
    reference = student if lagged is None else JointLM(lagged, noise)
    checkpoint = Checkpoint.from_model(student, None, teacher=None if lagged is None else reference)
    contrast_ids = [k for k in range(joint.sizes[0]) if k != x]
    contexts = RolloutContexts(
        student.context(x), reference.context(x, z), [reference.context(k, z) for k in contrast_ids]
    )
    prompts = [reference.context(k) for k in contrast_ids]
    sums = pmi.response_pmi(checkpoint, contexts, prompts, list(y), CreditFormula(coef, **formula))
    return SimpleNamespace(**sums)


def response_of(joint: Joint, seed: int) -> tuple[int, int, tuple[int, ...]]:
    generator = torch.Generator().manual_seed(seed)
    inputs, feedbacks, vocabulary, length = joint.sizes
    pick = lambda n: int(torch.randint(n, (), generator=generator))  # noqa: E731
    return pick(inputs), pick(feedbacks), tuple(pick(vocabulary) for _ in range(length))


def filtering_increments(joint: Joint, x: int, z: int, y: tuple[int, ...]) -> torch.Tensor:
    """(T, V), log P(z | x, y_<t, v) − log P(z | x, y_<t), by enumeration."""
    rows = []
    for t in range(len(y)):
        posterior = joint.posterior(x, y[:t], z)
        rows.append(torch.stack([joint.posterior(x, (*y[:t], v), z) - posterior for v in range(joint.sizes[2])]))
    return torch.stack(rows)


@few
@given(joint=joints, seed=st.integers(0, 10**6))
def test_theorem_1_reward_is_the_filtering_increment(joint, seed):
    x, z, y = response_of(joint, seed)
    torch.testing.assert_close(mapped_rewards(joint, x, z, y), filtering_increments(joint, x, z, y), **EXACT)


@few
@given(joint=joints, seed=st.integers(0, 10**6))
def test_corollary_2_rewards_sum_to_the_pmi(joint, seed):
    x, z, y = response_of(joint, seed)
    measured = report(joint, x, z, y)
    assert measured.pmi == pytest.approx(joint.pmi(x, y, z).item(), abs=1e-10)
    assert measured.reward == pytest.approx(measured.pmi, abs=1e-10)


def test_identities_fail_for_incompatible_and_lagged_teachers():
    joint, other_joint = random_joint(3), random_joint(6)
    x, z, y = response_of(joint, 3)
    difference = mapped_rewards(joint, x, z, y, noise=0.5) - filtering_increments(joint, x, z, y)
    assert difference.abs().max() > 0.05
    incompatible = report(joint, x, z, y, 0.5, noise=0.5)
    assert abs(incompatible.credit - report(joint, x, z, y, 0.5).credit) > 0.05
    assert abs(incompatible.pmi - joint.pmi(x, y, z)) > 0.05
    lagged = report(joint, x, z, y, lagged=other_joint)
    assert abs(lagged.reward - other_joint.pmi(x, y, z)) > 0.05
    assert lagged.pmi == pytest.approx(other_joint.pmi(x, y, z).item(), abs=1e-10)
    assert lagged.reward == pytest.approx(lagged.pmi + lagged.gap, abs=1e-10)


@few
@given(
    joint=joints,
    seed=st.integers(0, 10**6),
    coef=st.floats(0.0, 1.0),
    form=st.sampled_from(("subtract", "guide")),
    support=st.sampled_from((None, 2)),
    tail=st.sampled_from(("bucket", "renormalize")),
)
def test_equation_9_splits_the_credit_of_every_formula(joint, seed, coef, form, support, tail):
    x, z, y = response_of(joint, seed)
    measured = report(joint, x, z, y, coef, form=form, topk=support, tail=tail)
    parts = measured.contrastive_pmi + measured.anti_genericity + measured.gap + measured.conditioning
    assert parts == pytest.approx(measured.credit, abs=1e-9)
    if tail == "renormalize":
        return
    contrast_ids = [k for k in range(joint.sizes[0]) if k != x]
    pmi = joint.pmi(x, y, z)
    contrast = sum(joint.pmi(k, y, z) for k in contrast_ids) / len(contrast_ids)
    surprisal = -sum(joint.log_likelihood(k, y) for k in contrast_ids) / len(contrast_ids)
    if form == "subtract":
        expected = pmi - coef * contrast, coef * surprisal
    else:
        expected = pmi + coef * (pmi - contrast), coef * (joint.log_likelihood(x, y) + surprisal)
    got = measured.contrastive_pmi, measured.anti_genericity
    assert got == pytest.approx([value.item() for value in expected], abs=1e-9)
    assert measured.conditioning == 0.0


@few
@given(seed=st.integers(0, 10**6), population=st.integers(1, 4), count=st.integers(1, 3), spread=st.floats(0.0, 4.0))
def test_proposition_3_expected_surrogate_is_at_least_pcmi(seed, population, count, spread):
    generator = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(population + 1, 5, generator=generator, dtype=torch.float64)
    teacher, *pool = torch.log_softmax(logits, dim=-1)
    pool = torch.stack(pool)
    draws = [pool[list(chosen)] for chosen in itertools.product(range(population), repeat=count)]
    expected = torch.stack([objective.input_specific(teacher, contrasts) for contrasts in draws]).mean(dim=0)
    bound = teacher - pool.exp().mean(dim=0).log()
    assert (expected >= bound - 1e-10).all()
    torch.testing.assert_close(pmi.prior_contrastive_mi(teacher, pool), bound, **EXACT)
    torch.testing.assert_close(expected - bound, pmi.jensen_gap(pool), **EXACT)


def test_pmi_of_a_trainers_contexts_is_refused():
    """Their contrast prompts contain z: π(y|x'_k,z) would replace π(y|x'_k), and the contrastive parts would be 0."""
    joint = random_joint(3)
    x, z, y = response_of(joint, 0)
    model = JointLM(joint, 0.0)
    contrasts = [model.context(k, z) for k in range(joint.sizes[0]) if k != x]
    assert contrasts
    contexts = RolloutContexts(model.context(x), model.context(x, z), contrasts)
    response = Rollout("kept", "x", y, PrivilegedContext(feedback="z"), ("x'",) * len(contrasts), 1.0, contexts)
    with pytest.raises(ValueError, match="no contrast prompt to compare with"):
        pmi.measure_pmi(Checkpoint.from_model(model, None), response, analysis_config())
