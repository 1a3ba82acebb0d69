"""Token weights by GRPO's reduction of the same `loss_type`."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from credit_trl.rollout.batch import loss_mask


def token_weights(
    batch: dict[str, Any],
    loss_type: str,
    *,
    accumulation: float,
    max_completion_length: int,
    num_processes: int,
    steps_per_generation: int,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "B T"]:
    """What each token's loss counts, by GRPO's reduction of the same `loss_type`, for one micro-batch.

    Tokens of samples without a teacher stay in the divisors, as in SDPO's code.

    Args:
        batch: a micro-batch of TRL's, with `num_items_in_batch` and perhaps `importance_sampling_ratio`.
        accumulation: micro-batches an optimizer step, 1 in evaluation.
        max_completion_length: the divisor of Dr. GRPO.
        num_processes: over which gradients are averaged.
        steps_per_generation: micro-batches a generation batch, 1 in evaluation.
        dtype: of the result.
    """
    mask = loss_mask(batch).to(dtype)
    size = mask.shape[0]
    if loss_type in ("grpo", "sapo"):
        weights = mask / mask.sum(-1, keepdim=True).clamp(min=1.0) / size / accumulation
    elif loss_type == "bnpo":
        weights = mask / mask.sum().clamp(min=1.0) / accumulation
    elif loss_type == "dr_grpo":
        weights = mask / (size * max_completion_length) / accumulation
    elif loss_type == "luspo":
        weights = mask / size / accumulation
    elif loss_type in ("dapo", "cispo", "vespo"):
        tokens = batch["num_items_in_batch"].clamp(min=1.0) / num_processes
        weights = mask / (tokens * accumulation / steps_per_generation)
    else:
        raise ValueError(f"Unknown `loss_type` {loss_type!r}.")
    return weights * batch["importance_sampling_ratio"] if "importance_sampling_ratio" in batch else weights
