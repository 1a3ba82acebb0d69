"""The policy's forward pass over a micro-batch, without the padding of TRL's tensors.

TRL pads prompts on the left and completions on the right, to the longest of the process. Here each sample is one
sequence from position 0: padded on the right to the longest of the micro-batch, or packed one after the other, where
PyTorch's attention reads the prompt of several rollouts once. A causal model needs no attention mask for either.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from credit_trl.teacher.causal_lm import backbone, head_input
from credit_trl.teacher.packing import model_inputs, to_device


@dataclass(frozen=True)
class Sequences:
    """Prompts and completions of a micro-batch, and the completion tokens that are chosen."""

    ids: list[list[int]]  # prompt and completion of each sample, without padding
    width: int  # T
    # Indices of the chosen completion tokens in the flattened (B, T), ascending, on the device of the micro-batch.
    chosen: Int[Tensor, " N"]
    # Indices of the tokens before them in the sequences one after the other, in main memory.
    before: Int[Tensor, " N"]

    @property
    def rows(self) -> Int[Tensor, " N"]:
        """Sample of each chosen token."""
        return self.chosen // self.width

    def pick(self, values: Tensor | None) -> Tensor | None:
        """Entries of (B, T, …) at the chosen tokens, (N, …)."""
        return None if values is None else values.flatten(0, 1)[self.chosen]


def chosen_sequences(batch: dict[str, Any], mask: Bool[Tensor, "B T"]) -> Sequences:
    """Sequences of TRL's micro-batch, with tokens chosen where `mask` is True; waits for the device once."""
    names = ("prompt_ids", "completion_ids", "prompt_mask", "completion_mask")
    table = np.array(torch.cat([*(batch[name] for name in names), mask.long()], dim=1).tolist())
    prompt, width = (batch[name].shape[1] for name in names[:2])
    ids, valid, picked = np.split(table, [prompt + width, 2 * (prompt + width)], axis=1)
    rows, columns = picked.nonzero()
    lengths = valid.sum(axis=1)
    # Counted from 1 by `cumsum`, and a token is predicted at the position before its own.
    before = (lengths.cumsum() - lengths)[rows] + valid.cumsum(axis=1)[rows, prompt + columns] - 2
    read = [own[kept.astype(bool)].tolist() for own, kept in zip(ids, valid, strict=True)]
    chosen = to_device(torch.from_numpy(rows * width + columns), mask.device)
    return Sequences(read, width, chosen, torch.from_numpy(before))


def policy_states(
    model: nn.Module, sequences: Sequences, *, packed: bool = False, router_loss: bool = False
) -> tuple[Float[Tensor, "N H"], int, Float[Tensor, ""] | None]:
    """Run the policy's backbone over a micro-batch.

    Args:
        model: the unwrapped policy.
        sequences: the micro-batch; each prompt has at least one token.
        packed: read one packed row, see `packing.enable_packing`.
        router_loss: also compute the load-balancing loss of a mixture of experts.

    Returns:
        The hidden states that predict the chosen tokens, in the dtype of the LM head's product; the number of tokens
        that the pass read, padding included; and the load-balancing loss or None.
    """
    device = sequences.chosen.device
    # A router's loss is a mean over the tokens of every sequence, so that none is shared.
    inputs, indices = model_inputs(model, sequences.ids, device, packed=packed, shares=not router_loss)
    mask = None
    if not packed:
        lengths = torch.tensor([len(ids) for ids in sequences.ids])
        mask = to_device((torch.arange(inputs["input_ids"].shape[1]) < lengths[:, None]).long(), device)
        if device.type == "cpu":
            # Without a mask a CPU sums the gradients of attention in another order: weights differ in their last bit.
            inputs.setdefault("attention_mask", mask)
    extra = {"output_router_logits": True} if router_loss else {}
    outputs = backbone(model)(**inputs, use_cache=False, **extra)
    hidden = outputs.last_hidden_state.flatten(0, 1)[to_device(indices[sequences.before], device)]
    aux_loss = _router_loss(model, outputs, mask) if router_loss else None
    return head_input(model, hidden), inputs["input_ids"].numel(), aux_loss


def _router_loss(model: nn.Module, outputs: Any, mask: Int[Tensor, "B L"] | None) -> Tensor:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    if not outputs.router_logits:  # dense, with the configuration of a mixture of experts
        return outputs.last_hidden_state.new_zeros(())
    config = model.config.get_text_config()
    # The name of the number of experts differs between configurations.
    experts = getattr(config, "num_experts", None) or outputs.router_logits[0].shape[-1]
    return load_balancing_loss_func(outputs.router_logits, experts, config.num_experts_per_tok, mask)
