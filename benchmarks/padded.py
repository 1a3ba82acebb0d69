"""The trainer with the padding of TRL's batches and all of TRL's passes, to compare with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from trl import GRPOTrainer

from credit_trl import CreditTrainer
from credit_trl.teacher.causal_lm import backbone, head_input
from credit_trl.teacher.passes import Sequences, chosen_sequences
from credit_trl.training import micro_batches, step


@dataclass(frozen=True)
class PaddedSequences(Sequences):
    """Sequences with TRL's tensors of the micro-batch."""

    batch: dict[str, torch.Tensor]


def padded_sequences(batch: dict[str, Any], mask: torch.Tensor) -> PaddedSequences:
    """`chosen_sequences` with the tensors."""
    return PaddedSequences(**vars(chosen_sequences(batch, mask)), batch=batch)


def padded_states(model: nn.Module, sequences: PaddedSequences, **options: Any) -> tuple[Any, int, Any]:
    """`policy_states` on TRL's tensors as they are, left-padded prompts included."""
    ids, mask = (
        torch.cat([sequences.batch[f"{part}_{kind}"] for part in ("prompt", "completion")], dim=1)
        for kind in ("ids", "mask")
    )
    outputs = backbone(model)(input_ids=ids, attention_mask=mask, use_cache=False)
    hidden = outputs.last_hidden_state[:, -sequences.width - 1 : -1].flatten(0, 1)[sequences.chosen]
    aux_loss = torch.zeros(()) if options.get("router_loss") else None
    return head_input(model, hidden), ids.numel(), aux_loss


@contextmanager
def padding_kept() -> Iterator[None]:
    """Inside the block nothing is cut, exchanged or skipped."""
    with ExitStack() as stack:
        for patched in _patches():
            stack.enter_context(patched)
        yield


def keep_padding() -> None:
    """Cut, exchange and skip nothing for the life of the process."""
    for patched in _patches():
        patched.start()


def _patches() -> list[Any]:
    method = "_get_per_token_logps_and_entropies"
    return [
        patch.object(step, "chosen_sequences", padded_sequences),
        patch.object(step, "policy_states", padded_states),
        patch.object(micro_batches, "evened", lambda batches, *_: list(batches)),
        patch.object(micro_batches, "without_padding", lambda batch: batch),
        patch.object(CreditTrainer, method, getattr(GRPOTrainer, method)),
    ]
