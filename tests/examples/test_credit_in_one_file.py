"""`examples/credit_in_one_file.py` against TRL's SDPO and against this package."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from trl.experimental.sdpo import SDPOTrainer

from credit_trl import CreditConfig, CreditTrainer
from tiny import build_tokenizer, save_model

SCRIPT = Path(__file__).parents[2] / "examples" / "credit_in_one_file.py"
FEEDBACK = "\nThe following is feedback from your unsuccessful earlier attempt:\n\n{feedback_raw}\n\n"
REPROMPT = "{prompt}{solution}{feedback}\n\nCorrectly solve the original question.\n"
SMALL = {
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "gradient_checkpointing": False,
    "disable_tqdm": True,
    "per_device_train_batch_size": 4,
    "num_generations": 2,
    "max_completion_length": 6,
    "learning_rate": 1e-2,
    "max_steps": 3,
    "save_strategy": "no",
}


@pytest.fixture
def script():
    return runpy.run_path(str(SCRIPT))


@pytest.fixture
def make_trainer(script, tmp_path):
    """A trainer of a class and a λ on one random model."""
    path = save_model(tmp_path / "model")

    def make(trainer=script["CreditSDPOTrainer"], coef=0.1, **options):
        config = script["CreditSDPOConfig"](
            output_dir=str(tmp_path / "run"),
            include_environment_feedback=True,
            distillation_mode="full_logits",
            distillation_alpha=1.0,
            contrastive_coef=coef,
            **(SMALL | options),
        )
        return trainer(path, script["reward"], config, script["make_rows"](8))

    return make


def weights_after_three_steps(trainer):
    trainer.train()
    return trainer.model.state_dict()


def test_lambda_0_equals_sdpo_bit_for_bit(make_trainer):
    ours = weights_after_three_steps(make_trainer(coef=0.0))
    theirs = weights_after_three_steps(make_trainer(SDPOTrainer, coef=0.0))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_contrast_changes_the_weights(make_trainer):
    ours = weights_after_three_steps(make_trainer(contrastive_count=1))
    theirs = weights_after_three_steps(make_trainer(SDPOTrainer))
    assert any(not torch.equal(ours[name], theirs[name]) for name in theirs)


def gradient_of(trainer, inputs):
    trainer.model.zero_grad()
    trainer.compute_loss(trainer.model, inputs).backward()
    return {name: p.grad for name, p in trainer.model.named_parameters()}


def test_gradient_equals_the_packages(make_trainer, script, tmp_path):
    """Two prompts a batch, so that both contrast with the only other one, of one length: rotations are in fp32."""
    one_file = make_trainer(loss_type="grpo")
    config = CreditConfig(
        output_dir=str(tmp_path / "ours"),
        distillation_topk=len(build_tokenizer()),
        contrastive_coef=0.1,
        feedback_template=FEEDBACK,
        reprompt_template=REPROMPT,
        loss_type="grpo",
        **SMALL,
    )
    dataset = script["make_rows"]().filter(lambda row: len(row["prompt"][0]["content"]) == len("What is 10 + 10?"))
    package = CreditTrainer(str(tmp_path / "model"), script["reward"], config, dataset)
    for trainer in (one_file, package):
        trainer.current_gradient_accumulation_steps = 1
        trainer.model.double().train()
    perturb_teachers(one_file.teacher_model.double(), package.teacher.model.double())

    rows = [row for row in package.train_dataset.select(range(2)) for _ in range(2)]
    inputs = package._generate_and_score_completions(rows)
    batch = {name: inputs[name] for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")}
    feedback = [row["privileged_context"] for row in rows]
    rewards = torch.zeros(len(rows))  # random tokens solve no sum
    batch |= one_file.teacher_context_builder.build(batch, [row["prompt"] for row in rows], rewards, feedback)

    ours = gradient_of(one_file, batch)
    theirs = gradient_of(package, inputs)
    assert max(gradient.abs().max() for gradient in theirs.values()) > 1e-3
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


def perturb_teachers(*models):
    """Move two teachers alike, away from their students."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameters in zip(*(model.parameters() for model in models), strict=True):
            noise = 0.05 * torch.randn(parameters[0].shape, generator=generator, dtype=torch.float64)
            for parameter in parameters:
                parameter += noise
