"""`examples/credit_in_one_file.py` against TRL's SDPO and against this package."""

import runpy
from pathlib import Path

import pytest
import torch
from trl.experimental.sdpo import SDPOTrainer

from credit_trl import CreditConfig, CreditTrainer
from dense import move
from tiny import SMALL, build_tokenizer, save_model

SCRIPT = Path(__file__).parents[2] / "examples" / "credit_in_one_file.py"
OPTIONS = SMALL | {"loss_type": "grpo", "learning_rate": 1e-2, "max_steps": 3}


@pytest.fixture
def script():
    return runpy.run_path(str(SCRIPT))


@pytest.fixture
def make_trainer(script, tmp_path):
    """A trainer of a class and a λ on one random model."""
    path = save_model(tmp_path / "model")

    def make(trainer=None, coef=0.1):
        options = {"distillation_mode": "full_logits", "distillation_alpha": 1.0, "contrastive_coef": coef}
        config = script["CreditSDPOConfig"](str(tmp_path), include_environment_feedback=True, **options, **OPTIONS)
        trainer = trainer or script["CreditSDPOTrainer"]
        return trainer(path, script["reward"], config, script["make_rows"](8))

    return make


def test_lambda_0_equals_sdpo_bit_for_bit(make_trainer):
    weights = []
    for trainer, coef in ((None, 0.0), (SDPOTrainer, 0.1), (None, 0.1)):
        trained = make_trainer(trainer, coef)
        trained.train()
        weights.append(trained.model.state_dict())
    ours, theirs, credit = weights
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert any(not torch.equal(credit[name], theirs[name]) for name in theirs)


def test_gradient_equals_the_packages(make_trainer, script, tmp_path):
    """Two prompts a batch, so that both contrast with the only other one, of one length: rotations are in fp32."""
    one_file = make_trainer()
    templates = {name: getattr(one_file.args, name) for name in ("feedback_template", "reprompt_template")}
    objective = {"distillation_topk": len(build_tokenizer()), "contrastive_coef": 0.1, "packed": False}
    config = CreditConfig(str(tmp_path), **objective, **templates, **OPTIONS)
    dataset = script["make_rows"]().filter(lambda row: len(row["prompt"][0]["content"]) == len("What is 10 + 10?"))
    package = CreditTrainer(str(tmp_path / "model"), script["reward"], config, dataset)
    for trainer in (one_file, package):
        trainer.current_gradient_accumulation_steps = 1
        trainer.model.double().train()
    move(one_file.teacher_model.double().parameters())
    move(package.teacher.model.double().parameters())  # alike, away from the students

    rows = [row for row in package.train_dataset.select(range(2)) for _ in range(2)]
    inputs = package._generate_and_score_completions(rows)
    batch = {name: inputs[name] for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")}
    feedback = [row["privileged_context"] for row in rows]
    rewards = torch.zeros(len(rows))  # random tokens solve no sum
    batch |= one_file.teacher_context_builder.build(batch, [row["prompt"] for row in rows], rewards, feedback)
    one_file.compute_loss(one_file.model, batch).backward()
    package.compute_loss(package.model, inputs).backward()

    ours = dict(one_file.model.named_parameters())
    for name, parameter in package.model.named_parameters():
        assert parameter.grad.abs().max() > 1e-6
        torch.testing.assert_close(ours[name].grad, parameter.grad, rtol=1e-10, atol=1e-10)
