"""Scores of the teacher: its log-probabilities of the sampled tokens and of the tokens of the support."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import embedding

from credit_trl import objective
from credit_trl.contexts.tokens import CompletionBatch, TokenContexts
from credit_trl.loss.head import LMHead, accumulation_dtype, chunks, product_dtype
from credit_trl.loss.projection import Projection, project
from credit_trl.teacher.causal_lm import head_input_dtype
from credit_trl.teacher.models import Teacher
from credit_trl.teacher.passes import token_states


@dataclass(frozen=True)
class SupportConfig:
    """Tokens of the vocabulary that carry the loss."""

    # The teacher's `topk` most likely tokens, or the sampled token.
    kind: Literal["teacher_topk", "sampled"] = "teacher_topk"
    topk: int | None = 20  # K, at most V; None for the whole vocabulary
    # `"bucket"` adds a bucket for the probability outside a top-K support, `"renormalize"` conditions on the support;
    # None where nothing lies outside, see `resolved`.
    tail: Literal["bucket", "renormalize"] | None = "bucket"

    def resolved(self, vocabulary: int) -> Self:
        """The support for a vocabulary of V tokens: one with K = V, and the sampled token, have no tail.

        Raises:
            ValueError: K exceeds V.
        """
        if self.kind == "sampled":
            return SupportConfig(self.kind, 1, None)
        topk = self.topk
        if topk is None:
            topk = vocabulary
        if not 1 <= topk <= vocabulary:
            raise ValueError(f"`distillation_topk` must be at most the vocabulary size {vocabulary}, got {topk}.")
        tail = None if topk == vocabulary else self.tail
        return SupportConfig(self.kind, topk, tail)


class Scores(NamedTuple):
    """Log-probabilities of the teacher for N tokens, on the support. B = K buckets, or K + 1 with a tail bucket."""

    # The most likely first; all ids in their order for K = V; the sampled token for `"sampled"`.
    support_ids: Int[Tensor, "N K"]
    teacher_logps: Float[Tensor, "N B"]  # f; true log-probabilities, the tail bucket last
    # Ĝ; with `"renormalize"` each contrast is normalised over the support. Zeros without contrasts (λ is 0 there).
    generic_logps: Float[Tensor, "N B"]
    teacher_token_logps: Float[Tensor, " N"]  # f at the sampled token; for `"renormalize"` given support and token
    generic_token_logps: Float[Tensor, " N"]  # Ĝ at the sampled token, conditional likewise
    teacher_entropy: Float[Tensor, " N"]  # nats, over the whole vocabulary


def score_completions(
    teacher: Teacher,
    contexts: Sequence[TokenContexts],
    batch: CompletionBatch,
    support: SupportConfig,
    head_of: Callable[[nn.Module], LMHead],
    batch_tokens: int,
    packed: bool,
) -> dict[str, Tensor]:
    """Score a generation batch, without gradient. Every process must call it.

    Args:
        contexts: of the local samples.
        batch: their completions.
        head_of: a causal LM to its `LMHead`, of the policy's vocabulary.
        batch_tokens: see `token_states`, as `packed`.

    Returns:
        The fields of `Scores`, each (B, T, …), zero at positions that are not scored, where the support is the first K
        tokens. Ids take 4 bytes, and log-probabilities have the dtype of the teacher's head, fp32 at least.
    """
    support = support.resolved(teacher.vocabulary_size)
    device = batch.ids.device
    with teacher.active() as model:
        unwrapped = teacher.unwrapped(model)
        head = head_of(unwrapped)
        with teacher.autocast():
            hidden_dtype = head_input_dtype(unwrapped, head.weight.dtype, device)
        head = head.gathered(product_dtype(hidden_dtype, device)).detached()
        # More rows than the policy's vocabulary are padding of a larger model of the family.
        head = head.map(lambda weight: weight.to(device)[: teacher.vocabulary_size])
        dtype = torch.promote_types(head.weight.dtype, torch.float32)
        stored = _empty_scores(batch.ids, support, dtype)
        for states in token_states(teacher, model, contexts, batch, batch_tokens, packed):
            at = (states.samples, states.columns)
            part = score_tokens(states.teacher, states.contrasts, head, batch.ids[at], support)
            for name, values in stored.items():
                values[at] = getattr(part, name).to(values.dtype)
    return stored


def _empty_scores(ids: Int[Tensor, "B T"], support: SupportConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    """The fields of `Scores` where nothing is scored."""
    buckets = support.topk + (support.tail == "bucket")
    scores = {}
    for name in Scores._fields:
        has_buckets = name in ("teacher_logps", "generic_logps")
        shape = (*ids.shape, buckets) if has_buckets else ids.shape
        scores[name] = ids.new_zeros(shape, dtype=dtype)
    support_ids = torch.arange(support.topk, dtype=torch.int32, device=ids.device)
    scores["support_ids"] = support_ids.repeat((*ids.shape, 1))
    return scores


@torch.no_grad()
def score_tokens(
    hidden: Float[Tensor, "N H"],
    contrast_hidden: Float[Tensor, "C N H"],
    head: LMHead,
    token_ids: Int[Tensor, " N"],
    support: SupportConfig,
) -> Scores:
    """Score N sampled tokens under the teacher's prompt and C contrast prompts (lines 4 to 6 of Algorithm 1).

    Args:
        hidden: hidden states of the teacher at the positions that predict the tokens; masked positions are not among
            them.
        contrast_hidden: the same under the contrast prompts. C = 0 gives Ĝ = 0.
        head: the teacher's; a sharded head is gathered once.
        token_ids: (N,), the sampled tokens y_t.

    Returns:
        Scores in fp32, or fp64 for fp64 hidden states, without gradient.

    Raises:
        ValueError: K exceeds the vocabulary.
    """
    support = support.resolved(head.vocabulary_size)
    head = head.gathered().detached().for_products(hidden)
    size = head.chunk_size(hidden)
    shape = (min(size, len(hidden)), head.vocabulary_size)
    buffer = hidden.new_empty(shape, dtype=accumulation_dtype(hidden.dtype))
    parts = []
    for rows in chunks(len(hidden), size):
        out = buffer[: rows.stop - rows.start]
        tokens = token_ids[rows].unsqueeze(-1)
        if support.kind == "sampled":
            teacher = project(head, hidden[rows], out=out, tokens=tokens, ids=tokens)
        else:
            teacher = project(head, hidden[rows], out=out, tokens=tokens, topk=support.topk)
        logps = _buckets(teacher, support)
        token_logps = teacher.token_logps
        generic = logps.new_zeros(len(logps), logps.shape[1] + 1)  # the last column is the sampled token
        contrasts = contrast_hidden[:, rows]
        everything = torch.cat([teacher.ids, tokens], dim=-1)
        if support.tail == "renormalize":
            logits = torch.cat([teacher.columns, teacher.token_logits], dim=-1)
            _, token_logps = condition(logits, everything)
            if len(contrasts):
                generic = _generic_scores_within(head, contrasts, everything)
        elif len(contrasts):
            generic = _generic_scores(head, contrasts, teacher.ids, tokens, support, out)
        parts.append(Scores(teacher.ids, logps, generic[:, :-1], token_logps, generic[:, -1], teacher.entropy))
    scores = {}
    for name in Scores._fields:
        scores[name] = torch.cat([getattr(part, name) for part in parts])
    return Scores(**scores)


def _generic_scores(
    head: LMHead,
    contrast_hidden: Float[Tensor, "C n H"],
    ids: Int[Tensor, "n K"],
    tokens: Int[Tensor, "n 1"],
    support: SupportConfig,
    out: Float[Tensor, "n V"],
) -> Float[Tensor, "n B+1"]:
    """Ĝ of one chunk on the support and at the sampled token; overwrites `out`."""
    buffer = None if out.device.type == "cpu" else out  # a CPU takes narrow blocks

    def contrast_logps() -> Iterator[Float[Tensor, "n B+1"]]:
        for hidden in contrast_hidden:
            contrast = project(head, hidden, out=buffer, tokens=tokens, ids=ids, wants_entropy=False)
            token_logps = contrast.token_logps.unsqueeze(-1)
            yield torch.cat([_buckets(contrast, support), token_logps], dim=-1)

    return objective.streamed_input_generic(contrast_logps(), len(contrast_hidden))


def _generic_scores_within(
    head: LMHead, contrast_hidden: Float[Tensor, "C n H"], ids: Int[Tensor, "n K+1"]
) -> Float[Tensor, "n K+1"]:
    """Ĝ conditional on the support, of which only the K columns and the sampled token, the last, are projected."""
    parts = []
    for rows in chunks(len(ids), head.chunk_size(contrast_hidden[0], ids.shape[-1])):
        contrast_logps = _logps_within(head, contrast_hidden[:, rows], ids[rows])
        parts.append(objective.streamed_input_generic(contrast_logps, len(contrast_hidden)))
    return torch.cat(parts)


def _logps_within(
    head: LMHead, contrast_hidden: Float[Tensor, "C n H"], ids: Int[Tensor, "n K+1"]
) -> Iterator[Float[Tensor, "n K+1"]]:
    """Yield g_k of each contrast, conditional on the support."""
    head_rows = embedding(ids, head.weight)  # once for all C contrasts
    for hidden in contrast_hidden:
        logits = head.column_logits(hidden, head_rows, ids)
        logps, token_logps = condition(logits, ids)
        yield torch.cat([logps, token_logps.unsqueeze(-1)], dim=-1)


def condition(
    logits: Float[Tensor, "n K+1"], ids: Int[Tensor, "n K+1"]
) -> tuple[Float[Tensor, "n K"], Float[Tensor, " n"]]:
    """Log-probabilities conditional on the support, and of the sampled token conditional on the support and itself.

    The logits of the `ids` are those of the K tokens of the support and, last, of the sampled token, which may be one
    of the K.
    """
    support, token = logits[:, :-1], logits[:, -1]
    normalizer = support.logsumexp(dim=-1)
    in_support = (ids[:, :-1] == ids[:, -1:]).any(dim=-1)
    wider = torch.where(in_support, normalizer, torch.logaddexp(normalizer, token))
    return support - normalizer.unsqueeze(-1), token - wider


def _buckets(projection: Projection, support: SupportConfig) -> Float[Tensor, "n B"]:
    logps = projection.logps
    if support.tail == "bucket":
        logps = objective.add_tail_bucket(logps, projection.log_outside)
    return logps
