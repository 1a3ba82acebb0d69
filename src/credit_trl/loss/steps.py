"""Loss and gradient of one chunk of tokens, for each kind of support."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from credit_trl.loss.blocks import accumulation_dtype, chunks, logits_chunk
from credit_trl.loss.correction import EngineTokens, clipped_ratio
from credit_trl.loss.head import HeadGradients, LMHead
from credit_trl.loss.projection import backward_logps, project
from credit_trl.loss.scores import Scores, condition
from credit_trl.loss.target import support_divergence, support_target
from credit_trl.loss.terms import CreditLoss, LossConfig


@dataclass
class StepTokens:
    """N tokens with hidden states and scores, indexable by chunk.

    `normalizer`, `entropy` and `correction` are set by `project_student`.
    """

    hidden: Float[Tensor, "N H"]
    ids: Int[Tensor, "N 1"]
    weights: Float[Tensor, " N"]
    teacher: Scores
    contrastive_coef: Float[Tensor, " N"]
    old_logps: Float[Tensor, " N"] | None
    engine: EngineTokens | None = None
    normalizer: Float[Tensor, " N"] | None = None
    entropy: Float[Tensor, " N"] | None = None
    correction: Float[Tensor, " N"] | None = None

    def __getitem__(self, rows: slice) -> StepTokens:
        return StepTokens(**{f.name: None if (x := getattr(self, f.name)) is None else x[rows] for f in fields(self)})

    def ratio(self, logps: Float[Tensor, " n"], config: LossConfig) -> Float[Tensor, " n"]:
        """Factor of each token's loss: importance ratio and correction for the engine."""
        ratio = clipped_ratio(logps, self.old_logps, config.is_clip)
        if self.correction is not None:
            return ratio * self.correction
        if self.engine is not None and config.correction is not None:
            return ratio * config.correction.ratio(logps, self.engine)
        return ratio


def project_student(tokens: StepTokens, head: LMHead, config: LossConfig) -> StepTokens:
    """Add what a step needs beforehand of all tokens, from a projection without gradient.

    These are the normaliser and entropy of a loss on K columns, and the ratio of a whole completion.
    """
    within = config.support.renormalizes
    corrects = config.correction is not None and tokens.engine is not None
    per_sequence = corrects and config.correction.per_sequence
    has_ratio = corrects or (tokens.old_logps is not None and config.is_clip is not None)
    if not (per_sequence or (within and has_ratio)):
        return tokens
    n, dtype = len(tokens.hidden), accumulation_dtype(tokens.hidden)
    size = config.chunk_size or logits_chunk(n, head.vocabulary_size, dtype, tokens.hidden.device)
    parts = []
    for rows in chunks(n, size):
        sampled = tokens.ids[rows] if per_sequence else None
        parts.append(replace(project(head, tokens.hidden[rows], None, sampled), logits=None))
    correction = None
    if per_sequence:
        correction = config.correction.ratio(torch.cat([part.token_logps for part in parts]), tokens.engine)
    return replace(
        tokens,
        normalizer=torch.cat([part.log_normalizer for part in parts]),
        entropy=torch.cat([part.entropy for part in parts]),
        correction=correction,
    )


def step_over_vocabulary(
    tokens: StepTokens, head: LMHead, config: LossConfig, gradients: HeadGradients | None, buffer: Tensor
) -> CreditLoss:
    """Loss on true log-probabilities: K tokens and a tail bucket, or the sampled token."""
    scores = tokens.teacher
    student = project(head, tokens.hidden, buffer, tokens.ids, ids=scores.support_ids)
    logps, log_outside = student.logps, None if config.support.kind == "sampled" else student.log_outside
    ratio = tokens.ratio(student.token_logps, config)
    target = support_target(scores, tokens.contrastive_coef, config.form, config.support)
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
        policy_logps=student.token_logps,
    )


def step_within_support(
    tokens: StepTokens, head: LMHead, config: LossConfig, gradients: HeadGradients | None, buffer: Tensor
) -> CreditLoss:
    """Loss on a renormalised support: only K columns of the head are used, and the sampled token's for logging."""
    scores = tokens.teacher
    columns = head.gather_columns(torch.cat([scores.support_ids, tokens.ids], dim=-1))
    logits = head.column_logits(tokens.hidden, columns)
    logps, token_logps = condition(logits, (scores.support_ids == tokens.ids).any(dim=-1))
    ratio, unknown = torch.ones_like(token_logps), torch.full_like(token_logps, torch.nan)
    entropy, student_mass, policy_logps = torch.special.entr(logps.exp()).sum(dim=-1), unknown, unknown
    if tokens.normalizer is not None:
        policy_logps = logits[:, -1] - tokens.normalizer
        ratio = tokens.ratio(policy_logps, config)
        entropy, student_mass = tokens.entropy, (logits[:, :-1].logsumexp(dim=-1) - tokens.normalizer).exp()
    target = support_target(scores, tokens.contrastive_coef, config.form, config.support)
    token_loss, kl, grads, _ = support_divergence(logits[:, :-1], None, target.logps, config.alpha, config.support)
    if gradients is not None:
        grads = _weigh(grads, tokens.weights * ratio, tokens.weights)
        columns = columns.first(scores.support_ids.shape[-1])
        head.backward_columns(columns, logits[:, :-1], grads, tokens.hidden, gradients)
    return CreditLoss(
        loss=_weighted_sum(token_loss * ratio, tokens.weights),
        token_loss=token_loss,
        token_logps=token_logps,
        entropy=entropy,
        kl_to_target=kl,
        kl_to_teacher=target.kl_to_teacher,
        student_mass=student_mass,
        teacher_mass=scores.teacher_logps.exp().sum(dim=-1),
        teacher_token_logps=scores.teacher_token_logps,
        generic_token_logps=scores.generic_token_logps,
        teacher_entropy=scores.teacher_entropy,
        contrastive_coef=target.contrastive_coef,
        advantages=target.token_logps - token_logps,
        ratio=ratio,
        policy_logps=policy_logps,
    )


def _weigh(grads: Float[Tensor, "n ..."], factors: Float[Tensor, " n"], weights: Float[Tensor, " n"]) -> Tensor:
    """Gradients of the weighted loss, in place; exactly 0 where the weight is 0, even where scores are not finite."""
    shape = (-1, *(1 for _ in grads.shape[1:]))
    return grads.mul_(factors.view(shape)).masked_fill_((weights == 0).view(shape), 0.0)


def _weighted_sum(values: Float[Tensor, " n"], weights: Float[Tensor, " n"]) -> Float[Tensor, ""]:
    return (values * weights).masked_fill(weights == 0, 0.0).sum()
