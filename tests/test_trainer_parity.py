"""Loss, gradients and weights of the trainer against TRL's SDPO and GRPO trainers; test_dense has Algorithm 1."""

import pytest
import torch
from trl.experimental.sdpo import SDPOConfig, SDPOTrainer

from credit_trl import CreditTrainer, Verdict
from dense import move
from tiny import QUIET


def mixed_rewards(completions, **kwargs):
    """Some rollouts succeed, some fail."""
    return [float(len(c[-1]["content"].encode()) % 3 == 0) for c in completions]


def mixed_verdicts(completions, answer, **kwargs):
    """These rewards, with feedback for all."""
    return [Verdict(r, f"The answer is {a}.") for r, a in zip(mixed_rewards(completions), answer, strict=True)]


def silent_on_some(completions, answer, **kwargs):
    """These rewards; samples without feedback have no teacher where no sibling succeeds."""
    rewards = mixed_rewards(completions)
    return [Verdict(0.0) if int(a) % 2 else Verdict(r, f"It is {a}.") for r, a in zip(rewards, answer, strict=True)]


def prepared(trainer, rows=2):
    """One training micro-batch as the trainer's loss receives it, in the rollouts' order."""
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    group = trainer.num_generations
    batch = [row for row in trainer.train_dataset.select(range(rows)) for _ in range(group)]
    build = trainer._build_contexts

    def recording(batch):
        trainer.contexts = build(batch)
        return trainer.contexts

    trainer._build_contexts = recording
    return trainer._generate_and_score_completions(batch)


def loss_and_gradients(trainer, inputs):
    trainer.model.zero_grad()
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None}


def assert_close(ours, theirs, rtol, atol):
    loss, gradients = ours
    other_loss, other_gradients = theirs
    torch.testing.assert_close(loss, other_loss, rtol=rtol, atol=atol)
    assert gradients.keys() == other_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            gradient, other_gradients[name], rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
        )


TEMPLATES = ("reprompt_template", "solution_template", "feedback_template")


@pytest.fixture
def sdpo_pair(make_model, make_config, tokenizer, dataset, tmp_path):
    """A CreditTrainer with λ = 0 and TRL's SDPOTrainer on the same weights, with references moved alike."""

    def make(form, alpha, tail, temperature):
        path = str(tmp_path / "model")
        make_model().save_pretrained(path)
        tokenizer.save_pretrained(path)
        rows = dataset.map(lambda row: {"privileged_context": f"Hint: {row['answer']}"})
        common = {"num_generations": 4, "max_completion_length": 6, "per_device_train_batch_size": 8}
        common |= {"distillation_alpha": alpha, "distillation_topk": len(tokenizer), "temperature": temperature}
        sdpo_options = {"distillation_mode": "topk_logits", "distillation_add_tail": tail == "bucket"}
        sdpo_options |= {"include_environment_feedback": True}
        trls = SDPOConfig(str(tmp_path / "sdpo"), **sdpo_options, **QUIET, **common)
        wording = {name: getattr(trls, name) for name in TEMPLATES}
        config = make_config(
            contrastive_form=form, contrastive_coef=0.0, distillation_tail=tail, loss_type="grpo", **wording, **common
        )
        ours = CreditTrainer(path, mixed_rewards, config, rows)
        theirs = SDPOTrainer(path, mixed_rewards, trls, rows)
        theirs.current_gradient_accumulation_steps = 1
        theirs.model.train()
        move(ours.teacher.model.parameters())
        theirs.teacher_model.load_state_dict(ours.teacher.model.state_dict())
        return ours, theirs

    return make


SDPO = [*((alpha, "bucket", 1.0) for alpha in (0.0, 0.5, 1.0)), (1.0, "bucket", 0.8), (0.5, "renormalize", 1.0)]


@pytest.mark.parametrize(("alpha", "tail", "temperature"), SDPO)
@pytest.mark.parametrize("form", ["subtract", "guide"])
def test_zero_lambda_equals_trls_sdpo(sdpo_pair, form, alpha, tail, temperature):
    ours, theirs = sdpo_pair(form, alpha, tail, temperature)
    inputs = prepared(ours)
    rollouts = ours._generation_batch
    feedbacks, rewards = [r["privileged_context"] for r in rollouts.rows], torch.tensor(rollouts.rewards)
    context = theirs.teacher_context_builder.build(inputs, rollouts.prompts, rewards, feedbacks=feedbacks)
    assert any(rollouts.rewards)
    assert not all(rollouts.rewards)

    width = inputs["completion_ids"].shape[1]
    prompts, masks = context["teacher_input_ids"][:, :-width], context["teacher_attention_mask"][:, :-width]
    for i, mask in enumerate(masks):
        assert ours.contexts[i].teacher == prompts[i][mask.bool()].tolist()

    assert_close(loss_and_gradients(ours, inputs), loss_and_gradients(theirs, {**inputs, **context}), 1e-5, 1e-7)


BLENDS = [
    (0.25, {"packed": False}),
    (0.5, {"packed": False}),
    (0.5, {}),
    (0.25, {"distillation_tail": "renormalize"}),
    (0.5, {"distillation_topk": None, "loss_type": "dapo"}),
    (0.5, {"distillation_support": "sampled", "top_entropy_quantile": 0.5}),
    (0.5, {"entropy_coef": 0.1, "loss_type": "bnpo", "temperature": 0.7}),
    (0.5, {"importance_sampling_level": "sequence", "num_iterations": 2, "loss_type": "sapo"}),
]


@pytest.mark.parametrize(("weight", "options"), BLENDS)
def test_blend_is_the_weighted_sum_of_both_gradients(make_trainer, weight, options):
    """GRPO's by TRL's pass of padded rows."""
    options = {"packed": True, "gradient_accumulation_steps": 1} | options
    policy = ("top_entropy_quantile", "entropy_coef", "importance_sampling_level")

    def gradients(distillation_weight, inputs=None):
        allowed = {k: v for k, v in options.items() if distillation_weight < 1.0 or k not in policy}
        allowed["packed"] = options["packed"] and distillation_weight > 0.0
        trainer = make_trainer(silent_on_some, distillation_weight=distillation_weight, **allowed)
        inputs = inputs or prepared(trainer)
        trainer.current_gradient_accumulation_steps = 1
        trainer.model.train()
        return inputs, loss_and_gradients(trainer, inputs)

    inputs, blend = gradients(weight)
    _, distilled = gradients(1.0, inputs)
    _, policy_only = gradients(0.0, inputs)
    assert not inputs["teacher_mask"].all()
    assert any(g.abs().max() > 1e-3 for g in policy_only[1].values())
    expected = {n: weight * g + (1 - weight) * policy_only[1][n] for n, g in distilled[1].items()}
    assert_close(blend, (weight * distilled[0] + (1 - weight) * policy_only[0], expected), 1e-5, 1e-6)
