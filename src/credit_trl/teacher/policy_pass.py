"""The policy's forward pass over a micro-batch, without the padding of TRL's tensors.

TRL pads prompts on the left and completions on the right, to the longest of the process. Here each sample is one
sequence from position 0: padded on the right to the longest of the micro-batch, or packed one after the other, where
PyTorch's attention reads the prompt of several rollouts once. A causal model needs no attention mask for either.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from credit_trl.teacher.causal_lm import backbone, head_input
from credit_trl.teacher.packing import packed_inputs, padded_inputs


@dataclass(frozen=True)
class Sequences:
    """Prompts and completions of a micro-batch, and the completion tokens that are chosen; L = P + T."""

    ids: Int[Tensor, "B L"]  # prompts left-padded, completions right-padded
    valid: Bool[Tensor, "B L"]  # False on padding
    prompt_width: int  # P
    lengths: tuple[int, ...]  # valid tokens of each sample
    chosen: Int[Tensor, " N"]  # indices of the chosen completion tokens in the flattened (B, T), ascending

    @property
    def rows(self) -> Int[Tensor, " N"]:
        """Sample of each chosen token."""
        return self.chosen // (self.ids.shape[1] - self.prompt_width)

    def pick(self, values: Tensor) -> Tensor:
        """Entries of (B, T, …) at the chosen tokens, (N, …)."""
        return values.flatten(0, 1)[self.chosen]


def chosen_sequences(batch: dict[str, Any], mask: Bool[Tensor, "B T"]) -> Sequences:
    """Sequences of TRL's micro-batch, with completion tokens chosen where `mask` is True; waits for the device."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    valid = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1).bool()
    *lengths, count = torch.cat([valid.sum(dim=1), mask.sum()[None]]).tolist()
    chosen = _first(mask.flatten()[None], count)[0]
    return Sequences(ids, valid, batch["prompt_ids"].shape[1], tuple(lengths), chosen)


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
    ids = sequences.ids
    valid = sequences.valid
    lengths = sequences.lengths
    index_in_row = None
    if packed:
        order = _first(valid.flatten()[None], sum(lengths))[0]
        read = ids.flatten()[order].tolist()  # waits for the device once
        whole = [read[end - n : end] for n, end in zip(lengths, accumulate(lengths), strict=True)]
        # A router's loss is a mean over the tokens of every sequence, so that none is shared.
        inputs, indices = packed_inputs(model, whole, ids.device, shares=not router_loss)
        index_in_row = indices.to(ids.device, non_blocking=True)
        starts = valid.sum(dim=1).cumsum(0) - valid.sum(dim=1)
    else:
        width = max(lengths)
        order = _first(valid, width)
        inputs = padded_inputs(model, ids.gather(1, order))
        if ids.device.type == "cpu" and "attention_mask" not in inputs:
            # Without a mask a CPU sums the gradients of attention in another order: weights differ in their last bit.
            inputs["attention_mask"] = valid.gather(1, order).long()
        starts = torch.arange(len(ids), device=ids.device) * width
    extra = {"output_router_logits": True} if router_loss else {}
    outputs = backbone(model)(**inputs, use_cache=False, **extra)
    rows = sequences.rows
    columns = sequences.chosen % (ids.shape[1] - sequences.prompt_width)
    # Counted from 1 by `cumsum`, and a token is predicted at the position before its own.
    before = valid.cumsum(dim=1)[rows, columns + sequences.prompt_width] - 2
    at = starts[rows] + before
    hidden = outputs.last_hidden_state.flatten(0, 1)[at if index_in_row is None else index_in_row[at]]
    aux_loss = _router_loss(model, outputs, sequences, packed) if router_loss else None
    return head_input(model, hidden), inputs["input_ids"].numel(), aux_loss


def _first(mask: Bool[Tensor, "B L"], count: int) -> Int[Tensor, "B n"]:
    """Columns of the first `count` True entries of each row, then of False ones; does not wait for the device."""
    return mask.logical_not().to(torch.uint8).argsort(dim=1, stable=True)[:, :count]


def _router_loss(model: nn.Module, outputs: Any, sequences: Sequences, packed: bool) -> Tensor:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    if not outputs.router_logits:  # dense, with the configuration of a mixture of experts
        return outputs.last_hidden_state.new_zeros(())
    config = model.config.get_text_config()
    mask = None
    if not packed:
        lengths = sequences.valid.sum(dim=1, keepdim=True)
        mask = (torch.arange(max(sequences.lengths), device=lengths.device) < lengths).long()
    # The name of the number of experts differs between configurations.
    experts = getattr(config, "num_experts", None) or outputs.router_logits[0].shape[-1]
    return load_balancing_loss_func(outputs.router_logits, experts, config.num_experts_per_tok, mask)
