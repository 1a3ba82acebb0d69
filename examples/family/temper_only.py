"""Temper only: what remains of `f − λ Ĝ` where the contrast is the teacher itself, the target `(1 − λ) f`.

It separates the flattening of the target from the contrast. `softmax((1 − λ) f)` is the teacher at the temperature
T / (1 − λ), so the head of the teacher is replaced, of a teacher with weights of its own:

    trainer = CreditTrainer(..., args=CreditConfig(..., contrastive_coef=0))
    temper(trainer.credit_step, 0.1)
    trainer.train()
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from credit_trl.loss import LMHead
from credit_trl.training.step import CreditStep


def temper(step: CreditStep, coef: float) -> None:
    """Make a step score with the teacher's distribution to the power 1 − λ, normalised.

    Raises:
        ValueError: the teacher shares the module of the policy, whose head would change too.
    """
    policy_head = step.head
    with step.teacher.active() as model:
        if step.teacher.unwrapped(model) is step.teacher.student:
            raise ValueError("A live teacher and an adapter share the policy's module. Use a full-weight teacher.")

    def head(model: nn.Module) -> LMHead:
        untempered = policy_head(model)
        if model is step.teacher.student:
            return untempered
        return replace(untempered, temperature=untempered.temperature / (1.0 - coef))

    step.head = head
