"""Uses of the credit in the trainer; their formulas are in `test_objective_uses.py` and `test_family.py`."""

from __future__ import annotations

import pytest
import torch

from credit_trl import CreditTrainer, Verdict
from test_trainer_parity import loss_and_gradients, mixed_verdicts, perturb, prepared


@pytest.fixture
def make_trainer(make_model, make_config, tokenizer, dataset):
    def make(verifier=mixed_verdicts, **options):
        trainer = CreditTrainer(make_model(), verifier, make_config(**options), dataset, processing_class=tokenizer)
        if trainer.teacher is not None:
            perturb(trainer.teacher.model, scale=0.02)
        return trainer

    return make


def alternating_verdicts(completions, answer, **kwargs):
    return [Verdict(float(i % 2), f"The answer is {a}.") for i, a in enumerate(answer)]


def half_taught(completions, answer, **kwargs):
    """Feedback for the second of every two rollouts."""
    return [Verdict(float(i % 4 == 0), f"The answer is {a}." if i % 2 else None) for i, a in enumerate(answer)]


@pytest.mark.parametrize(
    "loss_type",
    ["dapo", *(pytest.param(t, marks=pytest.mark.slow) for t in ("grpo", "dr_grpo", "bnpo", "cispo", "sapo"))],
)
def test_modulation_with_weights_of_one_is_grpo_bit_for_bit(make_trainer, loss_type):
    def trained(**options):
        trainer = make_trainer(alternating_verdicts, loss_type=loss_type, max_steps=3, **options)
        trainer.train()
        return trainer.model.state_dict()

    ours = trained(credit_use="modulate", credit_weight_temperature=1e30)
    theirs = trained(distillation_weight=0.0)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    weighted = trained(credit_use="modulate", credit_weight_clip=0.9)
    assert not all(torch.equal(weighted[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("weight", ["delta_v", "s"])
def test_modulated_weights_have_mean_one_and_the_verifiers_sign(make_trainer, weight):
    trainer = make_trainer(alternating_verdicts, credit_use="modulate", credit_weight=weight, credit_weight_clip=0.5)
    inputs = prepared(trainer)
    mask, advantages = inputs["completion_mask"].bool(), inputs["advantages"]
    assert advantages.shape == mask.shape
    for i, (own, kept) in enumerate(zip(advantages, mask, strict=True)):
        assert own[kept].std() > 0
        assert (own[kept].sign() == (1 if i % 2 else -1)).all()
        assert own[kept].abs().mean().item() == pytest.approx(0.8660, abs=1e-3)  # GRPO's at two of four


def test_samples_without_a_teacher_keep_grpos_advantage(make_trainer):
    trainer = make_trainer(half_taught, credit_use="modulate", use_successful_as_teacher=False)
    inputs = prepared(trainer)
    for i, own in enumerate(inputs["advantages"]):
        kept = own[inputs["completion_mask"][i].bool()]
        assert (kept.std().item() > 0) == (i % 2 == 1)


def test_routing_gives_successes_to_grpo_and_failures_to_the_teacher(make_trainer):
    trainer = make_trainer(half_taught, credit_use="route", use_successful_as_teacher=False)
    inputs = prepared(trainer)
    assert inputs["teacher_mask"].tolist() == [False, True, False, True] * 2  # failures with feedback
    assert (inputs["advantages"] != 0).tolist() == [True, False, True, False] * 2
    assert trainer._metrics["train"]["credit/frac_routed"] == [0.5]


def test_routed_loss_is_the_sum_of_both_on_one_divisor(make_trainer):
    trainer = make_trainer(half_taught, credit_use="route", distillation_weight=0.7, use_successful_as_teacher=False)
    inputs = prepared(trainer)
    loss, gradients = loss_and_gradients(trainer, inputs)
    trainer.model.zero_grad()
    distilled = trainer._distillation_loss(trainer.model, inputs)
    policy = super(CreditTrainer, trainer)._compute_loss(trainer.model, inputs)
    (0.7 * distilled + policy).backward()
    torch.testing.assert_close(loss, (0.7 * distilled + policy).detach())
    for name, parameter in trainer.model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-5, atol=1e-7)


def test_entropy_weights_have_mean_one_over_the_distilled_tokens(make_trainer):
    trainer = make_trainer(half_taught, credit_use="route", credit_weight="entropy", credit_weight_temperature=0.1)
    inputs = prepared(trainer)
    mask = inputs["completion_mask"].bool() & inputs["teacher_mask"][:, None]
    assert inputs["credit_weights"][mask].mean().item() == pytest.approx(1.0, rel=1e-5)
    assert inputs["credit_weights"][mask].std() > 0.01
    assert (inputs["credit_weights"][~mask] == 1).all()


def test_entropy_weights_train_with_a_support_of_the_whole_vocabulary(make_trainer, tokenizer):
    options = {"credit_weight": "entropy", "distillation_topk": len(tokenizer)}
    trainer = make_trainer(half_taught, credit_use="route", **options)
    assert torch.isfinite(loss_and_gradients(trainer, prepared(trainer))[0])


@pytest.mark.slow
def test_modulation_trains_over_several_micro_batches_and_iterations(make_trainer):
    options = {"per_device_train_batch_size": 4, "steps_per_generation": 2, "num_iterations": 2, "max_steps": 4}
    trainer = make_trainer(alternating_verdicts, credit_use="modulate", credit_weight="s", **options)
    trainer.train()
    assert all(row["grad_norm"] > 0 for row in trainer.state.log_history if "grad_norm" in row)


def test_wrong_contexts_are_of_failed_siblings_with_the_parts_of_z(make_trainer, tokenizer):
    trainer = make_trainer(
        lambda completions, answer, **kwargs: [
            Verdict(float(i % 4 == 0), f"wrong number {i}") for i in range(len(completions))
        ],
        contrastive_source="wrong_feedback",
        contrastive_count=2,
    )
    built = []
    build = trainer._build_contexts
    trainer._build_contexts = lambda batch: built.extend(build(batch)) or built
    inputs = prepared(trainer)
    texts = tokenizer.batch_decode(inputs["completion_ids"], skip_special_tokens=True)
    for i, own in enumerate(built):
        group = range(i // 4 * 4, i // 4 * 4 + 4)
        siblings = {j for j in group if j % 4 and j != i}
        found = set()
        for ids in own.contrasts:
            text = tokenizer.decode(ids)
            (sibling,) = (j for j in range(8) if f"wrong number {j}" in text)
            assert f"Correct solution:\n\n{texts[sibling]}" in text or own.privileged.demonstration is None
            found.add(sibling)
        assert found <= siblings
        assert len(found) == 2


def test_groups_without_another_failure_have_no_wrong_context(make_trainer):
    trainer = make_trainer(
        lambda completions, **kwargs: [Verdict(float(i % 4 > 0), f"{i}") for i in range(len(completions))],
        contrastive_source="wrong_feedback",
    )
    inputs = prepared(trainer)
    assert inputs["contrast_mask"].tolist() == [False, True, True, True] * 2
    assert trainer._metrics["train"]["credit/frac_without_contrast"] == [0.25]
