"""The student at one chunk of tokens: its log-probabilities, and the way back to its hidden states and head."""

from typing import NamedTuple, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import embedding

from credit_trl.loss.head import HeadGradients, LMHead, chunks
from credit_trl.loss.projection import DeferredChunk, backward_logps, project
from credit_trl.loss.scores import condition


class Student:
    """The student at one chunk of n tokens.

    Attributes:
        values: log-probabilities of the support; logits where the support is renormalised.
        log_outside: log-probability outside the support; None where the support is renormalised.
        token_logps: of the sampled token; given support and token where the support is renormalised.
        policy_logps: of the sampled token over the whole vocabulary; NaN where it is not computed.
        entropy: nats; of the distribution on the support where no normaliser is computed.
        mass: probability of the support; NaN where it is not computed.
    """

    values: Float[Tensor, "n K"]
    log_outside: Float[Tensor, " n"] | None
    token_logps: Float[Tensor, " n"]
    policy_logps: Float[Tensor, " n"]
    entropy: Float[Tensor, " n"]
    mass: Float[Tensor, " n"]

    def backward(
        self,
        gradients: HeadGradients,
        value_grads: Float[Tensor, "n K"],
        outside_grads: Float[Tensor, " n"] | None,
    ) -> None:
        """Add the gradients of `values` and `log_outside` to those of the head; may overwrite the logits."""
        raise NotImplementedError


class VocabularyStudent(Student):
    """True log-probabilities: of K tokens and of the rest of the vocabulary, or of the sampled token.

    Args:
        buffer: for the logits, which are kept for the backward pass; None where that computes them again.
    """

    def __init__(
        self,
        head: LMHead,
        hidden: Float[Tensor, "n H"],
        token_ids: Int[Tensor, " n"],
        support_ids: Int[Tensor, "n K"],
        buffer: Float[Tensor, "n V"] | None,
    ) -> None:
        projection = project(head, hidden, out=buffer, tokens=token_ids.unsqueeze(-1), ids=support_ids)
        self.values = projection.logps
        self.log_outside = projection.log_outside
        self.token_logps = projection.token_logps
        self.policy_logps = self.token_logps
        self.entropy = projection.entropy
        self.mass = self.values.exp().sum(dim=-1)
        self._head = head
        self._hidden = hidden
        self._projection = projection

    def backward(
        self,
        gradients: HeadGradients,
        value_grads: Float[Tensor, "n K"],
        outside_grads: Float[Tensor, " n"] | None,
    ) -> None:
        if gradients.deferred is None:
            backward_logps(self._head, self._projection, self._hidden, gradients, value_grads, outside_grads)
        else:
            chunk = DeferredChunk(self._head, self._projection, self._hidden, gradients, value_grads, outside_grads)
            gradients.deferred.append(chunk)


class Normalizers(NamedTuple):
    """Sums over the vocabulary at N tokens, which a ratio of a renormalised support needs."""

    log_normalizer: Float[Tensor, " N"]
    entropy: Float[Tensor, " N"]

    @classmethod
    def of(cls, head: LMHead, hidden: Float[Tensor, "N H"]) -> Self:
        """Project N tokens in chunks of logits, which read the head less often than those of columns."""
        log_normalizers = []
        entropies = []
        for rows in chunks(len(hidden), head.chunk_size(hidden)):
            projection = project(head, hidden[rows])
            log_normalizers.append(projection.log_normalizer)
            entropies.append(projection.entropy)
        return cls(torch.cat(log_normalizers), torch.cat(entropies))

    def rows(self, rows: slice) -> Self:
        """Those of one chunk."""
        return Normalizers(self.log_normalizer[rows], self.entropy[rows])


class SupportStudent(Student):
    """Logits of the K tokens and the sampled one, for a renormalised support. Only these rows of the head are read.

    Args:
        normalizers: of the chunk; None where nothing needs the log-probabilities over the whole vocabulary.
    """

    log_outside = None

    def __init__(
        self,
        head: LMHead,
        hidden: Float[Tensor, "n H"],
        token_ids: Int[Tensor, " n"],
        support_ids: Int[Tensor, "n K"],
        normalizers: Normalizers | None,
    ) -> None:
        ids = torch.cat([support_ids, token_ids.unsqueeze(-1)], dim=-1)
        head_rows = embedding(ids, head.weight)
        logits = head.column_logits(hidden, head_rows, ids)
        support_logps, self.token_logps = condition(logits, ids)
        self.values = logits[:, :-1]
        if normalizers is None:
            self.policy_logps = torch.full_like(self.token_logps, torch.nan)
            self.mass = self.policy_logps
            self.entropy = torch.special.entr(support_logps.exp()).sum(dim=-1)
        else:
            self.policy_logps = logits[:, -1] - normalizers.log_normalizer
            self.mass = (self.values.logsumexp(dim=-1) - normalizers.log_normalizer).exp()
            self.entropy = normalizers.entropy
        self._head = head
        self._hidden = hidden
        self._support_ids = support_ids
        self._support_rows = head_rows[:, :-1]

    def backward(
        self,
        gradients: HeadGradients,
        value_grads: Float[Tensor, "n K"],
        outside_grads: Float[Tensor, " n"] | None,
    ) -> None:
        self._head.backward_columns(
            self._support_rows, self._support_ids, self.values, self._hidden, gradients, value_grads
        )
