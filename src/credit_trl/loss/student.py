"""The student's distribution at one chunk of tokens, over the vocabulary or within the support."""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from credit_trl.loss.blocks import accumulation_dtype, chunk_size, chunks
from credit_trl.loss.head import HeadGradients, LMHead
from credit_trl.loss.projection import backward_logps, project
from credit_trl.loss.scores import SupportConfig, condition
from credit_trl.loss.terms import LossConfig, LossTokens


class VocabularyStudent:
    """True log-probabilities: of K tokens and of the rest of the vocabulary, or of the sampled token.

    Attributes:
        values: (n, K), log-probabilities of the support.
        log_outside: (n,), log-probability outside the support; None where that is no bucket.
        token_logps: (n,), log-probability of the sampled token.
        policy_logps: (n,), the same over the whole vocabulary; NaN where it is not computed.
        entropy: (n,), nats.
        mass: (n,), probability of the support; NaN where it is not computed.
    """

    def __init__(
        self,
        hidden: Float[Tensor, "n H"],
        tokens: LossTokens,
        support_ids: Int[Tensor, "n K"],
        support: SupportConfig,
        head: LMHead,
        buffer: Float[Tensor, "n V"],
    ) -> None:
        self._hidden = hidden
        self._head = head
        self._projection = project(head, hidden, buffer, tokens.ids.unsqueeze(-1), ids=support_ids)
        self.values = self._projection.logps
        self.log_outside = self._projection.log_outside if support.has_tail else None
        self.token_logps = self._projection.token_logps
        self.policy_logps = self.token_logps
        self.entropy = self._projection.entropy
        self.mass = self.values.exp().sum(dim=-1)

    def backward(
        self, grads: Float[Tensor, "n K"], outside_grads: Float[Tensor, " n"] | None, gradients: HeadGradients
    ) -> None:
        """Backpropagate the gradients of `values` and `log_outside`, which overwrites the logits."""
        backward_logps(self._head, self._projection, grads, outside_grads, self._hidden, gradients)


class SupportStudent:
    """Logits of K tokens and of the sampled one, for a renormalised support: nothing else of the head is used.

    The attributes are those of `VocabularyStudent`, but `values` are logits, `token_logps` is conditional on support
    and token, and `entropy` is that of the distribution on the support where no normaliser is computed.
    """

    log_outside = None

    def __init__(
        self, hidden: Float[Tensor, "n H"], tokens: LossTokens, support_ids: Int[Tensor, "n K"], head: LMHead
    ) -> None:
        self._hidden = hidden
        self._head = head
        self._size = support_ids.shape[-1]
        ids = tokens.ids.unsqueeze(-1)
        self._columns = head.gather_columns(torch.cat([support_ids, ids], dim=-1))
        logits = head.column_logits(hidden, self._columns)
        self.values = logits[:, :-1]
        logps, self.token_logps = condition(logits, (support_ids == ids).any(dim=-1))
        if tokens.normalizer is None:
            self.policy_logps = torch.full_like(self.token_logps, torch.nan)
            self.mass = self.policy_logps
            self.entropy = torch.special.entr(logps.exp()).sum(dim=-1)
        else:
            self.policy_logps = logits[:, -1] - tokens.normalizer
            self.mass = (self.values.logsumexp(dim=-1) - tokens.normalizer).exp()
            self.entropy = tokens.entropy

    def backward(self, grads: Float[Tensor, "n K"], outside_grads: None, gradients: HeadGradients) -> None:
        """Backpropagate the gradient of the logits."""
        columns = self._columns.first(self._size)
        self._head.backward_columns(columns, self.values, grads, self._hidden, gradients)


def with_normalizer(
    tokens: LossTokens, hidden: Float[Tensor, "N H"], head: LMHead, support: SupportConfig, config: LossConfig
) -> LossTokens:
    """The tokens with what a loss within the support with an importance ratio needs: normaliser and entropy."""
    has_ratio = tokens.engine is not None or (tokens.old_logps is not None and config.is_clip is not None)
    if not (support.renormalizes and has_ratio):
        return tokens
    size = chunk_size(len(hidden), head.vocabulary_size * accumulation_dtype(hidden.dtype).itemsize, hidden.device)
    parts = [project(head, hidden[rows]) for rows in chunks(len(hidden), size)]
    return replace(
        tokens,
        normalizer=torch.cat([part.log_normalizer for part in parts]),
        entropy=torch.cat([part.entropy for part in parts]),
    )
