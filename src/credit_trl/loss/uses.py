"""Uses of the credit: distil it, modulate GRPO's advantage with it, or route failures to it.

Each use decides three things: the samples that the teacher scores (`route_contexts`), tensors of the generation batch
that it replaces (`use_credit`), and the coefficients of the two losses (`CreditConfig.shares`). The formulas are in
`objective`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from credit_trl import objective
from credit_trl.config import CreditConfig
from credit_trl.contexts.tokens import TokenContexts
from credit_trl.loss.scores import SupportConfig
from credit_trl.rollout.batch import GenerationBatch, is_successful


def choose_support(config: CreditConfig, vocabulary: int) -> SupportConfig:
    """Tokens that carry the loss; weights of `"modulate"` need the sampled token only.

    A top-K support of the whole vocabulary is `"full"`, except where weights or rehearsal need stored scores.
    """
    if config.credit_use == "modulate":
        return SupportConfig("sampled")
    chosen = SupportConfig(config.distillation_support, config.distillation_topk, config.distillation_tail)
    is_whole = chosen.is_topk and chosen.topk == vocabulary
    is_stored = config.token_weight is not None or config.teacher_rehearsal > 0.0
    return SupportConfig("full") if is_whole and not is_stored else chosen


def route_contexts(
    contexts: Sequence[TokenContexts], batch: GenerationBatch, config: CreditConfig
) -> list[TokenContexts]:
    """Contexts of the samples that are distilled; with `"route"` successes have none, so that no pass scores them."""
    if config.credit_use != "route":
        return list(contexts)
    successes = torch.tensor(is_successful([batch.rewards[i] for i in batch.indices], config.success_reward_threshold))
    keeps = objective.routed(successes, torch.tensor([c.teacher is not None for c in contexts]))
    return [c if kept else replace(c, teacher=None, contrasts=[]) for c, kept in zip(contexts, keeps, strict=True)]


def silent_groups(batch: GenerationBatch, has_teacher: Sequence[bool], config: CreditConfig) -> list[int]:
    """Indices of the local groups without any signal, of a batch with whole groups on each process.

    A group has a signal where GRPO's loss is used and its rewards differ, or where a sample that would be distilled
    has a teacher (`has_teacher`, local).
    """
    policy, distillation = config.shares
    rewards = [batch.rewards[i] for i in batch.indices]
    is_distilled = [
        not ok or config.credit_use != "route" for ok in is_successful(rewards, config.success_reward_threshold)
    ]
    silent = []
    for start in range(0, len(rewards), batch.group_size):
        group = range(start, start + batch.group_size)
        differ = len({rewards[i] for i in group if not math.isnan(rewards[i])}) > 1
        teaches = any(has_teacher[i] and is_distilled[i] for i in group)
        if not ((policy > 0.0 and differ) or (distillation > 0.0 and teaches)):
            silent.append(start // batch.group_size)
    return silent


def use_credit(
    batch: dict[str, Tensor],
    mask: Bool[Tensor, "B T"],
    policy_logps: Callable[[], Float[Tensor, "B T"]],
    reduce: Callable[[Tensor], Tensor],
    config: CreditConfig,
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Tensors of the generation batch that a use replaces, and its metrics. Every process must call it.

    Args:
        batch: TRL's generation batch with `teacher_mask`, `contrast_mask` and the stored scores.
        mask: True on the policy's own tokens.
        policy_logps: log-probabilities of the sampled tokens under the policy that sampled them.
        reduce: sums a vector over processes.

    Returns:
        `advantages` (B, T) for `"modulate"`; for `"route"` `advantages` (B,), 0 for distilled samples, and
        `credit_weights` (B, T) where tokens are weighted.
    """
    if config.credit_use == "modulate":
        return _modulate(batch, mask, policy_logps, reduce, config)
    if config.credit_use == "route":
        return _route(batch, mask, reduce, config)
    return {}, {}


def _modulate(
    batch: dict[str, Tensor],
    mask: Bool[Tensor, "B T"],
    policy_logps: Callable[[], Float[Tensor, "B T"]],
    reduce: Callable[[Tensor], Tensor],
    config: CreditConfig,
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """GRPO's advantages times the weights of `config`; samples without the credit keep theirs."""
    advantages, f = batch["advantages"], batch["teacher_token_logps"]
    if config.token_weight == "s":
        credit, scored = f - batch["generic_token_logps"], batch["teacher_mask"] & batch["contrast_mask"]
    else:
        credit, scored = f - policy_logps().to(f.dtype), batch["teacher_mask"]
    scored = mask & scored[:, None]
    credit = credit.masked_fill(~scored, 0.0)
    form = objective.ratio_weights if config.credit_weight_form == "ratio" else objective.residual_weights
    weights = form(credit, advantages.to(f.dtype), config.credit_weight_clip, config.credit_weight_temperature)
    if config.credit_weight_norm:
        weights = objective.normalize_weights(weights, scored)
    weights = weights.masked_fill(~scored, 1.0)
    changed = objective.modulated_advantages(advantages, weights.to(advantages.dtype), config.distillation_weight)
    moments = _moments(reduce, scored, credit, weights)
    return {"advantages": changed}, {
        f"credit/{config.token_weight}_mean": moments[0][0],
        "credit/token_weight_std": moments[1][1],
    }


def _route(
    batch: dict[str, Tensor], mask: Bool[Tensor, "B T"], reduce: Callable[[Tensor], Tensor], config: CreditConfig
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Advantages of the samples that GRPO keeps, and the weights of the distilled tokens."""
    is_routed = batch["teacher_mask"]
    count, total = reduce(torch.tensor([is_routed.sum(), len(is_routed)], dtype=torch.float32)).tolist()
    replaced = {"advantages": batch["advantages"].masked_fill(is_routed, 0.0)}
    metrics = {"credit/frac_routed": count / total}
    if config.token_weight == "entropy":
        scored = mask & is_routed[:, None]
        weights = objective.entropy_weights(batch["teacher_entropy"], config.credit_weight_temperature)
        ((mean, _),) = _moments(reduce, scored, weights)
        replaced["credit_weights"] = (weights / mean if mean > 0.0 else weights).masked_fill(~scored, 1.0)
        metrics["credit/token_weight_std"] = _moments(reduce, scored, replaced["credit_weights"])[0][1]
    return replaced, metrics


def _moments(
    reduce: Callable[[Tensor], Tensor], mask: Bool[Tensor, "B T"], *values: Float[Tensor, "B T"]
) -> list[tuple[float, float]]:
    """Mean and standard deviation of each of `values` over the masked tokens of all processes; NaN without tokens."""
    picked = [x[mask].to(torch.float32) for x in values]
    sums = [torch.stack([x.sum(), x.pow(2).sum()]) for x in picked]
    *totals, count = reduce(torch.cat([*sums, mask.sum().to(torch.float32)[None]])).tolist()
    if not count:
        return [(torch.nan, torch.nan)] * len(values)
    pairs = zip(totals[::2], totals[1::2], strict=True)
    return [(total / count, max(square / count - (total / count) ** 2, 0.0) ** 0.5) for total, square in pairs]
