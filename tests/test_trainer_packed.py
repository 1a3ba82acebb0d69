"""GRPO with `packed=True` against TRL's trainer: losses, gradients and weights of three optimizer steps.

Weights move by SGD, since Adam divides a gradient by its size: rounding of a gradient near 0 would be a whole step.
"""

from dataclasses import dataclass

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PromptTuningConfig
from trl import GRPOConfig, GRPOTrainer

from credit_trl import CreditConfig, CreditTrainer
from credit_trl.teacher.packing import cannot_pack
from credit_trl.training.metrics import CreditWarning
from families import FAMILIES, build_family
from test_trainer_options import BASE, BESIDE, NOT_RUN, global_state, options  # noqa: F401, a fixture
from test_trainer_parity import mixed_rewards, mixed_verdicts
from tiny import build_model

ADAM = {"optim", "optim_args", "optim_target_modules", "adam_beta1", "adam_beta2", "adam_epsilon"}
COMMON = {"max_steps": 3, "optim": "sgd", "learning_rate": 0.1, "num_iterations": 1, "max_completion_length": 12}
LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
ACCUMULATED = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
VARIANTS = {
    "off-policy": {"num_iterations": 2},
    "reference": {"beta": 0.1},
    "entropy bonus": {"entropy_coef": 0.1},
    "entropy mask": {"top_entropy_quantile": 0.5},
    "sequence ratios": {"importance_sampling_level": "sequence", "num_iterations": 2},
    "off-policy mask": {"off_policy_mask_threshold": 0.1, "num_iterations": 2},
    "accumulated": ACCUMULATED | {"temperature": 0.7},
}
LOSSES = [
    pytest.param({"loss_type": loss_type} | variant, id=f"{loss_type}, {name}", marks=pytest.mark.slow)
    for loss_type in LOSS_TYPES
    for name, variant in VARIANTS.items()
]
FAST = [
    {"loss_type": "dapo", "entropy_coef": 0.1} | ACCUMULATED,
    {"loss_type": "sapo", "top_entropy_quantile": 0.5, "num_iterations": 2},
]
OPTIONS = [
    pytest.param(BESIDE.get(name, {}) | {name: value}, id=name, marks=pytest.mark.slow)
    for name, value in options().items()
    if name not in {*NOT_RUN, *ADAM, *BASE, *COMMON}
]


@dataclass
class Run:
    """What three optimizer steps of a trainer did."""

    losses: list[float]  # of each optimizer step
    gradients: list[dict[str, torch.Tensor]]
    weights: dict[str, torch.Tensor]
    trainer: GRPOTrainer

    @property
    def largest_gradient(self) -> float:
        return max(gradient.abs().max().item() for step in self.gradients for gradient in step.values())


@pytest.fixture
def train(tokenizer, tmp_path):
    sums = [(a, b) for a in range(3) for b in (1, 2)]
    rows = Dataset.from_list(
        [{"prompt": [{"role": "user", "content": f"{a}+{b}=" * (a + 1)}], "answer": str(a + b)} for a, b in sums]
    )

    def run(packed, given, model=None, **parts):
        given = {**BASE, **COMMON, "output_dir": str(tmp_path / f"run_{packed}"), **given}
        if model is None:
            path = tmp_path / "model"
            build_model(tokenizer).save_pretrained(path)
            tokenizer.save_pretrained(path)
            model = str(path)
        parts |= {"processing_class": tokenizer}
        if packed:
            config = CreditConfig(**given, distillation_weight=0.0, packed=True)
            trainer = CreditTrainer(model, mixed_verdicts, config, rows, rows, **parts)
        else:
            trainer = GRPOTrainer(model, mixed_rewards, GRPOConfig(**given), rows, rows, **parts)
        losses, gradients, step_losses = [], [], []
        step = trainer.training_step

        def recorded(model, *arguments, **keywords):
            loss = step(model, *arguments, **keywords)
            step_losses.append(loss.item())
            if trainer.accelerator.sync_gradients:
                losses.append(sum(step_losses))
                step_losses.clear()
                parameters = trainer.model.named_parameters()
                gradients.append({name: p.grad.clone() for name, p in parameters if p.grad is not None})
            return loss

        trainer.training_step = recorded
        trainer.train()
        weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        return Run(losses, gradients, weights, trainer)

    return run


def assert_equal(ours, theirs, tolerance=1e-6):
    assert (ours.trainer.policy_step is None) == (cannot_pack(ours.trainer.model) is not None)
    assert theirs.largest_gradient > 1e-3
    tolerance *= max(1.0, theirs.largest_gradient)  # rounding grows with what is summed
    torch.testing.assert_close(ours.losses, theirs.losses, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(ours.gradients, theirs.gradients, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(ours.weights, theirs.weights, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("given", [*FAST, *LOSSES, *OPTIONS])
def test_packed_grpo_equals_trls(train, given):
    try:
        theirs = train(False, given)
    except (ValueError, OSError, ImportError) as error:  # TRL refuses it
        with pytest.raises(type(error)):
            train(True, given)
        return
    assert_equal(train(True, given), theirs)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_grpo_equals_trls_for_families(train, tokenizer, family):
    """Heads with a bias, a scale, a soft cap or tied weights, sliding windows, and experts with a router's loss."""
    ours, theirs = (train(packed, {}, build_family(tokenizer, family)) for packed in (True, False))
    assert ours.trainer.aux_loss_enabled == (family == "Qwen3Moe")
    assert_equal(ours, theirs, 1e-5)  # large random weights, which increase rounding


@pytest.mark.slow
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_packed_grpo_equals_trls_with_lora(train, tokenizer, beta):
    adapter = LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False)

    def run(packed):
        torch.manual_seed(1)
        return train(packed, {"beta": beta, "num_iterations": 2}, build_model(tokenizer), peft_config=adapter)

    assert_equal(run(True), run(False))


def test_what_cannot_be_packed_takes_trls_path_with_a_warning(make_trainer):
    adapter = PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    with pytest.warns(CreditWarning, match="`packed=True` has no effect: its adapter adds tokens to each row"):
        trainer = make_trainer(distillation_weight=0.0, packed=True, peft_config=adapter)
    assert trainer.policy_step is None


@pytest.mark.parametrize(("weight", "options"), [(0.0, {"packed": True}), (0.5, {"packed": None})])
def test_grpos_loss_reads_the_policy_once_and_no_padding(make_trainer, weight, options):
    """One pass of the backbone with gradients for each micro-batch; TRL's model is not called."""
    trainer = make_trainer(mixed_verdicts, distillation_weight=weight, max_steps=1, **options)
    rows = []

    def count(module, arguments, keywords):
        ids = keywords["input_ids"]
        if torch.is_grad_enabled():
            rows.append((len(ids), ids.shape[1]))

    trainer.model.model.register_forward_pre_hook(count, with_kwargs=True)
    read = []
    loss = trainer.compute_loss

    def counted(model, inputs, **keywords):
        read.append(int(inputs["prompt_mask"].sum() + inputs["completion_mask"].sum()))
        return loss(model, inputs, **keywords)

    trainer.compute_loss = counted
    trainer.train()
    assert len(rows) == len(read) == 1
    (count_of_rows, width), (valid,) = rows[0], read
    assert count_of_rows == 1
    assert width <= valid
