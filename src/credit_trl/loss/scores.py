"""Scoring: what the lagged teacher says of sampled tokens and of the tokens that compete with them."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from credit_trl import objective
from credit_trl.loss.blocks import accumulation_dtype, chunks, columns_chunk, logits_chunk, passing_chunk
from credit_trl.loss.head import LMHead, Projection
from credit_trl.loss.projection import project
from credit_trl.objective import Baseline

Support = Literal["teacher_topk", "student_topk", "full", "sampled"]
Tail = Literal["bucket", "renormalize"]


@dataclass
class Scores:
    """What the teacher says of N tokens, on the support only. B = K buckets, or K + 1 with a tail bucket.

    Args:
        support_ids: (N, K) token ids, the likeliest first; the sampled token alone for `"sampled"`.
        teacher_logps: (N, B), f; true log-probabilities, the tail bucket last.
        generic_logps: (N, B), Ĝ, the same; with `"renormalize"` each g is normalised over the support. Zeros where
            there was no contrast (λ is 0 there).
        teacher_token_logps: (N,), f at the sampled token; with `"renormalize"` within the support and that token.
        generic_token_logps: (N,), Ĝ at the sampled token, likewise.
        teacher_entropy: (N,), nats, over the whole vocabulary.
    """

    support_ids: Int[Tensor, "N K"]
    teacher_logps: Float[Tensor, "N B"]
    generic_logps: Float[Tensor, "N B"]
    teacher_token_logps: Float[Tensor, " N"]
    generic_token_logps: Float[Tensor, " N"]
    teacher_entropy: Float[Tensor, " N"]

    def __getitem__(self, rows: slice) -> Scores:
        return Scores(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})


@dataclass
class TeacherStates:
    """The teacher's hidden states, for supports that are chosen inside the step (`"full"`, `"student_topk"`).

    Args:
        hidden: (N, H), the teacher's context.
        contrast_hidden: (C, N, H), the contrast contexts; C may be 0.
        head: the teacher's head.
        baseline: how the contrasts are averaged, see `objective.input_generic`.
    """

    hidden: Float[Tensor, "N H"]
    contrast_hidden: Float[Tensor, "C N H"]
    head: LMHead
    baseline: Baseline = "mean_log"

    def __getitem__(self, rows: slice) -> TeacherStates:
        return replace(self, hidden=self.hidden[rows], contrast_hidden=self.contrast_hidden[:, rows])


class Average:
    """Ĝ of log-probabilities that come one contrast at a time: nothing is kept but what they add up to."""

    def __init__(self, baseline: Baseline) -> None:
        self.baseline = baseline
        self.count = 0

    def fold(self, total: Tensor, logps: Tensor) -> None:
        """Take another contrast's into the total, in place; the first overwrites what the total held."""
        if not self.count:
            total.copy_(logps)
        elif self.baseline == "log_mean":
            torch.logaddexp(total, logps, out=total)
        else:
            total += logps
        self.count += 1

    def finish(self, total: Tensor) -> None:
        """From the total to Ĝ, in place."""
        if self.baseline == "log_mean":
            total -= math.log(self.count)
        else:
            total /= self.count


@torch.no_grad()
def score_tokens(
    teacher_hidden: Float[Tensor, "N H"],
    contrast_hidden: Float[Tensor, "C N H"],
    head: LMHead,
    token_ids: Int[Tensor, " N"],
    *,
    support: Literal["teacher_topk", "sampled"] = "teacher_topk",
    topk: int = 20,
    tail: Tail = "bucket",
    baseline: Baseline = "mean_log",
    chunk_size: int | None = None,
) -> Scores:
    """Score N sampled tokens under the teacher's context and C contrast contexts (lines 4 to 6 of Algorithm 1).

    Args:
        teacher_hidden: (N, H), the teacher's hidden states at the positions that predict the tokens. Masked
            positions are not among them.
        contrast_hidden: (C, N, H), the same under the contrast prompts; C = 0 leaves Ĝ at zero.
        head: the teacher's head; gathered once if it is sharded.
        token_ids: (N,), the sampled tokens y_t.
        support: `"teacher_topk"` keeps the teacher's `topk` most likely tokens, `"sampled"` the sampled token.
        topk: K, at most V.
        tail: `"bucket"` gives f and Ĝ a last bucket for the mass outside the support; `"renormalize"` projects the
            contrast on the K columns and the sampled token only. `"sampled"` takes no notice of it.
        baseline: the mean of the contrasts' logs, or the log of their mean, tail bucket included; with
            `"renormalize"` of the distributions within the support.
        chunk_size: tokens projected at once; None chooses.

    Returns:
        Scores in fp32, in fp64 for fp64 hidden states. No gradient flows.

    Raises:
        ValueError: `topk` exceeds the vocabulary, or the support is one that is chosen inside the step.
    """
    if support not in ("teacher_topk", "sampled"):
        raise ValueError(f"support {support!r} is chosen inside the step: give `credit_loss` a `TeacherStates`.")
    check_topk(topk, head, support)
    states = TeacherStates(teacher_hidden, contrast_hidden, head.gathered().detached(), baseline)
    tokens, within = token_ids.unsqueeze(-1), renormalizes(support, tail)
    n, dtype = len(token_ids), accumulation_dtype(teacher_hidden)
    size = chunk_size or logits_chunk(n, head.vocabulary_size, dtype, teacher_hidden.device)
    buffer = teacher_hidden.new_empty((min(size, n), head.vocabulary_size), dtype=dtype)
    parts = []
    for rows in chunks(n, size):
        out = buffer[: rows.stop - rows.start]
        chosen = {"topk": topk} if support == "teacher_topk" else {"ids": tokens[rows]}
        teacher = project(states.head, teacher_hidden[rows], out, tokens[rows], **chosen)
        parts.append(_of_teacher(teacher, tokens[rows], has_tail(support, tail), within))
    scores = concatenate(parts)
    if len(contrast_hidden):
        average = _generic_within_support if within else _generic_over_vocabulary
        scores.generic_logps, scores.generic_token_logps = average(
            states, scores.support_ids, tokens, has_tail(support, tail), chunk_size
        )
    return scores


def score_over_vocabulary(
    states: TeacherStates, ids: Int[Tensor, "n K"], tokens: Int[Tensor, "n 1"], out: Float[Tensor, "n V"]
) -> Scores:
    """Scores of one chunk on a given support with a tail bucket, in true log-probabilities."""
    teacher = project(states.head, states.hidden, out, tokens, ids)
    scores = _of_teacher(teacher, tokens, has_tail=True, within=False)
    if len(states.contrast_hidden):
        scores.generic_logps, scores.generic_token_logps = _generic_over_vocabulary(
            states, ids, tokens, True, len(ids)
        )
    return scores


def score_within_support(states: TeacherStates, ids: Int[Tensor, "n K"], tokens: Int[Tensor, "n 1"]) -> Scores:
    """Scores of one chunk that project the K columns of a given support only: all of them within the support."""
    columns = states.head.gather_columns(torch.cat([ids, tokens], dim=-1))
    in_support = (ids == tokens).any(dim=-1)
    teacher_logps, teacher_token_logps = condition(states.head.column_logits(states.hidden, columns), in_support)
    generic_logps, generic_token_logps = torch.zeros_like(teacher_logps), torch.zeros_like(teacher_token_logps)
    if len(states.contrast_hidden):
        generic_logps, generic_token_logps = _generic_within_support(states, ids, tokens, False, len(ids))
    entropy = torch.special.entr(teacher_logps.exp()).sum(dim=-1)
    return Scores(ids, teacher_logps, generic_logps, teacher_token_logps, generic_token_logps, entropy)


def _of_teacher(teacher: Projection, tokens: Int[Tensor, "n 1"], has_tail: bool, within: bool) -> Scores:
    """f, and Ĝ zero. The sampled token's f is within the support where the rest will be."""
    logps, token_logps = _buckets(teacher, has_tail), teacher.token_logps
    if within:
        logits = torch.cat([teacher.columns, teacher.token_logits], dim=-1)
        _, token_logps = condition(logits, (teacher.ids == tokens).any(dim=-1))
    nothing, nothing_at_token = torch.zeros_like(logps), torch.zeros_like(token_logps)
    return Scores(teacher.ids, logps, nothing, token_logps, nothing_at_token, teacher.entropy)


def _generic_over_vocabulary(
    states: TeacherStates,
    ids: Int[Tensor, "N K"],
    tokens: Int[Tensor, "N 1"],
    has_tail: bool,
    chunk_size: int | None,
) -> tuple[Float[Tensor, "N B"], Float[Tensor, " N"]]:
    """Ĝ on the support and at the sampled token, from true log-probabilities; no logits are kept."""
    n, dtype = len(ids), accumulation_dtype(states.hidden)
    size = chunk_size or passing_chunk(n, states.head.vocabulary_size, dtype, states.hidden.device)
    # The sampled token's stands behind the buckets.
    generic_logps = states.hidden.new_empty((n, ids.shape[-1] + has_tail + 1), dtype=dtype)
    for rows in chunks(n, size):
        average = Average(states.baseline)
        for hidden in states.contrast_hidden[:, rows]:
            contrast = project(states.head, hidden, None, tokens[rows], ids[rows], wants_entropy=False)
            logps = torch.cat([_buckets(contrast, has_tail), contrast.token_logps.unsqueeze(-1)], dim=-1)
            average.fold(generic_logps[rows], logps)
        average.finish(generic_logps[rows])
    return generic_logps[:, :-1], generic_logps[:, -1]


def _generic_within_support(
    states: TeacherStates,
    ids: Int[Tensor, "N K"],
    tokens: Int[Tensor, "N 1"],
    has_tail: bool,
    chunk_size: int | None,
) -> tuple[Float[Tensor, "N K"], Float[Tensor, " N"]]:
    """The same within the support. The head's rows are gathered once for all C contrasts."""
    everything, in_support = torch.cat([ids, tokens], dim=-1), (ids == tokens).any(dim=-1)
    hidden_size, dtype = states.hidden.shape[-1], accumulation_dtype(states.hidden)
    size = chunk_size or columns_chunk(*everything.shape, hidden_size, dtype, states.hidden.device)
    generic_logps = states.hidden.new_empty(everything.shape, dtype=dtype)
    for rows in chunks(len(ids), size):
        columns, average = states.head.gather_columns(everything[rows]), Average(states.baseline)
        for hidden in states.contrast_hidden[:, rows]:
            logps, token_logps = condition(states.head.column_logits(hidden, columns), in_support[rows])
            average.fold(generic_logps[rows], torch.cat([logps, token_logps.unsqueeze(-1)], dim=-1))
        average.finish(generic_logps[rows])
    return generic_logps[:, :-1], generic_logps[:, -1]


def generic_over_everything(
    states: TeacherStates, out: Float[Tensor, "n V"], scratch: Float[Tensor, "n V"]
) -> Float[Tensor, "n V"]:
    """Ĝ over the vocabulary, in `out`; zeros without contrast."""
    average = Average(states.baseline)
    for hidden in states.contrast_hidden:
        contrast = project(states.head, hidden, scratch if average.count else out, wants_entropy=False)
        contrast.logits.sub_(contrast.log_normalizer.unsqueeze(-1))
        average.fold(out, contrast.logits)
    if average.count:
        average.finish(out)
        return out
    return out.zero_()


def condition(
    logits: Float[Tensor, "n K+1"], in_support: Bool[Tensor, " n"]
) -> tuple[Float[Tensor, "n K"], Float[Tensor, " n"]]:
    """Log-probabilities conditional on the support, and the sampled token's on the support and itself.

    Args:
        logits: of the K tokens of the support and, last, of the sampled token.
        in_support: where the sampled token is one of the K.
    """
    support, token = logits[:, :-1], logits[:, -1]
    normalizer = support.logsumexp(dim=-1)
    wider = torch.where(in_support, normalizer, torch.logaddexp(normalizer, token))
    return support - normalizer.unsqueeze(-1), token - wider


def renormalizes(support: Support, tail: Tail) -> bool:
    """Whether the loss lives on K columns alone: a support of one token or of all has nothing to renormalise."""
    return tail == "renormalize" and support in ("teacher_topk", "student_topk")


def has_tail(support: Support, tail: Tail) -> bool:
    return tail == "bucket" and support in ("teacher_topk", "student_topk")


def check_topk(topk: int, head: LMHead, support: Support) -> None:
    if support in ("teacher_topk", "student_topk") and not 1 <= topk <= head.vocabulary_size:
        raise ValueError(f"topk must lie between 1 and the vocabulary's {head.vocabulary_size}, got {topk}.")


def concatenate(parts: list[Scores]) -> Scores:
    return Scores(**{f.name: torch.cat([getattr(part, f.name) for part in parts]) for f in fields(Scores)})


def _buckets(projection: Projection, has_tail: bool) -> Float[Tensor, "n B"]:
    logps = projection.logps
    return objective.add_tail_bucket(logps, projection.log_outside) if has_tail else logps
