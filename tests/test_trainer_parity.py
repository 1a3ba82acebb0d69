"""The trainer's loss and gradients against naive forward passes and against TRL's SDPO and GRPO trainers."""

from __future__ import annotations

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer
from trl.experimental.sdpo import SDPOConfig, SDPOTrainer

from credit_trl import CreditTrainer, Verdict


def mixed_verdicts(completions, answer, **kwargs):
    """Some rollouts succeed, some fail; feedback for all."""
    return [
        Verdict(float(len(c[-1]["content"].encode()) % 3 == 0), f"The answer is {a}.")
        for c, a in zip(completions, answer, strict=True)
    ]


def perturb(model, seed=7, scale=0.05):
    """Move the reference away from the student, so that the two cannot be confused."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter += scale * noise.to(parameter.dtype)


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


def logps(model, prompt, completion, temperature=1.0):
    """Next-token log-probabilities of one completion under one prompt: the plainest forward pass."""
    ids = torch.tensor([prompt + completion])
    logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / temperature, dim=-1)


def samples(inputs):
    """(prompt ids, completion ids) of each sample, without padding."""
    for i in range(len(inputs["prompt_ids"])):
        prompt = inputs["prompt_ids"][i][inputs["prompt_mask"][i].bool()].tolist()
        yield prompt, inputs["completion_ids"][i][inputs["completion_mask"][i].bool()].tolist()


@pytest.mark.parametrize(("form", "coef"), [("subtract", 0.3), ("guide", 1.5)])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradient_is_that_of_algorithm_1(make_model, make_config, tokenizer, dataset, temperature, form, coef):
    config = make_config(
        distillation_topk=len(tokenizer),
        contrastive_count=2,
        contrastive_form=form,
        contrastive_coef=coef,
        loss_type="grpo",
        temperature=temperature,
    )
    trainer = CreditTrainer(
        make_model(dtype=torch.float64), mixed_verdicts, config, dataset, processing_class=tokenizer
    )
    perturb(trainer.teacher.model)
    inputs = prepared(trainer)
    ours = loss_and_gradients(trainer, inputs)[1]

    student, teacher = trainer.model, trainer.teacher.model
    student.zero_grad()
    contexts = [[c.teacher, *c.contrasts] for c in trainer.contexts]
    surrogate = 0.0
    for (prompt, completion), (own, *others) in zip(samples(inputs), contexts, strict=True):
        assert len(others) == 2
        policy = logps(student, prompt, completion, temperature)
        with torch.no_grad():
            f = logps(teacher, own, completion, temperature)
            g = sum(logps(teacher, other, completion, temperature) for other in others) / 2
            advantages = (f - coef * g if form == "subtract" else f + coef * (f - g)) - policy
        surrogate = surrogate - (policy.exp() * advantages).sum(-1).mean() / len(contexts)
    surrogate.backward()

    for name, parameter in student.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-6, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


SDPO_FEEDBACK = "\nThe following is feedback from your unsuccessful earlier attempt:\n\n{feedback_raw}\n\n"
SDPO_REPROMPT = "{prompt}{solution}{feedback}\n\nCorrectly solve the original question.\n"


@pytest.fixture
def sdpo_pair(make_model, make_config, tokenizer, dataset, tmp_path):
    """A CreditTrainer with λ = 0 and TRL's SDPOTrainer on the same weights, with references moved alike."""

    def make(alpha, **options):
        path = str(tmp_path / "model")
        make_model().save_pretrained(path)
        tokenizer.save_pretrained(path)
        rows = dataset.map(lambda row: {"privileged_context": f"Hint: {row['answer']}"})
        ours = CreditTrainer(
            path,
            lambda completions, **kwargs: [v.reward for v in mixed_verdicts(completions, **kwargs)],
            make_config(
                contrastive_coef=0.0,
                distillation_topk=len(tokenizer),
                distillation_alpha=alpha,
                loss_type="grpo",
                feedback_template=SDPO_FEEDBACK,
                reprompt_template=SDPO_REPROMPT,
                **options,
            ),
            rows,
        )
        theirs = SDPOTrainer(
            path,
            ours.reward_funcs,
            SDPOConfig(
                output_dir=str(tmp_path / "sdpo"),
                use_cpu=True,
                bf16=False,
                report_to="none",
                per_device_train_batch_size=8,
                num_generations=4,
                max_completion_length=6,
                distillation_mode="topk_logits",
                distillation_topk=len(tokenizer),
                distillation_add_tail=options.get("distillation_tail", "bucket") == "bucket",
                distillation_alpha=alpha,
                include_environment_feedback=True,
                gradient_checkpointing=False,
                temperature=options.get("temperature", 1.0),
            ),
            rows,
        )
        theirs.current_gradient_accumulation_steps = 1
        theirs.model.train()
        perturb(ours.teacher.model)
        theirs.teacher_model.load_state_dict(ours.teacher.model.state_dict())
        return ours, theirs

    return make


@pytest.mark.parametrize(
    ("alpha", "options"),
    [
        (0.0, {}),
        (0.5, {}),
        (1.0, {}),
        (1.0, {"temperature": 0.8}),
        (0.5, {"distillation_tail": "renormalize"}),
    ],
)
@pytest.mark.parametrize("form", ["subtract", "guide"])
def test_zero_lambda_equals_trls_sdpo(sdpo_pair, alpha, options, form):
    ours, theirs = sdpo_pair(alpha, contrastive_form=form, **options)
    inputs = prepared(ours)
    rollouts = ours._generation_batch
    context = theirs.teacher_context_builder.build(
        inputs,
        rollouts.prompts,
        torch.tensor(rollouts.rewards),
        feedbacks=[r["privileged_context"] for r in rollouts.rows],
    )
    assert any(rollouts.rewards)
    assert not all(rollouts.rewards)

    width = inputs["completion_ids"].shape[1]
    prompts, masks = context["teacher_input_ids"][:, :-width], context["teacher_attention_mask"][:, :-width]
    for i, mask in enumerate(masks):
        assert ours.contexts[i].teacher == prompts[i][mask.bool()].tolist()

    assert_close(loss_and_gradients(ours, inputs), loss_and_gradients(theirs, {**inputs, **context}), 1e-5, 1e-7)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "bnpo"])
def test_zero_weight_equals_trls_grpo_for_whole_runs(make_model, make_config, tokenizer, dataset, tmp_path, loss_type):
    config = make_config(distillation_weight=0.0, max_steps=3, loss_type=loss_type, beta=0.0)
    ours = CreditTrainer(make_model(), mixed_verdicts, config, dataset, processing_class=tokenizer)
    ours.train()
    plain = GRPOConfig(
        **{
            k: getattr(config, k)
            for k in (
                "output_dir use_cpu bf16 per_device_train_batch_size num_generations max_completion_length "
                "max_steps learning_rate logging_steps save_strategy report_to gradient_checkpointing disable_tqdm "
                "seed loss_type"
            ).split()
        }
    )
    theirs = GRPOTrainer(
        make_model(),
        lambda completions, **kwargs: [v.reward for v in mixed_verdicts(completions, **kwargs)],
        plain,
        dataset,
        processing_class=tokenizer,
    )
    theirs.train()
    for (name, parameter), other in zip(ours.model.named_parameters(), theirs.model.parameters(), strict=True):
        assert torch.equal(parameter, other), name
    assert any(not torch.equal(p, q) for p, q in zip(ours.model.parameters(), make_model().parameters(), strict=True))


@pytest.mark.parametrize("weight", [0.25, 0.5])
def test_blend_is_the_weighted_sum_of_both_gradients(make_model, make_config, tokenizer, dataset, weight):
    def gradients(distillation_weight, inputs=None):
        trainer = CreditTrainer(
            make_model(),
            mixed_verdicts,
            make_config(distillation_weight=distillation_weight),
            dataset,
            processing_class=tokenizer,
        )
        inputs = inputs or prepared(trainer)
        trainer.current_gradient_accumulation_steps = 1
        trainer.model.train()
        return inputs, loss_and_gradients(trainer, inputs)

    inputs, distilled = gradients(1.0)
    _, policy = gradients(0.0, inputs)
    _, blend = gradients(weight, inputs)
    expected = {n: weight * g + (1 - weight) * policy[1][n] for n, g in distilled[1].items()}
    assert_close(blend, (weight * distilled[0] + (1 - weight) * policy[0], expected), 1e-5, 1e-7)


def test_three_contrasts_are_the_mean_of_the_three(make_model, make_config, tokenizer, dataset):
    config = make_config(contrastive_count=3, per_device_train_batch_size=16, distillation_support="sampled")
    trainer = CreditTrainer(make_model(), mixed_verdicts, config, dataset, processing_class=tokenizer)
    perturb(trainer.teacher.model)
    inputs = prepared(trainer, rows=4)
    for i, (_, completion) in enumerate(samples(inputs)):
        own, others = trainer.contexts[i].teacher, trainer.contexts[i].contrasts
        assert len({tuple(ids) for ids in others}) == 3
        column = torch.tensor(completion)[:, None]
        with torch.no_grad():
            g = torch.stack([logps(trainer.teacher.model, ids, completion).gather(-1, column) for ids in others])
            f = logps(trainer.teacher.model, own, completion).gather(-1, column)
        width = len(completion)
        torch.testing.assert_close(inputs["generic_token_logps"][i, :width], g.mean(0)[:, 0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(inputs["teacher_token_logps"][i, :width], f[:, 0], rtol=1e-4, atol=1e-5)
