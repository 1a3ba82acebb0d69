"""The trainer with the padding of TRL's batches and all of TRL's passes, to compare with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from trl import GRPOTrainer

from credit_trl import CreditTrainer
from credit_trl.teacher.causal_lm import backbone, head_input
from credit_trl.teacher.policy_pass import Sequences
from credit_trl.training import micro_batches, step


def padded_states(model: nn.Module, sequences: Sequences, **options: Any) -> tuple[Any, int, Any]:
    """`policy_states` on TRL's tensors as they are, left-padded prompts included."""
    outputs = backbone(model)(input_ids=sequences.ids, attention_mask=sequences.valid.long(), use_cache=False)
    hidden = outputs.last_hidden_state[:, sequences.prompt_width - 1 : -1].flatten(0, 1)[sequences.chosen]
    aux_loss = torch.zeros(()) if options.get("router_loss") else None
    return head_input(model, hidden), sequences.ids.numel(), aux_loss


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
        patch.object(step, "policy_states", padded_states),
        patch.object(micro_batches, "evened", lambda batches, *_: list(batches)),
        patch.object(micro_batches, "without_padding", lambda batch: batch),
        patch.object(CreditTrainer, method, getattr(GRPOTrainer, method)),
    ]
