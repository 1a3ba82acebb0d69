"""Methods of `examples/family`: weights against the papers' formulas in numpy, first-step losses in fp64."""

from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from credit_trl import Verdict
from credit_trl.contexts.builder import ContextBuilder
from credit_trl.loss.token_weight import TokenCredit
from credit_trl.teacher.models import make_teacher
from credit_trl.testing import check_source, check_weight
from credit_trl.training.step import CreditStep
from dense import gradients, logps, move, naive_loss, scoring_model, step_problem
from test_trainer_parity import loss_and_gradients, prepared

ROOT = Path(__file__).parents[2]
WRONG = "examples.family.wrong_feedback:wrong_feedback"


@pytest.fixture(autouse=True)
def checkout(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))


def method(name: str, function: str):
    return getattr(import_module(f"examples.family.{name}"), function)


@st.composite
def credits(draw):
    """Credit with zeros among the advantages, and a mask with a token of each sample."""
    size = draw(st.tuples(st.integers(1, 5), st.integers(1, 7)))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    f, generic, p, entropy = (torch.tensor(rng.normal(0, 2, size)) for _ in range(4))
    advantages = torch.tensor(rng.normal(0, 1, size[0]) * (rng.random(size[0]) > 0.2))
    mask = torch.tensor(rng.random(size) > 0.3)
    mask[:, 0] = True
    rewards = torch.tensor(rng.integers(0, 2, size[0]).astype(float))
    return TokenCredit(f, generic, f - generic, f - p, entropy.abs(), advantages, rewards, mask)


@given(credits())
@settings(max_examples=40, deadline=None)
def test_rlsd_is_the_clipped_ratio(credit):
    weights = method("rlsd", "ratio_weight")(credit)["grpo"].numpy()
    for weight, advantage, delta_v in zip(weights, credit.advantages.numpy(), credit.delta_v.numpy(), strict=True):
        ratio = np.exp(delta_v) ** np.sign(advantage)  # (P_T / P_S) ** sign(A)
        np.testing.assert_allclose(weight, 0.5 + 0.5 * np.clip(ratio, 0.8, 1.2), rtol=1e-12)


@given(credits())
@settings(max_examples=40, deadline=None)
def test_rlcsd_is_the_anchored_residual(credit):
    weights = method("rlcsd", "residual_weight")(credit)["grpo"].numpy()
    for weight, advantage, specific in zip(weights, credit.advantages.numpy(), credit.specific.numpy(), strict=True):
        moved = advantage + 0.1 * np.tanh(specific / 0.03)
        anchored = {1.0: np.maximum(moved, 0.0), -1.0: np.minimum(moved, 0.0), 0.0: 0.0 * moved}[np.sign(advantage)]
        if advantage == 0.0 or abs(advantage) >= 1e-3:
            np.testing.assert_allclose(advantage * weight, anchored, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "function"), [("rlsd", "ratio_weight"), ("rlcsd", "residual_weight"), ("srpo", "route")]
)
def test_weights_pass_the_check_of_extensions(name, function):
    check_weight(method(name, function))


@pytest.mark.parametrize("name", ["per_sample", "wrong_feedback"])
def test_sources_pass_the_check_of_extensions(name):
    check_source(method(name, name))


def test_residual_weights_of_equal_rewards_are_one():
    """TRL's advantages of equal rewards are what rounding leaves of (r − mean) / (std + 1e-4)."""
    rewards = torch.full((8,), 0.7)
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    assert (advantages != 0.0).any()
    values = torch.linspace(-3, 3, 40).view(8, 5)
    credit = TokenCredit(*[values] * 5, advantages, rewards, torch.ones(8, 5, dtype=torch.bool))
    assert torch.equal(method("rlcsd", "residual_weight")(credit)["grpo"], torch.ones(8, 5))


@given(credits())
@settings(max_examples=40, deadline=None)
def test_srpo_routes_failures_with_weights_of_mean_one(credit):
    weights = {name: w.numpy() for name, w in method("srpo", "route")(credit).items()}
    failed = (credit.rewards.numpy() < 1.0)[:, None] & credit.mask.numpy()
    assert ((weights["distillation"] > 0) == failed).all()
    assert (weights["grpo"] == ~failed).all()
    if failed.any():
        expected = np.exp(-credit.entropy.numpy()[failed])
        np.testing.assert_allclose(weights["distillation"][failed], expected / expected.mean(), rtol=1e-9)


def answers_verdicts(completions, answer, **kwargs):
    """Mixed rewards in every group and feedback that differs between rollouts."""
    texts = [c[-1]["content"] for c in completions]
    return [Verdict(float(i % 3 == 0), f"Not {t!r}: {a}.") for i, (t, a) in enumerate(zip(texts, answer, strict=True))]


# Method -> file, function, options.
METHODS = {
    "rlsd": ("rlsd", "ratio_weight", {"distillation_weight": 0.0, "contrastive_coef": 0.0}),
    "rlcsd": ("rlcsd", "residual_weight", {"distillation_weight": 0.0, "contrastive_source": WRONG}),
    "srpo": ("srpo", "route", {"distillation_weight": 0.3, "contrastive_coef": 0.0, "distillation_topk": None}),
}


@pytest.fixture
def make_trainer(make_model, make_trainer):
    def make(token_weight, verifier=answers_verdicts, dtype=torch.float64, **options):
        trainer = make_trainer(verifier, model=make_model(dtype=dtype), token_weight=token_weight, **options)
        if trainer.teacher is not None:
            move(trainer.teacher.model.parameters(), scale=0.02)
        return trainer

    return make


def naive_sample(name, advantage, is_success, p, teacher_logps, g, tokens):
    """(t,) losses of one sample before the average over the tokens of the batch."""
    at = torch.arange(len(tokens)), tokens
    surrogate = (p[at] - p[at].detach()).exp()  # GRPO's ratio on-policy
    if name == "rlsd":
        ratio = (teacher_logps - p)[at].detach().exp() ** torch.sign(advantage)
        return -advantage * (0.5 + 0.5 * ratio.clamp(0.8, 1.2)) * surrogate
    if name == "rlcsd":
        if not g:  # no wrong context
            return -advantage * surrogate
        moved = advantage + 0.1 * torch.tanh((teacher_logps - sum(g) / len(g))[at] / 0.03)
        moved = moved.clamp(min=0) if advantage > 0 else moved.clamp(max=0) if advantage < 0 else 0 * moved
        return -moved * surrogate
    if is_success:
        return -0.7 * advantage * surrogate
    return 0.3 * (p.exp() * (p - teacher_logps)).sum(-1)


@pytest.mark.parametrize("name", METHODS)
def test_first_step_loss_is_the_formula(make_trainer, name):
    file, function, options = METHODS[name]
    trainer = make_trainer(method(file, function), **options)
    inputs = prepared(trainer)
    loss, trainer_gradients = loss_and_gradients(trainer, inputs)
    teacher, model = trainer.teacher.model, trainer.model
    rewards = torch.tensor(trainer._generation_batch.rewards, dtype=torch.float64).view(-1, 4)
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).flatten()
    losses, entropies = [], {}
    for i, completion in enumerate(trainer._generation_batch.completion_ids):
        prompt = inputs["prompt_ids"][i][inputs["prompt_mask"][i].bool()].tolist()
        with torch.no_grad():
            f = logps(teacher, trainer.contexts[i].teacher, completion, 1.0)
            g = [logps(teacher, ids, completion, 1.0) for ids in trainer.contexts[i].contrasts]
        is_success = rewards.flatten()[i] >= 1
        p = logps(model, prompt, completion, 1.0)
        losses.append(naive_sample(name, advantages[i], is_success, p, f, g, torch.tensor(completion)))
        if not is_success:
            entropies[i] = -(f.exp() * f).sum(-1)
    if name == "srpo":
        mean = torch.cat([(-entropy).exp() for entropy in entropies.values()]).mean()
        for i, entropy in entropies.items():
            losses[i] = losses[i] * (-entropy).exp() / mean
    if name == "rlcsd":
        assert any(contexts.contrasts for contexts in trainer.contexts)
    model.zero_grad()
    expected = torch.cat(losses).mean()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    for parameter_name, parameter in model.named_parameters():
        torch.testing.assert_close(trainer_gradients[parameter_name], parameter.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loss_type", ["dapo", pytest.param("grpo", marks=pytest.mark.slow)])
def test_weights_of_one_are_grpo_bit_for_bit(make_trainer, loss_type):
    def trained(token_weight):
        options = {"distillation_weight": 0.0, "loss_type": loss_type, "max_steps": 3}
        trainer = make_trainer(token_weight, dtype=torch.float32, **options)
        trainer.train()
        return trainer.model.state_dict()

    ours = trained(lambda credit: {"grpo": torch.ones_like(credit.delta_v)})
    theirs = trained(None)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    weighted = trained(method("rlsd", "ratio_weight"))
    assert not all(torch.equal(weighted[name], theirs[name]) for name in theirs)


def test_wrong_contexts_are_of_failed_siblings_with_the_parts_of_z(make_trainer, tokenizer):
    def verdicts(completions, **kwargs):
        return [Verdict(float(i % 4 == 0), f"wrong number {i}") for i in range(len(completions))]

    trainer = make_trainer(None, verdicts, contrastive_source=WRONG, contrastive_count=2)
    inputs = prepared(trainer)
    texts = tokenizer.batch_decode(inputs["completion_ids"], skip_special_tokens=True)
    for i, sample_contexts in enumerate(trainer.contexts):
        siblings = {j for j in range(i // 4 * 4, i // 4 * 4 + 4) if j % 4 and j != i}
        read_siblings = set()
        for ids in sample_contexts.contrasts:
            text = tokenizer.decode(ids)
            (sibling,) = (j for j in range(8) if f"wrong number {j}" in text)
            assert f"Correct solution:\n{texts[sibling]}" in text or sample_contexts.privileged.demonstration is None
            read_siblings.add(sibling)
        assert read_siblings <= siblings
        assert len(read_siblings) == 2


def test_groups_without_another_failure_have_no_wrong_context(make_trainer):
    def verdicts(completions, **kwargs):
        return [Verdict(float(i % 4 > 0), f"{i}") for i in range(len(completions))]

    trainer = make_trainer(None, verdicts, contrastive_source=WRONG)
    assert prepared(trainer)["contrast_mask"].tolist() == [False, True, True, True] * 2


def test_temper_only_is_the_target_without_contrast(make_config, tokenizer):
    config = make_config(contrastive_coef=0.0, distillation_topk=None, loss_type="grpo", num_generations=2)
    problem = step_problem(tokenizer, config)
    method("temper_only", "temper")(problem.step, 0.3)
    problem.tensors |= problem.step.prepare(problem.batch, problem.tensors)
    ours = gradients(problem.step.loss(problem.policy, problem.tensors).terms.loss, problem.policy)
    teacher = scoring_model(problem)

    class Tempered(torch.nn.Module):
        def forward(self, input_ids):
            output = teacher(input_ids=input_ids)
            output.logits = 0.7 * output.logits
            return output

    theirs = gradients(naive_loss(problem, Tempered()), problem.policy)
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-9, atol=1e-11)
    live = make_config(teacher_model_kind="live")
    with pytest.raises(ValueError, match="full-weight"):
        method("temper_only", "temper")(
            CreditStep(live, ContextBuilder(tokenizer, live), make_teacher("live", problem.policy)), 0.1
        )


@pytest.mark.parametrize(("options", "size"), [({}, 16), ({"per_device_eval_batch_size": 8}, 8)])
def test_an_evaluation_batch_of_a_token_weight_has_two_prompts(make_trainer, options, size):
    """At weight 0 too, or no sample of an evaluation had a contrast prompt."""
    sizes = {"distillation_weight": 0.0, "num_generations": 8, "per_device_train_batch_size": 16}
    weighted = make_trainer(method("rlcsd", "residual_weight"), **sizes, **options)
    assert weighted.args.per_device_eval_batch_size == size
    assert make_trainer(None, **sizes).args.per_device_eval_batch_size == 8
