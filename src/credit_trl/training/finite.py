"""Detection of NaN and infinities before they reach weights, teacher or checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn


class NonFiniteError(RuntimeError):
    """Loss, gradient, weights or teacher are not finite. Weights and checkpoints are those of the step before."""


# Stored scores of the teacher, of which a NaN is not always a NaN of the loss.
_SCORES = ("teacher_token_logps", "generic_token_logps")


def is_finite(loss: Tensor, inputs: Mapping[str, Any]) -> Tensor:
    """Whether a micro-batch's loss is finite and no stored score of the teacher is NaN, as a tensor on its device."""
    found = loss.detach().isfinite().all()
    for name in _SCORES:
        if isinstance(scores := inputs.get(name), Tensor):
            found = found & ~scores.isnan().any().to(found.device)
    return found


def poison(loss: Tensor, finite: Tensor) -> Tensor:
    """The loss with a NaN gradient where it is not finite, and otherwise unchanged bit for bit.

    The reduction of the gradients makes the NaN of one process the global gradient norm of all, without a collective.
    """
    return loss * torch.where(finite, 1.0, math.nan).to(loss)


def first_nonfinite(weights: Iterable[tuple[str, Tensor]]) -> str | None:
    """Name of the first weight with NaN or an infinity in the part that this process holds."""
    checked = [(name, local_part(weight).isfinite().all()) for name, weight in weights]
    if not checked or bool(torch.stack([flag.cpu() for _, flag in checked]).all()):
        return None
    return next(name for name, flag in checked if not flag)


def nonfinite_weight(model: nn.Module, teacher: Mapping[str, Tensor]) -> str | None:
    """The first weight of policy or teacher that is not finite, in words; None where all are.

    Args:
        model: the policy.
        teacher: the teacher's weights, empty for a live one.
    """
    for owner, weights in (("policy", model.named_parameters()), ("teacher", teacher.items())):
        if name := first_nonfinite(weights):
            return f"{owner}'s weight `{name}`"
    return None


def check_weights(accelerator: Accelerator, model: nn.Module, teacher: Mapping[str, Tensor], kept: str) -> None:
    """Raise on every process where weights of the policy or of the teacher are not finite; nothing is written then.

    Args:
        kept: sentence on the last checkpoint.

    Raises:
        NonFiniteError: some are; the process that holds them names one.
    """
    name = nonfinite_weight(model, teacher)
    found = torch.tensor(float(name is not None), device=accelerator.device)
    if accelerator.reduce(found, reduction="sum").item() > 0:
        raise NonFiniteError(f"The {name or 'weights of another process'} is not finite, so nothing is saved. {kept}")


def source_of(
    model: nn.Module, teacher: Mapping[str, Tensor], batches: Iterable[Mapping[str, Any]], loss: bool
) -> str:
    """Where a gradient norm that is not finite comes from, by what this process holds.

    Args:
        batches: micro-batches of the generation batch with their stored scores.
        loss: whether the losses of this process were finite.
    """
    if name := nonfinite_weight(model, teacher):
        return f"the {name}"
    for name in _SCORES:
        if any(isinstance(batch.get(name), Tensor) and batch[name].isnan().any() for batch in batches):
            return f"the teacher's scores (`{name}`)"
    if not loss:
        return "the loss of the update, by the policy's logits"
    return "the gradient of the update, or another process"


def local_part(weight: Tensor) -> Tensor:
    """The part of a weight that this process holds, under FSDP2 and DeepSpeed ZeRO-3 too."""
    weight = getattr(weight, "ds_tensor", weight)
    return weight.to_local() if hasattr(weight, "to_local") else weight
