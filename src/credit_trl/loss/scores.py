"""Scores of the teacher: its log-probabilities of the sampled tokens and of the tokens of the support."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from credit_trl import objective
from credit_trl.contexts.tokens import CompletionBatch, TokenContexts
from credit_trl.loss.blocks import CPU_HEAD_ROWS, accumulation_dtype, chunk_size, chunks, passing_chunk
from credit_trl.loss.head import LMHead, Projection, matmul_dtype
from credit_trl.loss.projection import project
from credit_trl.teacher.causal_lm import head_input
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

    def resolved(self, vocabulary: int) -> SupportConfig:
        """The support for a vocabulary of V tokens: one with K = V, and the sampled token, have no tail.

        Raises:
            ValueError: K exceeds V.
        """
        if self.kind == "sampled":
            return SupportConfig(self.kind, 1, None)
        topk = vocabulary if self.topk is None else self.topk
        if not 1 <= topk <= vocabulary:
            raise ValueError(f"topk must lie between 1 and the vocabulary size {vocabulary}, got {topk}.")
        return SupportConfig(self.kind, topk, None if topk == vocabulary else self.tail)


@dataclass
class Scores:
    """Log-probabilities of the teacher for N tokens, on the support. B = K buckets, or K + 1 with a tail bucket."""

    # The most likely first; all ids in their order for K = V; the sampled token for `"sampled"`.
    support_ids: Int[Tensor, "N K"]
    teacher_logps: Float[Tensor, "N B"]  # f; true log-probabilities, the tail bucket last
    # Ĝ; with `"renormalize"` each contrast is normalised over the support. Zeros without contrasts (λ is 0 there).
    generic_logps: Float[Tensor, "N B"]
    teacher_token_logps: Float[Tensor, " N"]  # f at the sampled token; for `"renormalize"` given support and token
    generic_token_logps: Float[Tensor, " N"]  # Ĝ at the sampled token, conditional likewise
    teacher_entropy: Float[Tensor, " N"]  # nats, over the whole vocabulary

    def __getitem__(self, rows: slice) -> Scores:
        return Scores(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})


@dataclass
class TeacherStates:
    """Hidden states of the teacher, and its head."""

    hidden: Float[Tensor, "N H"]  # under the teacher's prompt
    contrast_hidden: Float[Tensor, "C N H"]  # under the contrast prompts; C may be 0
    head: LMHead


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
        teacher: π_ref.
        contexts: contexts of the local samples.
        batch: their completions.
        support: tokens that are scored.
        head_of: a causal LM to its `LMHead`, of the policy's vocabulary.
        batch_tokens: see `token_states`, as `packed`.

    Returns:
        The fields of `Scores`, each (B, T, …), zero at positions that are not scored. Ids take 4 bytes, and
        log-probabilities have the dtype of the teacher's head, fp32 at least.
    """
    support = support.resolved(teacher.vocabulary_size)
    with teacher.active() as model:
        head = _teacher_head(teacher, model, head_of, batch.ids.device)
        dtype = torch.promote_types(head.weight.dtype, torch.float32)
        trailing = dict.fromkeys((f.name for f in fields(Scores)), ())
        trailing["support_ids"] = (support.topk,)
        trailing["teacher_logps"] = trailing["generic_logps"] = (support.topk + (support.tail == "bucket"),)
        stored = {
            name: batch.ids.new_zeros(*batch.ids.shape, *sizes, dtype=torch.int32 if name == "support_ids" else dtype)
            for name, sizes in trailing.items()
        }
        for samples, positions, hidden, contrast_hidden in token_states(
            teacher, model, contexts, batch, batch_tokens, packed
        ):
            at = (samples, positions)
            part = score_tokens(TeacherStates(hidden, contrast_hidden, head), batch.ids[at], support)
            for name, values in stored.items():
                values[at] = getattr(part, name).to(values.dtype)
    return stored


def _teacher_head(
    teacher: Teacher, model: nn.Module, head_of: Callable[[nn.Module], LMHead], device: torch.device
) -> LMHead:
    """The teacher's head, gathered once, in the dtype of its products, on the device of the batch."""
    unwrapped = teacher.unwrapped(model)
    head = head_of(unwrapped)
    with teacher.autocast():
        hidden = head_input(unwrapped, torch.empty(0, dtype=head.weight.dtype, device=device))
    head = head.gathered(matmul_dtype(hidden)).detached()
    # More rows than the policy's vocabulary are padding of a larger model of the family.
    return head.map(lambda weight: weight.to(device)[: teacher.vocabulary_size])


def stored_scores(inputs: dict[str, Tensor], pick: Callable[[Tensor], Tensor]) -> Scores:
    """The scores of N tokens, from what `score_completions` returned; `pick` takes them from (B, T, …)."""
    picked = {f.name: pick(inputs[f.name]) for f in fields(Scores)}
    picked["support_ids"] = picked["support_ids"].long()
    return Scores(**picked)


@torch.no_grad()
def score_tokens(states: TeacherStates, token_ids: Int[Tensor, " N"], support: SupportConfig) -> Scores:
    """Score N sampled tokens under the teacher's prompt and C contrast prompts (lines 4 to 6 of Algorithm 1).

    Args:
        states: hidden states of the teacher at the positions that predict the tokens; masked positions are not among
            them. C = 0 gives Ĝ = 0. A sharded head is gathered once.
        token_ids: (N,), the sampled tokens y_t.
        support: `"teacher_topk"` or `"sampled"`. With `"renormalize"` the contrasts are projected on the K columns and
            the sampled token only.

    Returns:
        Scores in fp32, or fp64 for fp64 hidden states, without gradient.

    Raises:
        ValueError: K exceeds the vocabulary.
    """
    support = support.resolved(states.head.vocabulary_size)
    states = replace(states, head=states.head.gathered().detached().for_products(states.hidden))
    tokens = token_ids.unsqueeze(-1)
    n = len(token_ids)
    dtype = accumulation_dtype(states.hidden.dtype)
    size = chunk_size(n, states.head.vocabulary_size * dtype.itemsize, states.hidden.device)
    buffer = states.hidden.new_empty((min(size, n), states.head.vocabulary_size), dtype=dtype)
    parts = []
    for rows in chunks(n, size):
        out = buffer[: rows.stop - rows.start]
        chosen = {"ids": tokens[rows]} if support.kind == "sampled" else {"topk": support.topk}
        teacher = project(states.head, states.hidden[rows], out, tokens[rows], **chosen)
        logps = _buckets(teacher, support.tail == "bucket")
        token_logps = teacher.token_logps
        if support.tail == "renormalize":
            logits = torch.cat([teacher.columns, teacher.token_logits], dim=-1)
            _, token_logps = condition(logits, (teacher.ids == tokens[rows]).any(dim=-1))
        none = (torch.zeros_like(logps), torch.zeros_like(token_logps))
        parts.append(Scores(teacher.ids, logps, none[0], token_logps, none[1], teacher.entropy))
    scores = Scores(*(torch.cat([getattr(part, f.name) for part in parts]) for f in fields(Scores)))
    if len(states.contrast_hidden):
        # The buffer of the teacher's logits serves again; a CPU takes narrow blocks of more rows.
        out = None if buffer.device.type == "cpu" else buffer
        generic = _generic_scores(states, scores.support_ids, tokens, support, out)
        scores.generic_logps, scores.generic_token_logps = generic
    return scores


def _generic_scores(
    states: TeacherStates,
    ids: Int[Tensor, "N K"],
    tokens: Int[Tensor, "N 1"],
    support: SupportConfig,
    out: Float[Tensor, "n V"] | None,
) -> tuple[Float[Tensor, "N B"], Float[Tensor, " N"]]:
    """Ĝ on the support and at the sampled token; overwrites `out`, a chunk of logits.

    With `"renormalize"` each contrast is conditional on the support, and its rows of the head are gathered once for
    all C contrasts.
    """
    n = len(ids)
    everything = torch.cat([ids, tokens], dim=-1)
    in_support = (ids == tokens).any(dim=-1)
    dtype = accumulation_dtype(states.hidden.dtype)
    device = states.hidden.device
    if support.tail == "renormalize":
        row_bytes = everything.shape[-1] * states.hidden.shape[-1] * dtype.itemsize
        size = chunk_size(n, row_bytes, device, CPU_HEAD_ROWS)
    elif out is None:
        size = passing_chunk(n, states.head.vocabulary_size * dtype.itemsize, device)
    else:
        size = max(len(out), 1)
    # The last column is the sampled token.
    generic_logps = states.hidden.new_zeros((n, everything.shape[-1] + (support.tail == "bucket")), dtype=dtype)
    for rows in chunks(n, size):
        rows_of_head = states.head.gather_rows(everything[rows]) if support.tail == "renormalize" else None
        buffer = None if out is None else out[: rows.stop - rows.start]
        for hidden in states.contrast_hidden[:, rows]:
            if support.tail == "renormalize":
                logps, token_logps = condition(
                    states.head.column_logits(hidden, rows_of_head, everything[rows]), in_support[rows]
                )
            else:
                contrast = project(states.head, hidden, buffer, tokens[rows], ids[rows], None, False, False)
                logps = _buckets(contrast, support.tail == "bucket")
                token_logps = contrast.token_logps
            generic_logps[rows] += torch.cat([logps, token_logps.unsqueeze(-1)], dim=-1) / len(states.contrast_hidden)
    return generic_logps[:, :-1], generic_logps[:, -1]


def condition(
    logits: Float[Tensor, "n K+1"], in_support: Bool[Tensor, " n"]
) -> tuple[Float[Tensor, "n K"], Float[Tensor, " n"]]:
    """Log-probabilities conditional on the support, and of the sampled token conditional on the support and itself.

    `logits` are those of the K tokens of the support and, last, of the sampled token, which may be one of the K.
    """
    support, token = logits[:, :-1], logits[:, -1]
    normalizer = support.logsumexp(dim=-1)
    wider = torch.where(in_support, normalizer, torch.logaddexp(normalizer, token))
    return support - normalizer.unsqueeze(-1), token - wider


def _buckets(projection: Projection, has_tail: bool) -> Float[Tensor, "n B"]:
    logps = projection.logps
    return objective.add_tail_bucket(logps, projection.log_outside) if has_tail else logps
