"""The student's distribution at one chunk of tokens, over the vocabulary or within the support."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from credit_trl.loss.blocks import accumulation_dtype, chunk_size, chunks
from credit_trl.loss.head import HeadGradients, LMHead
from credit_trl.loss.projection import backward_logps, project
from credit_trl.loss.scores import condition
from credit_trl.loss.terms import LossTokens


@dataclass
class Student:
    """The student at one chunk of tokens."""

    values: Float[Tensor, "n K"]  # log-probabilities of the support; logits where the support is renormalised
    log_outside: Float[Tensor, " n"] | None  # log-probability outside the support; None where that is no bucket
    token_logps: Float[Tensor, " n"]  # of the sampled token; given support and token where that is renormalised
    policy_logps: Float[Tensor, " n"]  # the same over the whole vocabulary; NaN where it is not computed
    entropy: Float[Tensor, " n"]  # nats; of the distribution on the support where no normaliser is computed
    mass: Float[Tensor, " n"]  # probability of the support; NaN where it is not computed
    # Backpropagates gradients of `values` and `log_outside`; may overwrite the logits.
    backward: Callable[[Float[Tensor, "n K"], Float[Tensor, " n"] | None, HeadGradients], None]


def student_over_vocabulary(
    hidden: Float[Tensor, "n H"],
    tokens: LossTokens,
    support_ids: Int[Tensor, "n K"],
    has_tail: bool,
    head: LMHead,
    buffer: Float[Tensor, "n V"],
) -> Student:
    """True log-probabilities: of K tokens and of the rest of the vocabulary, or of the sampled token."""
    found = project(head, hidden, buffer, tokens.ids.unsqueeze(-1), ids=support_ids)
    logps = found.logps
    token_logps = found.token_logps
    return Student(
        logps,
        found.log_outside if has_tail else None,
        token_logps,
        token_logps,
        found.entropy,
        logps.exp().sum(dim=-1),
        partial(backward_logps, head, found, hidden),
    )


def student_within_support(
    hidden: Float[Tensor, "n H"], tokens: LossTokens, support_ids: Int[Tensor, "n K"], head: LMHead
) -> Student:
    """Logits of K tokens and of the sampled one, for a renormalised support: nothing else of the head is used."""
    ids = tokens.ids.unsqueeze(-1)
    everything = torch.cat([support_ids, ids], dim=-1)
    rows = head.gather_rows(everything)
    logits = head.column_logits(hidden, rows, everything)
    values = logits[:, :-1]
    logps, token_logps = condition(logits, (support_ids == ids).any(dim=-1))
    policy_logps = torch.full_like(token_logps, torch.nan)
    mass = policy_logps
    entropy = tokens.entropy
    if tokens.normalizer is None:
        entropy = torch.special.entr(logps.exp()).sum(dim=-1)
    else:
        policy_logps = logits[:, -1] - tokens.normalizer
        mass = (values.logsumexp(dim=-1) - tokens.normalizer).exp()
    backward = partial(head.backward_columns, rows[:, :-1], support_ids, values, hidden)
    return Student(values, None, token_logps, policy_logps, entropy, mass, backward)


def with_normalizer(tokens: LossTokens, hidden: Float[Tensor, "N H"], head: LMHead) -> LossTokens:
    """The tokens with the student's normaliser and entropy, which a ratio within the support needs."""
    size = chunk_size(len(hidden), head.vocabulary_size * accumulation_dtype(hidden.dtype).itemsize, hidden.device)
    parts = [project(head, hidden[rows]) for rows in chunks(len(hidden), size)]
    return replace(
        tokens,
        normalizer=torch.cat([part.log_normalizer for part in parts]),
        entropy=torch.cat([part.entropy for part in parts]),
    )
