"""Micro-batches with little padding, and no pass of the policy that is not needed.

TRL pads a generation batch to its longest sample, shuffles it and splits it. Here each micro-batch is cut to its own
longest prompt and completion, and the samples of one optimizer step are exchanged between its micro-batches so that
these are even. The gradient is that of the same samples. The evened batch is the one that a checkpoint stores.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from credit_trl.config import CreditConfig
from credit_trl.loss.scores import Scores
from credit_trl.teacher.packing import to_device

# TRL's tensors (B, T, …), and this package's; `advantages` are (B,), or (B, T) where tokens are weighted.
_COMPLETION_FIELDS = {
    *"completion_ids completion_mask tool_mask old_per_token_logps ref_per_token_logps".split(),
    *"sampling_per_token_logps importance_sampling_ratio advantages token_weight".split(),
    *Scores._fields,
}


def exchanged_count(config: CreditConfig, router_loss: bool) -> int:
    """Consecutive micro-batches between which samples may be exchanged: those of one optimizer step.

    1 where an exchange would change the loss, as where "bnpo" divides by the tokens of a micro-batch, and where GRPO's
    part has an entropy bonus or quantile, which TRL takes over a micro-batch.
    """
    accumulated = config.gradient_accumulation_steps
    generated = config.steps_per_generation
    is_aligned = generated % accumulated == 0 or accumulated % generated == 0
    has_bonus = config.entropy_coef != 0.0 or config.use_adaptive_entropy or config.top_entropy_quantile < 1.0
    averages_entropy = config.distillation_weight < 1.0 and has_bonus
    if not is_aligned or config.loss_type == "bnpo" or router_loss or averages_entropy:
        return 1
    return min(accumulated, generated)


def evened(batches: Sequence[dict[str, Any]], exchanged: int, packed: bool) -> list[dict[str, Any]]:
    """TRL's micro-batches of a generation batch, evened and without common padding.

    `exchanged` is that of `exchanged_count`. With `packed` the forward pass reads no padding, so that the totals are
    evened instead of the longest.
    """
    result = []
    for start in range(0, len(batches), exchanged):
        exchanged_batches = batches[start : start + exchanged]
        if len(exchanged_batches) == 1:
            result.append(without_padding(exchanged_batches[0]))
            continue
        merged = _joined(exchanged_batches)
        lengths = merged["prompt_mask"].sum(dim=1) + merged["completion_mask"].sum(dim=1)
        for rows in even_groups(lengths.tolist(), len(exchanged_batches), packed):
            result.append(without_padding(take_rows(merged, rows)))
    return result


def even_groups(lengths: Sequence[int], count: int, by_total: bool) -> list[list[int]]:
    """Divide samples of these lengths into `count` groups of equal size, longest first.

    Each group holds samples of similar length or, with `by_total`, the samples are dealt out, which evens the totals.
    """
    order = np.argsort(-np.asarray(lengths), kind="stable")
    groups = order.reshape(-1, count).T if by_total else order.reshape(count, -1)
    return groups.tolist()


def without_padding(batch: dict[str, Any]) -> dict[str, Any]:
    """A micro-batch without the positions that are padding in all of its rows; at least one is kept."""
    prompt = max(int(batch["prompt_mask"].any(dim=0).sum()), 1)
    used = batch["completion_mask"].any(dim=0).nonzero()
    completion = int(used.max()) + 1 if len(used) else 1
    cut = {}
    for name in ("prompt_ids", "prompt_mask"):
        cut[name] = batch[name][:, -prompt:].contiguous()
    for name in _COMPLETION_FIELDS.intersection(batch):
        if batch[name] is not None and batch[name].ndim > 1:
            cut[name] = batch[name][:, :completion].contiguous()
    return batch | cut


def _joined(batches: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One batch with the samples of all; scalars and missing fields are those of the first batch."""
    joined = dict(batches[0])
    for name, first_values in batches[0].items():
        values = [batch[name] for batch in batches]
        if isinstance(first_values, Tensor):
            if first_values.ndim:
                joined[name] = torch.cat(values)
        elif first_values is not None:
            joined[name] = list(itertools.chain.from_iterable(values))
    return joined


def take_rows(batch: dict[str, Any], rows: list[int]) -> dict[str, Any]:
    """Some samples of a batch, by one index that is copied to the device."""
    index = to_device(torch.tensor(rows), batch["completion_ids"].device)
    selected = dict(batch)
    for name, values in batch.items():
        if isinstance(values, Tensor):
            if values.ndim:
                selected[name] = values[index]
        elif values is not None:
            selected[name] = [values[i] for i in rows]
    return selected
