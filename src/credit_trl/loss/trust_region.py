"""Weights of a trust-region teacher: the log-space mixture of the initial policy and its average.

Logits are linear in the hidden states, so the mixture of logits is one head over both hidden states side by side:
`(1 − w) W_b h_b + w W_a h_a = [W_b, W_a] [(1 − w) h_b, w h_a]`. Everything after this module sees one teacher.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from credit_trl.loss.blocks import chunks, logits_chunk
from credit_trl.loss.head import LMHead
from credit_trl.objective import trust_region

# Bisections of w; the KL is then within a thousandth of its range.
_BISECTIONS = 12
# Tensors of (tokens, vocabulary) that exist at once: two distributions, their mixture and its intermediate values.
_LOGITS = 8


@dataclass(frozen=True)
class TrustRegion:
    """How far the teacher may leave the initial policy.

    Args:
        weight: w of the average, in [0, 1].
        kl: largest `KL(teacher ‖ base)` of a position, nats; w is then the largest weight up to `weight` within it.
            None: no bound.
    """

    weight: float = 1.0
    kl: float | None = None


def joint_head(heads: Sequence[LMHead]) -> LMHead:
    """One head over the hidden states of all parts side by side.

    Raises:
        ValueError: a head has a bias or a soft cap, so its logits are not linear in the hidden states.
    """
    if len(heads) == 1:
        return heads[0]
    if any(head.bias is not None or head.softcap is not None for head in heads):
        raise ValueError(
            "`teacher_model_kind='trust_region'` mixes logits that are linear in the hidden states, and this model's "
            "head has a bias or a soft cap. Set `teacher_model_kind='ema'` or `'base'`."
        )
    return replace(heads[0], weight=torch.cat([head.weight for head in heads], dim=1))


def weighted_states(
    hidden: Float[Tensor, "*n H2"], head: LMHead, region: TrustRegion | None
) -> Float[Tensor, "*n H2"]:
    """Hidden states of the base and of the average side by side, each times its weight; unchanged without a region."""
    if region is None:
        return hidden
    base, average = hidden.chunk(2, dim=-1)
    weight: float | Tensor = region.weight
    if region.kl is not None:
        flat = hidden.flatten(0, -2)
        size = logits_chunk(len(flat), head.vocabulary_size, torch.float32, flat.device, _LOGITS)
        parts = [_bounded_weights(flat[rows], head, region) for rows in chunks(len(flat), size)]
        weight = torch.cat(parts).view(*hidden.shape[:-1], 1)
    return torch.cat([base * (1.0 - weight), average * weight], dim=-1)


@torch.no_grad()
def _bounded_weights(hidden: Float[Tensor, "n H2"], head: LMHead, region: TrustRegion) -> Float[Tensor, " n"]:
    """The largest weights up to `region.weight` with `KL(teacher ‖ base)` within the bound, by bisection.

    The KL grows with the weight: the mixtures are an exponential family, and its derivative is w times a variance.
    """
    halves = zip(hidden.chunk(2, dim=-1), head.weight.chunk(2, dim=-1), strict=True)
    base, average = (replace(head, weight=weight).chunk_logps(states) for states, weight in halves)

    def kl(weight: Tensor) -> Tensor:
        mixed = trust_region(base, average, weight)
        return (mixed.exp() * (mixed - base)).sum(-1)

    high = torch.full_like(base[:, 0], region.weight)
    low, is_free = torch.zeros_like(high), kl(high) <= region.kl
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        inside = kl(middle) <= region.kl
        low, high = torch.where(inside, middle, low), torch.where(inside, high, middle)
    return torch.where(is_free, torch.full_like(low, region.weight), low).to(hidden.dtype)
