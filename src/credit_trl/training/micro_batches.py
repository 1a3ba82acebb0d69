"""Micro-batches with little padding, and no pass of the policy that is not needed.

TRL pads a generation batch to its longest sample, shuffles it and splits it. Here each micro-batch is cut to its own
longest prompt and completion, and the samples of one optimizer step are exchanged between its micro-batches so that
these are even. The gradient is that of the same samples. The evened batch is the one that a checkpoint stores. With
`update_batch_tokens` a micro-batch is computed in parts, each with its own forward and backward pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from credit_trl.config import CreditConfig
from credit_trl.loss.scores import Scores
from credit_trl.loss.terms import MicroBatchLoss, joined
from credit_trl.teacher.packing import SHORTEST_SHARED, shares_prefixes, to_device
from credit_trl.training.step import CreditStep

# TRL's tensors (B, T, …), and this package's; `advantages` are (B,), or (B, T) where tokens are weighted.
_COMPLETION_FIELDS = {
    *"completion_ids completion_mask tool_mask old_per_token_logps ref_per_token_logps".split(),
    *"sampling_per_token_logps importance_sampling_ratio advantages token_weight loss_shares".split(),
    *(f.name for f in fields(Scores)),
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
    """Micro-batches of a generation batch, evened and without common padding.

    Args:
        batches: TRL's micro-batches, all of the same number of samples.
        exchanged: see `exchanged_count`.
        packed: the forward pass reads no padding, so that the totals are evened instead of the longest.
    """
    result = []
    for start in range(0, len(batches), exchanged):
        inside = batches[start : start + exchanged]
        merged = {name: _join([batch[name] for batch in inside]) for name in inside[0]}
        lengths = (merged["prompt_mask"].sum(dim=1) + merged["completion_mask"].sum(dim=1)).tolist()
        groups = even_groups(lengths, len(inside), packed) if len(inside) > 1 else [list(range(len(lengths)))]
        result += [without_padding(_take(merged, rows)) for rows in groups]
    return result


def even_groups(lengths: Sequence[int], count: int, by_total: bool) -> list[list[int]]:
    """Divide samples into groups of equal size, longest first.

    Args:
        lengths: tokens of each sample; a multiple of `count` samples.
        by_total: deal the samples out, which evens the totals of the groups; else each group holds samples of similar
            length.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    size = len(lengths) // count
    return [order[i::count] if by_total else order[i * size : (i + 1) * size] for i in range(count)]


def cut_rows(rows: list[int], tokens_of: Callable[[list[int]], int], budget: int, count: int = 1) -> list[list[int]]:
    """Cut rows into consecutive parts of at most `budget` tokens, and into at least `count` where there are as many.

    The largest part is cut in two until all are small enough. A part has at least one row, whatever its tokens.

    Args:
        tokens_of: tokens that a pass over some rows reads.
    """
    parts = [rows]
    while len(parts) < len(rows):
        i = max((i for i, part in enumerate(parts) if len(part) > 1), key=lambda i: tokens_of(parts[i]))
        part = parts[i]
        if len(parts) >= count and tokens_of(part) <= budget:
            break
        middle = min(range(1, len(part)), key=lambda cut: max(tokens_of(part[:cut]), tokens_of(part[cut:])))
        parts[i : i + 1] = [part[:middle], part[middle:]]
    return parts


def without_padding(batch: dict[str, Any]) -> dict[str, Any]:
    """A micro-batch without the positions that are padding in all of its rows; at least one is kept."""
    prompt = max(int(batch["prompt_mask"].any(dim=0).sum()), 1)
    used = batch["completion_mask"].any(dim=0).nonzero()
    completion = int(used[-1]) + 1 if len(used) else 1
    cut = dict(batch)
    for name, values in batch.items():
        if values is None:
            continue
        if name in ("prompt_ids", "prompt_mask"):
            cut[name] = values[:, -prompt:].contiguous()
        elif name in _COMPLETION_FIELDS and values.ndim > 1:
            cut[name] = values[:, :completion].contiguous()
    return cut


def _join(values: list[Any]) -> Any:
    if values[0] is None or (isinstance(values[0], Tensor) and values[0].ndim == 0):
        return values[0]
    return torch.cat(values) if isinstance(values[0], Tensor) else list(itertools.chain(*values))


def _take(batch: dict[str, Any], rows: list[int]) -> dict[str, Any]:
    """Some samples of a batch, by one index that is copied to the device."""
    index = to_device(torch.tensor(rows), batch["completion_ids"].device)
    taken = dict(batch)
    for name, values in batch.items():
        if isinstance(values, Tensor):
            taken[name] = values[index] if values.ndim else values
        elif values is not None:
            taken[name] = [values[i] for i in rows]
    return taken


def loss_in_parts(
    step: CreditStep,
    model: nn.Module,
    inputs: dict[str, Any],
    accumulation: float,
    backward: Callable[[Tensor], None],
) -> MicroBatchLoss:
    """The loss of a micro-batch, in parts of `update_batch_tokens`.

    In training the gradients of all parts but the last are formed here, so that the activations of one part are held
    at a time. The loss that is returned has the value of all and the gradient of the last.

    Args:
        backward: backpropagates a loss.
    """
    if step.config.update_batch_tokens is None:
        return step.loss(model, inputs, accumulation)
    inputs = inputs | {"loss_shares": step.loss_shares(model, inputs, accumulation)}
    parts = _parts(step, inputs)
    device = inputs["completion_ids"].device.type
    # TRL computes the loss under autocast, which would keep copies of the weights in its dtype until all parts
    # are done. With recomputed activations nothing else needs them: each part reads a weight once.
    dtype = torch.get_autocast_dtype(device)
    uncached = torch.autocast(device, dtype, torch.is_autocast_enabled(device), cache_enabled=False)
    losses = []
    for rows in parts:
        part = _take(inputs, rows)
        is_last = rows is parts[-1]
        without_sync = not is_last and isinstance(model, DistributedDataParallel)
        with model.no_sync() if without_sync else nullcontext(), uncached:
            loss = step.loss(model, part, accumulation)
            if not is_last and torch.is_grad_enabled():
                backward(loss.terms.loss)
                loss.terms.loss = loss.terms.loss.detach()
        losses.append(loss)
    return joined(losses)


def _parts(step: CreditStep, inputs: dict[str, Any]) -> list[list[int]]:
    """Rows of each part, the same number on every process. Rollouts of a prompt that is read once are together."""
    prompts, completions = torch.stack(
        [inputs[f"{part}_mask"].sum(dim=1) for part in ("prompt", "completion")]
    ).tolist()
    rows = list(range(len(prompts)))
    prompt_of = list(rows)
    if not step.packed:
        # Evened micro-batches are in this order already, others are not.
        rows.sort(key=lambda i: prompts[i] + completions[i], reverse=True)
    elif shares_prefixes(step.teacher.student):
        ids = list(map(tuple, inputs["prompt_ids"].tolist()))
        prompt_of = [ids.index(ids[i]) if prompts[i] >= SHORTEST_SHARED else i for i in rows]
        rows.sort(key=prompt_of.__getitem__)

    def tokens_of(part: list[int]) -> int:
        if not step.packed:
            return len(part) * max(prompts[i] + completions[i] for i in part)
        return sum(completions[i] for i in part) + sum(prompts[i] for i in {prompt_of[i] for i in part})

    budget = step.config.update_batch_tokens
    needed = max(step.gather([len(cut_rows(rows, tokens_of, budget))]))
    return cut_rows(rows, tokens_of, budget, needed)
