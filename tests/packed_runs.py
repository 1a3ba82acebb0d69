"""Three optimizer steps of a trainer, and their comparison with those of TRL's pass over padded rows.

Weights move by SGD, since Adam divides a gradient by its size: rounding of a gradient near 0 would be a whole step.
"""

from dataclasses import dataclass

import torch
from datasets import Dataset
from trl import GRPOTrainer

from credit_trl import CreditConfig, CreditTrainer
from tables import tables_of
from test_trainer_options import BASE, BESIDE, options
from test_trainer_parity import mixed_rewards
from tiny import build_tokenizer, save_model

TABLES = tables_of(__file__)
PACKED = {"packed": True, "distillation_weight": 0.0}
# Options of each loss type, by a name.
LOSSES = {
    f"{loss_type}, {name}": {"loss_type": loss_type} | variant
    for loss_type in TABLES["loss_types"]
    for name, variant in TABLES["variants"].items()
}
REFUSALS = (ValueError, OSError, ImportError)  # by which TRL refuses options


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


def train(folder, config_class, given, model=None, verdicts=mixed_rewards, **parts):
    """Train by the trainer of a configuration; `parts` are arguments of the trainer."""
    tokenizer = build_tokenizer()
    sums = [(a, b) for a in range(3) for b in (1, 2)]
    prompts = [[{"role": "user", "content": f"{a}+{b}=" * (a + 1)}] for a, b in sums]
    rows = Dataset.from_dict({"prompt": prompts, "answer": [str(a + b) for a, b in sums]})
    out = folder / f"run_{config_class.__name__}_{given.get('packed')}"
    config = config_class(**{**BASE, **TABLES["common"], "output_dir": str(out), **given})
    if model is None:
        model = save_model(folder / "model")
    torch.manual_seed(1)  # of an adapter
    trainer_class = CreditTrainer if config_class is CreditConfig else GRPOTrainer
    trainer = trainer_class(model, verdicts, config, rows, rows, processing_class=tokenizer, **parts)
    return recorded(trainer)


def recorded(trainer):
    """Train, and record each optimizer step."""
    losses, gradients, step_losses = [], [], []
    training_step = trainer.training_step

    def step(model, *arguments, **keywords):
        loss = training_step(model, *arguments, **keywords)
        step_losses.append(loss.item())
        if trainer.accelerator.sync_gradients:
            losses.append(sum(step_losses))
            step_losses.clear()
            parameters = trainer.model.named_parameters()
            gradients.append({name: p.grad.clone() for name, p in parameters if p.grad is not None})
        return loss

    trainer.training_step = step
    trainer.train()
    policy = trainer.accelerator.unwrap_model(trainer.model)
    return Run(losses, gradients, {name: p.detach().clone() for name, p in policy.named_parameters()}, trainer)


def assert_equal(ours, theirs, tolerance=1e-6):
    """Losses, gradients and weights of a run on packed rows are those of TRL's pass."""
    assert theirs.largest_gradient > 1e-3
    tolerance *= max(1.0, theirs.largest_gradient)  # rounding grows with what is summed
    for name in ("losses", "gradients", "weights"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), rtol=tolerance, atol=tolerance)


def loss_options():
    """Options of the installed TRL that change the loss or the update, each with those beside which it acts."""
    beside = BESIDE | TABLES["beside"]
    return {name: beside.get(name, {}) | {name: options()[name]} for name in TABLES["of_the_loss"].split()}
