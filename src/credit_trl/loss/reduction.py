"""Reduction of per-token losses to the loss of a micro-batch: the share of each token."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from credit_trl.config import CreditConfig


def loss_shares(
    batch: dict[str, Any],
    loss_mask: Bool[Tensor, "B T"],
    config: CreditConfig,
    accumulation: float,
    steps_per_generation: int,
    processes: int,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "B T"]:
    """Share of each token in the loss, by GRPO's reduction of the same `loss_type`.

    Tokens of samples without a teacher count in the divisors, as in SDPO's code.

    Args:
        batch: TRL's micro-batch. `num_items_in_batch`, the tokens of the generation batch on all processes, is by
            default those of the micro-batch; `importance_sampling_ratio` is optional.
        loss_mask: True on the policy's own tokens.
        config: `loss_type` and `max_completion_length`, the divisor of Dr. GRPO.
        accumulation: micro-batches of an optimizer step; 1 in evaluation.
        steps_per_generation: micro-batches of a generation batch; 1 in evaluation.
        processes: number of processes over which gradients are averaged.

    Raises:
        ValueError: unknown loss type.
    """
    mask = loss_mask.to(dtype)
    size = mask.shape[0]
    if config.loss_type in ("grpo", "sapo"):
        shares = mask / mask.sum(-1, keepdim=True).clamp(min=1.0) / size / accumulation
    elif config.loss_type == "bnpo":
        shares = mask / mask.sum().clamp(min=1.0) / accumulation
    elif config.loss_type == "dr_grpo":
        shares = mask / (size * config.max_completion_length) / accumulation
    elif config.loss_type == "luspo":
        shares = mask / size / accumulation
    elif config.loss_type in ("dapo", "cispo", "vespo"):
        tokens = batch.get("num_items_in_batch", mask.sum()).clamp(min=1.0) / processes
        shares = mask / (tokens * accumulation / steps_per_generation)
    else:
        raise ValueError(f"Unknown `loss_type` {config.loss_type!r}.")
    return shares * batch["importance_sampling_ratio"] if "importance_sampling_ratio" in batch else shares
