"""Alarm for updates that the dtype of the trained weights rounds away."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from credit_trl.training.finite import local_part
from credit_trl.training.metrics import Alarms

# Share of the weights with a gradient that the first update changes, below which it is an alarm. Of fp32 weights
# nearly all change at a learning rate of 1e-6, of bf16 weights about 1 %.
FEW_CHANGED = 0.2
# Weights of each parameter that are compared.
_SAMPLE = 1024
_FIX = (
    "Load the model in fp32 (`dtype=torch.float32`) and keep `bf16=True`, which computes in bf16 and keeps fp32 "
    "weights, or raise `learning_rate`."
)


class WeightChange(TrainerCallback):
    """Compares a sample of the weights before and after the first update, with one synchronisation.

    An update without a learning rate, as at the start of a warm-up, or without gradients is not compared. Neither are
    those of DeepSpeed, whose optimizer steps in the backward pass, and of fp16, whose loss scale may skip the first.
    """

    def __init__(self, alarms: Alarms, model: nn.Module) -> None:
        self.alarms = alarms
        self._before: list[tuple[Tensor, Tensor, Tensor]] = []
        self._is_done = False
        dtypes = {p.dtype for p in model.parameters() if p.requires_grad}
        for dtype in dtypes & {torch.bfloat16, torch.float16}:
            name = str(dtype).removeprefix("torch.")
            alarms.raise_once(
                "low_precision", f"The trained weights are {name}, which rounds small updates away. {_FIX}"
            )

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._is_done or args.fp16 or args.deepspeed or not any(kwargs["lr_scheduler"].get_last_lr()):
            return
        for weight in kwargs["model"].parameters():
            if weight.grad is not None:
                part = _sample(weight)
                self._before.append((weight, part.clone(), _sample(weight.grad) != 0))

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self._before:
            return
        device = self._before[0][1].device
        counts = torch.zeros(2, device=device)
        for weight, before, has_grad in self._before:
            changed = (_sample(weight) != before) & has_grad
            counts += torch.stack([changed.sum(), has_grad.sum()]).to(counts)
        self._before = []
        changed, total = counts.tolist()
        self._is_done = total > 0
        if self._is_done and changed < FEW_CHANGED * total:
            self.alarms.raise_once(
                "weights_unchanged",
                f"The first update changed {changed / total:.1%} of the trained weights that have a gradient: the "
                f"others were rounded back. {_FIX}",
            )


def _sample(weight: Tensor) -> Tensor:
    """Evenly spaced elements of the part of a weight that this process holds."""
    flat = local_part(weight.detach()).flatten()
    return flat[:: max(1, flat.numel() // _SAMPLE)]
