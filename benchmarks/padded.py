"""The trainer with the padding of TRL's batches and all of TRL's passes, to compare with."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from trl import GRPOTrainer

from credit_trl import CreditTrainer
from credit_trl.teacher.causal_lm import backbone, head_input
from credit_trl.teacher.passes import PolicySequences, PolicyStates, chosen_sequences
from credit_trl.training import micro_batches, step


@dataclass(frozen=True)
class PaddedSequences(PolicySequences):
    """Sequences with TRL's tensors of the micro-batch."""

    batch: dict[str, torch.Tensor]


def padded_sequences(batch: dict[str, Any], mask: torch.Tensor) -> PaddedSequences:
    """`chosen_sequences` with the tensors."""
    return PaddedSequences(**vars(chosen_sequences(batch, mask)), batch=batch)


def padded_states(model: nn.Module, sequences: PaddedSequences, **options: Any) -> PolicyStates:
    """`policy_states` on TRL's tensors as they are, left-padded prompts included."""
    ids, mask = (
        torch.cat([sequences.batch[f"{part}_{kind}"] for part in ("prompt", "completion")], dim=1)
        for kind in ("ids", "mask")
    )
    outputs = backbone(model)(input_ids=ids, attention_mask=mask, use_cache=False)
    hidden = outputs.last_hidden_state[:, -sequences.width - 1 : -1].flatten(0, 1)[sequences.chosen]
    aux_loss = torch.zeros(()) if options.get("router_loss") else None
    return PolicyStates(head_input(model, hidden), ids.numel(), aux_loss)


def padding_kept() -> ExitStack:
    """Cut, exchange and skip nothing until the stack is closed, as by `with padding_kept():`."""
    method = "_get_per_token_logps_and_entropies"
    stack = ExitStack()
    for target, name, value in (
        (step, "chosen_sequences", padded_sequences),
        (step, "policy_states", padded_states),
        (micro_batches, "evened", lambda batches, *_: list(batches)),
        (micro_batches, "without_padding", lambda batch: batch),
        (CreditTrainer, method, getattr(GRPOTrainer, method)),
    ):
        stack.enter_context(patch.object(target, name, value))
    return stack
