"""Loss and gradient of one chunk of tokens, for each kind of support."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from credit_trl.loss.blocks import accumulation_dtype, chunks, logits_chunk
from credit_trl.loss.head import HeadGradients, LMHead
from credit_trl.loss.projection import backward_logits, backward_logps, project
from credit_trl.loss.scores import (
    Scores,
    TeacherStates,
    condition,
    full_generic_logps,
    score_over_vocabulary,
    score_within_support,
)
from credit_trl.loss.target import support_divergence, support_target, vocabulary_divergence, vocabulary_target
from credit_trl.loss.terms import CreditLoss, LossConfig


@dataclass
class StepTokens:
    """N tokens with hidden states and scores, indexable by chunk.

    `support_ids`, `normalizer` and `entropy` are set by `project_student`.
    """

    hidden: Float[Tensor, "N H"]
    ids: Int[Tensor, "N 1"]
    weights: Float[Tensor, " N"]
    teacher: Scores | TeacherStates
    contrastive_coef: Float[Tensor, " N"]
    old_logps: Float[Tensor, " N"] | None
    support_ids: Int[Tensor, "N K"] | None = None
    normalizer: Float[Tensor, " N"] | None = None
    entropy: Float[Tensor, " N"] | None = None

    def __getitem__(self, rows: slice) -> StepTokens:
        return StepTokens(**{f.name: None if (x := getattr(self, f.name)) is None else x[rows] for f in fields(self)})


def project_student(tokens: StepTokens, head: LMHead, config: LossConfig) -> StepTokens:
    """Add the student's normaliser, entropy and top K where a loss on K columns needs them; without gradient."""
    picks = config.support.kind == "student_topk"
    if not picks and (tokens.old_logps is None or config.is_clip is None):
        return tokens
    n, dtype = len(tokens.hidden), accumulation_dtype(tokens.hidden)
    size = config.chunk_size or logits_chunk(n, head.vocabulary_size, dtype, tokens.hidden.device)
    out = tokens.hidden.new_empty((min(size, n), head.vocabulary_size), dtype=dtype) if picks else None
    topk, parts = config.support.topk if picks else None, []
    for rows in chunks(n, size):
        buffer = None if out is None else out[: rows.stop - rows.start]
        parts.append(replace(project(head, tokens.hidden[rows], buffer, topk=topk), logits=None))
    return replace(
        tokens,
        support_ids=torch.cat([part.ids for part in parts]) if picks else None,
        normalizer=torch.cat([part.log_normalizer for part in parts]),
        entropy=torch.cat([part.entropy for part in parts]),
    )


def step_over_vocabulary(
    tokens: StepTokens, head: LMHead, config: LossConfig, gradients: HeadGradients | None, buffers: list[Tensor]
) -> CreditLoss:
    """Loss on true log-probabilities: K tokens and a tail bucket, or the sampled token."""
    scores = tokens.teacher
    if isinstance(scores, TeacherStates):
        student = project(head, tokens.hidden, buffers[0], tokens.ids, topk=config.support.topk)
        scores = score_over_vocabulary(scores, student.ids, tokens.ids, buffers[1])
    else:
        student = project(head, tokens.hidden, buffers[0], tokens.ids, ids=scores.support_ids)
    logps, log_outside = student.logps, None if config.support.kind == "sampled" else student.log_outside
    ratio = config.ratio(student.token_logps, tokens.old_logps)
    target = support_target(scores, tokens.contrastive_coef, config.rule, config.support)
    token_loss, kl, grads, outside_grads = support_divergence(
        logps, log_outside, target.logps, config.alpha, config.support
    )
    if gradients is not None:
        grads, outside_grads = (
            None if x is None else _weigh(x, tokens.weights * ratio, tokens.weights) for x in (grads, outside_grads)
        )
        backward_logps(head, student, grads, outside_grads, tokens.hidden, gradients)
    return CreditLoss(
        loss=_weighted_sum(token_loss * ratio, tokens.weights),
        token_loss=token_loss,
        token_logps=student.token_logps,
        entropy=student.entropy,
        kl_to_target=kl,
        kl_to_teacher=target.kl_to_teacher,
        student_mass=logps.exp().sum(dim=-1),
        teacher_mass=scores.teacher_logps[:, : scores.support_ids.shape[-1]].exp().sum(dim=-1),
        teacher_token_logps=scores.teacher_token_logps,
        generic_token_logps=scores.generic_token_logps,
        teacher_entropy=scores.teacher_entropy,
        contrastive_coef=target.contrastive_coef,
        advantages=target.token_logps - student.token_logps,
        ratio=ratio,
    )


def step_within_support(
    tokens: StepTokens, head: LMHead, config: LossConfig, gradients: HeadGradients | None, buffers: list[Tensor]
) -> CreditLoss:
    """Loss on a renormalised support: only K columns of the head are used, and the sampled token's for logging."""
    scores, scored_here = tokens.teacher, isinstance(tokens.teacher, TeacherStates)
    if scored_here:
        scores = score_within_support(scores, tokens.support_ids, tokens.ids)
    rows, bias = head.gather_columns(torch.cat([scores.support_ids, tokens.ids], dim=-1))
    logits = head.column_logits(tokens.hidden, (rows, bias))
    logps, token_logps = condition(logits, (scores.support_ids == tokens.ids).any(dim=-1))
    ratio, unknown = torch.ones_like(token_logps), torch.full_like(token_logps, torch.nan)
    entropy, student_mass = torch.special.entr(logps.exp()).sum(dim=-1), unknown
    if tokens.normalizer is not None:
        ratio = config.ratio(logits[:, -1] - tokens.normalizer, tokens.old_logps)
        entropy, student_mass = tokens.entropy, (logits[:, :-1].logsumexp(dim=-1) - tokens.normalizer).exp()
    target = support_target(scores, tokens.contrastive_coef, config.rule, config.support)
    token_loss, kl, grads, _ = support_divergence(logits[:, :-1], None, target.logps, config.alpha, config.support)
    if gradients is not None:
        grads = _weigh(grads, tokens.weights * ratio, tokens.weights)
        head.backward_columns(scores.support_ids, rows[:, :-1], logits[:, :-1], grads, tokens.hidden, gradients)
    return CreditLoss(
        loss=_weighted_sum(token_loss * ratio, tokens.weights),
        token_loss=token_loss,
        token_logps=token_logps,
        entropy=entropy,
        kl_to_target=kl,
        kl_to_teacher=target.kl_to_teacher,
        student_mass=student_mass,
        teacher_mass=unknown if scored_here else scores.teacher_logps.exp().sum(dim=-1),
        teacher_token_logps=scores.teacher_token_logps,
        generic_token_logps=scores.generic_token_logps,
        teacher_entropy=scores.teacher_entropy,
        contrastive_coef=target.contrastive_coef,
        advantages=target.token_logps - token_logps,
        ratio=ratio,
    )


def step_full(
    tokens: StepTokens, head: LMHead, config: LossConfig, gradients: HeadGradients | None, buffers: list[Tensor]
) -> CreditLoss:
    """Loss over the whole vocabulary; the target overwrites the teacher's logits."""
    states = tokens.teacher
    teacher = project(states.head, states.hidden, buffers[1], tokens.ids)
    teacher.logits.sub_(teacher.log_normalizer.unsqueeze(-1))
    generic = full_generic_logps(states, buffers[2], buffers[0])
    generic_token_logps = generic.gather(-1, tokens.ids).squeeze(-1)
    target = vocabulary_target(
        teacher.logits, generic, tokens.ids, tokens.contrastive_coef, config.rule, scratch=buffers[0]
    )
    student = project(head, tokens.hidden, buffers[0], tokens.ids)
    token_logps = student.token_logps
    ratio = config.ratio(token_logps, tokens.old_logps)
    logps = torch.sub(student.logits, student.log_normalizer.unsqueeze(-1), out=buffers[2])
    token_loss, kl, grads = vocabulary_divergence(logps, target.logps, config.alpha)
    if gradients is not None:
        grads = _weigh(grads, tokens.weights * ratio, tokens.weights)
        backward_logits(head, student.logits, grads, tokens.hidden, gradients)
    everything = torch.ones_like(token_logps)
    return CreditLoss(
        loss=_weighted_sum(token_loss * ratio, tokens.weights),
        token_loss=token_loss,
        token_logps=token_logps,
        entropy=student.entropy,
        kl_to_target=kl,
        kl_to_teacher=target.kl_to_teacher,
        student_mass=everything,
        teacher_mass=everything,
        teacher_token_logps=teacher.token_logps,
        generic_token_logps=generic_token_logps,
        teacher_entropy=teacher.entropy,
        contrastive_coef=target.contrastive_coef,
        advantages=target.token_logps - token_logps,
        ratio=ratio,
    )


def _weigh(grads: Float[Tensor, "n ..."], factors: Float[Tensor, " n"], weights: Float[Tensor, " n"]) -> Tensor:
    """Gradients of the weighted loss, in place; exactly 0 where the weight is 0, even where scores are not finite."""
    shape = (-1, *(1 for _ in grads.shape[1:]))
    return grads.mul_(factors.view(shape)).masked_fill_((weights == 0).view(shape), 0.0)


def _weighted_sum(values: Float[Tensor, " n"], weights: Float[Tensor, " n"]) -> Float[Tensor, ""]:
    return (values * weights).masked_fill(weights == 0, 0.0).sum()
