"""Token weights: the reduction of per-token losses to the loss of a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor


@dataclass(frozen=True)
class Reduction:
    """GRPO's reduction of the same `loss_type`, for one micro-batch.

    Args:
        loss_type: of `GRPOConfig`.
        accumulation: micro-batches of an optimizer step; 1 in evaluation.
        max_completion_length: divisor of Dr. GRPO.
        num_processes: processes over which gradients are averaged.
        steps_per_generation: micro-batches of a generation batch; 1 in evaluation.
    """

    loss_type: str
    accumulation: float
    max_completion_length: int
    num_processes: int
    steps_per_generation: int


def token_weights(
    batch: dict[str, Any], loss_mask: Bool[Tensor, "B T"], reduction: Reduction, dtype: torch.dtype = torch.float32
) -> Float[Tensor, "B T"]:
    """Weight of each token's loss. Tokens of samples without a teacher count in the divisors, as in SDPO's code.

    Args:
        batch: TRL's micro-batch, with `num_items_in_batch` and optionally `importance_sampling_ratio`.
        loss_mask: True on the policy's own tokens.

    Raises:
        ValueError: unknown loss type.
    """
    mask = loss_mask.to(dtype)
    size, accumulation = mask.shape[0], reduction.accumulation
    if reduction.loss_type in ("grpo", "sapo"):
        weights = mask / mask.sum(-1, keepdim=True).clamp(min=1.0) / size / accumulation
    elif reduction.loss_type == "bnpo":
        weights = mask / mask.sum().clamp(min=1.0) / accumulation
    elif reduction.loss_type == "dr_grpo":
        weights = mask / (size * reduction.max_completion_length) / accumulation
    elif reduction.loss_type == "luspo":
        weights = mask / size / accumulation
    elif reduction.loss_type in ("dapo", "cispo", "vespo"):
        tokens = batch["num_items_in_batch"].clamp(min=1.0) / reduction.num_processes
        weights = mask / (tokens * accumulation / reduction.steps_per_generation)
    else:
        raise ValueError(f"Unknown `loss_type` {reduction.loss_type!r}.")
    return weights * batch["importance_sampling_ratio"] if "importance_sampling_ratio" in batch else weights
