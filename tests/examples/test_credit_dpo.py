"""The contrast of policy-ratio rewards: against Bayes' rule, DPO's optimum, PRIME's sums and TRL's own numbers."""

import runpy
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from trl import DPOConfig, DPOTrainer

from credit_trl.lab.analysis.pmi import contrastive_pmi
from tiny import QUIET

credit_rewards = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "credit_dpo.py"))["credit_rewards"]
seeds = st.integers(0, 10_000)
coefs = st.floats(0, 1.5)


def draws(seed, *shape):
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield -torch.rand(*shape, generator=generator, dtype=torch.float64) * 5


@given(seed=seeds, coef=coefs, beta=st.floats(0.01, 2))
def test_zero_lambda_is_the_ratio_and_x_itself_cancels_it(seed, coef, beta):
    draw = draws(seed, 4)
    policy, reference = next(draw), next(draw)
    plain = beta * (policy - reference)
    others = torch.stack([next(draw) for _ in range(6)]).view(2, 3, 4)
    torch.testing.assert_close(credit_rewards(policy, reference, *others, 0.0, beta), plain)
    same = policy.expand(3, -1), reference.expand(3, -1)
    torch.testing.assert_close(credit_rewards(policy, reference, *same, coef, beta), (1 - coef) * plain)


@given(seed=seeds, coef=coefs)
def test_two_passes_of_one_joint_give_bayes_contrastive_pmi(seed, coef):
    """P(y, z | x) over 5 answers and 3 feedbacks for 4 questions; the policy has read z = 1."""
    generator = torch.Generator().manual_seed(seed)
    joint = torch.randn(4, 15, generator=generator, dtype=torch.float64).softmax(-1).view(4, 5, 3)
    reference = joint.sum(-1).log()  # log π_ref(y | x)
    policy = (joint[..., 1] / joint[..., 1].sum(-1, keepdim=True)).log()  # log π_ref(y | x, z)
    privileged = (joint / joint.sum(-1, keepdim=True))[..., 1] / joint.sum(1)[:, None, 1]  # P(z | x, y) / P(z | x)
    rewards = credit_rewards(policy[0], reference[0], policy[1:], reference[1:], coef, 1.0)
    torch.testing.assert_close(rewards, privileged[0].log() - coef * privileged[1:].log().mean(0))


@given(seed=seeds, coef=coefs, beta=st.floats(0.05, 1.0))
def test_generic_part_cancels_at_dpos_optimum(seed, coef, beta):
    """π*(y | x) ∝ π_ref(y | x) exp((s(x, y) + g(y)) / β) for any s and g; 5 answers, question 0 and 3 others."""
    draw = draws(seed, 4, 5)
    reference, specific = next(draw).log_softmax(-1), next(draw) / 5
    generic, margins = next(draw)[0] / 5, []
    for added in (generic, torch.zeros(5, dtype=torch.float64)):
        policy = (reference + (specific + added) / beta).log_softmax(-1)
        found = credit_rewards(policy[0], reference[0], policy[1:], reference[1:], coef, beta)
        margins.append(found[:, None] - found[None])
    expected = specific[0] - coef * specific[1:].mean(0)
    torch.testing.assert_close(margins[1], expected[:, None] - expected[None], rtol=1e-6, atol=1e-9)
    lifted = margins[1] + (1 - coef) * (generic[:, None] - generic[None])
    torch.testing.assert_close(margins[0], lifted, rtol=1e-6, atol=1e-9)


@given(seed=seeds, coef=coefs)
def test_token_rewards_sum_to_the_analysis_contrastive_pmi(seed, coef):
    draw = draws(seed, 2, 7)
    passes = next(draw), next(draw), *(torch.stack([next(draw) for _ in range(3)]) for _ in range(2))
    whole = contrastive_pmi(*passes, coef)["contrastive_pmi"]
    torch.testing.assert_close(credit_rewards(*passes, coef, 1.0).sum(-1), whole)


def test_zero_lambda_is_the_reward_of_trls_dpo_trainer(make_model, tokenizer, tmp_path):
    data = Dataset.from_list([{"prompt": f"{a}+1=", "chosen": f"{a + 1}.", "rejected": f"{a}, no?"} for a in range(6)])
    options = QUIET | {f"per_device_{split}_batch_size": 6 for split in ("train", "eval")}
    config = DPOConfig(str(tmp_path), beta=0.3, max_steps=3, learning_rate=1e-2, **options)
    trainer = DPOTrainer(make_model(), make_model(), config, None, data, data, tokenizer)
    trainer.train()
    logged = trainer.evaluate()

    @torch.no_grad()
    def logps(model, answers):
        sums = []
        for x, y in zip(trainer.eval_dataset["prompt_ids"], answers, strict=True):
            logits = model(torch.tensor([x + y])).logits[0, len(x) - 1 : -1]
            sums.append(logits.log_softmax(-1).gather(-1, torch.tensor(y)[:, None]).sum())
        return torch.stack(sums)

    rewards = {}
    for name in ("chosen", "rejected"):
        own = [
            logps(model, trainer.eval_dataset[f"{name}_ids"]) for model in (trainer.model.eval(), trainer.ref_model)
        ]
        rewards[name] = credit_rewards(*own, *(x[None] for x in own), 0.0, trainer.beta)
        assert rewards[name].mean().item() == pytest.approx(logged[f"eval_rewards/{name}"], rel=1e-3, abs=1e-5)
    margin = (rewards["chosen"] - rewards["rejected"]).mean().item()
    assert abs(margin) > 1e-3  # it has moved from the reference
    assert margin == pytest.approx(logged["eval_rewards/margins"], rel=1e-3)
