"""Proposition 4 and Corollary 5 on joints with an outcome, and the Monte-Carlo estimate against exact values."""

import json
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from joints import Joint, JointLM, mapped_rewards

from credit_trl.evaluation.config import SamplingConfig
from credit_trl.lab.analysis import interventional as iv
from credit_trl.lab.analysis.checkpoints import Checkpoint
from credit_trl.lab.analysis.vocabulary_logps import CreditFormula, RolloutContexts
from credit_trl.tasks.registry import load_task

VOCABULARY, LENGTH, Z = 4, 2, 1  # the observed feedback is z = 1
few = settings(max_examples=15, deadline=None)


def outcome_joint(seed: int, q: tuple[float, float], leak: float = 0.0) -> tuple[Joint, torch.Tensor]:
    """A joint whose feedback is a noisy function of the outcome, and the outcome O(y), (V, V).

    Args:
        q: (P(z = 1 | O = 0), P(z = 1 | O = 1)).
        leak: how much the feedback also depends on the first token: breaks outcome sufficiency.
    """
    generator = torch.Generator().manual_seed(seed)
    policy = torch.rand(VOCABULARY, VOCABULARY, generator=generator, dtype=torch.float64) + 0.02
    policy /= policy.sum()
    outcome = torch.rand(VOCABULARY, VOCABULARY, generator=generator) < 0.5
    observed = torch.where(outcome, q[1], q[0]).double()
    observed = (observed + leak * torch.linspace(-1, 1, VOCABULARY, dtype=torch.float64)[:, None]).clamp(0.0, 1.0)
    return Joint(torch.stack([policy * (1 - observed), policy * observed])[None]), outcome


def exact_credit(joint: Joint, outcome: torch.Tensor) -> np.ndarray:
    """r^cf of the first token, by enumeration."""
    policy = joint.table[0].sum(0)
    success = (policy * outcome).sum(1) / policy.sum(1)
    return iv.interventional_credit(success.numpy(), (policy * outcome).sum().numpy())


def reward_of(joint: Joint) -> np.ndarray:
    """r^z of the first token, as the token map measures it."""
    return mapped_rewards(joint, 0, Z, (0,) * LENGTH)[0].numpy()


def has_ties_or_zeros(outcome: torch.Tensor, joint: Joint) -> bool:
    policy = joint.table[0].sum(0)
    success = (policy * outcome).sum(1) / policy.sum(1)
    return bool((success == 0).any()) or len(set(success.tolist())) < VOCABULARY


@few
@given(seed=st.integers(0, 10**6), q0=st.floats(0.01, 0.45), gain=st.floats(0.05, 0.5))
def test_proposition_4_reward_ranks_candidates_as_intervention(seed, q0, gain):
    joint, outcome = outcome_joint(seed, (q0, q0 + gain))
    assume(not has_ties_or_zeros(outcome, joint))
    assert reward_of(joint).argsort().tolist() == exact_credit(joint, outcome).argsort().tolist()


@few
@given(seed=st.integers(0, 10**6), q1=st.floats(0.05, 1.0))
def test_corollary_5_feedback_on_success_equals_intervention(seed, q1):
    joint, outcome = outcome_joint(seed, (0.0, q1))
    assume(not has_ties_or_zeros(outcome, joint))
    np.testing.assert_allclose(reward_of(joint), exact_credit(joint, outcome), atol=1e-10)


def branching_of(joint: Joint) -> iv.Branching:
    rewards = torch.from_numpy(reward_of(joint))
    policy = joint.table[0].sum(0).sum(1).log()
    return iv.Branching((), tuple(range(VOCABULARY)), rewards, -rewards, policy)


def test_branching_estimate_has_its_standard_error():
    joint, outcome = outcome_joint(4, (0.1, 0.8))
    exact = exact_credit(joint, outcome)
    policy = joint.table[0].sum(0).numpy()
    first_token, then = policy.sum(1), policy / policy.sum(1, keepdims=True)
    rng = np.random.default_rng(0)

    def outcomes(questions, prefixes):
        firsts = [prefix[0] if prefix else rng.choice(VOCABULARY, p=first_token) for prefix in prefixes]
        return [bool(outcome[v, rng.choice(VOCABULARY, p=then[v])]) for v in firsts]

    branching = branching_of(joint)
    deviations = []
    for _ in range(60):
        [credit] = iv.run_branchings([branching], 200, 400, outcomes)
        deviations.append((credit.credit - exact) / credit.standard_error)
    deviations = np.array(deviations)
    assert np.abs(deviations.mean(axis=0)).max() < 0.5
    assert 0.8 < deviations.std() < 1.2
    none = iv.estimate(branching, np.array([0, 9, 9, 9]), 10, 3, 10)
    assert none.credit[0] == pytest.approx(np.log((0.5 / 11) / (3.5 / 11)))  # no success is no infinite loss


def test_candidates_are_likely_tokens_at_high_entropy_prefixes():
    generator = torch.Generator().manual_seed(2)
    table = torch.rand(2, 2, 4, 4, 4, generator=generator, dtype=torch.float64) ** 3 + 1e-4
    joint = Joint(table / table.flatten(1).sum(-1).view(-1, 1, 1, 1, 1))
    model = JointLM(joint)
    y = (1, 2, 0)
    contexts = RolloutContexts(model.context(0), model.context(0, 1), [model.context(1, 1)])
    example = runpy.run_path(str(Path(__file__).parents[3] / "examples" / "interventional_credit.py"))
    branchings = example["candidates_of"](
        Checkpoint.from_model(model, None), contexts, list(y), CreditFormula(0.5), positions=2, candidates=3
    )
    logps = [joint.next_logps(0, y[:t]) for t in range(3)]
    entropies = [-(p.exp() * p).sum().item() for p in logps]
    assert [len(b.prefix) for b in branchings] == sorted(sorted(range(3), key=lambda t: -entropies[t])[:2])
    for branching in branchings:
        t = len(branching.prefix)
        assert branching.candidates == tuple(logps[t].topk(3).indices.tolist())
        chosen = list(branching.candidates)
        teacher, contrast = joint.next_logps(0, y[:t], 1)[chosen], joint.next_logps(1, y[:t], 1)[chosen]
        torch.testing.assert_close(branching.rewards, teacher - logps[t][chosen])
        torch.testing.assert_close(branching.advantages, teacher - 0.5 * contrast - logps[t][chosen])


def test_policy_outcomes_continue_prefixes_and_grade_them(make_model, tokenizer, monkeypatch):
    checkpoint = Checkpoint.from_model(make_model(), tokenizer)
    task = load_task("quickstart")
    rows = list(task.build("test").take(2))
    gold = json.loads(rows[1]["answer"])
    end = tokenizer.eos_token_id
    text = f'Thought: so.\nAction: {gold["tool"]}\nAction Input: {{"city": "{gold["city"]}"}}'
    right = [*tokenizer(text)["input_ids"], end]
    graded = []
    grade = iv.grade_rollouts
    monkeypatch.setattr(iv, "grade_rollouts", lambda *args: (graded.extend(args[-1]), grade(*args))[1])
    sampling = SamplingConfig(1.0, top_p=1.0, max_completion_length=4, seed=1)
    outcomes = iv.policy_outcomes(checkpoint, task, rows, sampling)
    assert outcomes([1, 0, 1], [right, right, [6, 7]]) == [True, False, False]
    assert graded[:2] == [right, right]  # ended, so not continued
    assert graded[2][:2] == [6, 7]
    assert 3 <= len(graded[2]) <= 6
    for truncated in ({"top_p": 0.95}, {"top_p": 1.0, "top_k": 20}):
        with pytest.raises(ValueError, match="need `top_p=1` and `top_k=0`"):
            iv.policy_outcomes(checkpoint, task, rows, SamplingConfig(**truncated))
