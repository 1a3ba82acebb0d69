"""The loss of the student; the gradients of its hidden states and head are computed in the forward pass."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from credit_trl import objective
from credit_trl.config import CreditConfig
from credit_trl.loss.head import HeadGradients, LMHead, accumulation_dtype, chunks
from credit_trl.loss.projection import LossGradients, TokenPolicy, token_policy
from credit_trl.loss.scores import Scores, SupportConfig
from credit_trl.loss.student import Normalizers, Student, SupportStudent, VocabularyStudent


class LossTokens(NamedTuple):
    """N sampled tokens that carry loss."""

    ids: Int[Tensor, " N"]
    # Of each token's loss, without gradient; a token of weight 0 contributes nothing, whatever its scores.
    weights: Float[Tensor, " N"]
    contrastive_coef: Float[Tensor, " N"]  # λ; 0 where the sample has no contrast
    # Log-probabilities at rollout time, NaN where an engine reported none; None when on-policy.
    old_logps: Float[Tensor, " N"] | None = None
    # What the vLLM engine reported, NaN where nothing, if the policy that sampled is the present one; None for no
    # correction.
    engine_logps: Float[Tensor, " N"] | None = None

    def rows(self, rows: slice) -> Self:
        """The tokens of one chunk."""
        return LossTokens._make(None if values is None else values[rows] for values in self)

    def needs_policy_logps(self, config: CreditConfig) -> bool:
        """Whether `ratio` reads the log-probabilities of the policy."""
        is_clipped = self.old_logps is not None and config.distillation_is_clip is not None
        return is_clipped or self.engine_logps is not None

    def ratio(self, policy_logps: Float[Tensor, " N"], config: CreditConfig) -> Float[Tensor, " N"]:
        """Factor of each token's loss: importance ratio and correction for the engine, both detached."""
        ratio = torch.ones_like(policy_logps)
        if self.old_logps is not None and config.distillation_is_clip is not None:
            log_ratio = engine_difference(policy_logps, self.old_logps)
            ratio = log_ratio.clamp(-20.0, 20.0).exp().clamp(max=config.distillation_is_clip)
        if self.engine_logps is not None:
            ratio = ratio * engine_correction(policy_logps, self.engine_logps, config)
        return ratio


def engine_correction(
    policy_logps: Float[Tensor, " N"], engine_logps: Float[Tensor, " N"], config: CreditConfig
) -> Float[Tensor, " N"]:
    """TRL's correction for the engine: ratios are truncated to the bounds, or masked (0) outside; None is no bound."""
    correction = engine_difference(policy_logps, engine_logps).exp()
    low = config.vllm_importance_sampling_clip_min or 0.0
    high = config.vllm_importance_sampling_clip_max
    if high is None:
        high = math.inf
    if config.vllm_importance_sampling_mode == "token_truncate":
        return correction.clamp(low, high)
    return correction.masked_fill((correction < low) | (correction > high), 0.0)


def engine_difference(logps: Float[Tensor, " N"], engine_logps: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
    """Log-probabilities minus those that a vLLM engine reported; 0 where it reported none."""
    return torch.nan_to_num(logps - engine_logps, nan=0.0)


class CreditLoss(NamedTuple):
    """The loss and per-token values for logging; all but `loss` are detached.

    With a policy's gradients `policy_logps` and `entropy` are over the whole vocabulary and differentiable too.
    Logarithms, entropies and divergences are in nats. With `"renormalize"` some values are conditional on the support,
    see `credit_trl.loss`.
    """

    loss: Float[Tensor, ""]  # Σ_n weight_n · ratio_n · ℓ_n, differentiable once
    token_loss: Float[Tensor, " N"]  # ℓ_n, without weight and ratio
    token_logps: Float[Tensor, " N"]  # log π_θ of the sampled token
    entropy: Float[Tensor, " N"]  # of the student
    kl_to_target: Float[Tensor, " N"]  # KL(p ‖ softmax(a)) over the buckets; for "sampled" −R_t, an estimate
    kl_to_teacher: Float[Tensor, " N"]  # KL(softmax(a) ‖ f) over the buckets; 0 for "sampled"
    student_mass: Float[Tensor, " N"]  # probability of the support; NaN where the normaliser is not computed
    teacher_mass: Float[Tensor, " N"]  # the same under the teacher
    teacher_token_logps: Float[Tensor, " N"]  # f at the sampled token
    generic_token_logps: Float[Tensor, " N"]  # Ĝ at the sampled token
    teacher_entropy: Float[Tensor, " N"]
    advantages: Float[Tensor, " N"]  # R_t at the sampled token
    ratio: Float[Tensor, " N"]  # importance ratio, with the engine's correction; ones where there is none
    policy_logps: Float[Tensor, " N"]  # log π_θ over the whole vocabulary; NaN where the normaliser is not computed

    def detached_rows(self, rows: Int[Tensor, " n"]) -> Self:
        """The loss, and the values of some tokens without gradient."""
        return CreditLoss._make([self.loss, *[values[rows].detach() for values in self[1:]]])


@dataclass(frozen=True)
class MicroBatchLoss:
    """Loss of one micro-batch."""

    terms: CreditLoss  # over the N tokens that carry loss
    contrasted: Bool[Tensor, " N"]  # True where the sample has a contrast
    # Part of the teacher's fidelity: Σ_i w_i mean_t ΔV_t of sample i, with the weights of
    # `training.metrics.teacher_success_weights`; NaN where no group is mixed.
    fidelity: Float[Tensor, ""]
    nonfinite: Bool[Tensor, " B"]  # the samples with a token whose loss is not finite
    aux_loss: Float[Tensor, ""] | None  # load-balancing loss of a mixture of experts
    tokens_read: int  # of the student's forward pass, with padding
    valid: int  # the same without padding
    engine_logps: Float[Tensor, " N"] | None  # what the engine reported, where the loss uses it
    policy: TokenPolicy | None = None  # (B, T), where GRPO's loss reads the same pass


def credit_loss(
    student_hidden: Float[Tensor, "N H"],
    head: LMHead,
    tokens: LossTokens,
    teacher: Scores,
    support: SupportConfig,
    config: CreditConfig,
    with_policy: bool = False,
) -> CreditLoss:
    """Weighted sum of the divergences from the student to the target a of f and Ĝ.

    The gradient is computed here and the backward pass only scales it, so `backward` can be called once. No gradient
    is computed where none is required.

    Args:
        student_hidden: (N, H), hidden states at the positions that predict the tokens; receives a gradient.
        head: head of the student; weight and bias receive gradients. A sharded head is gathered once.
        config: form of the target, α, and the bounds of the ratio of each token.
        with_policy: also make `policy_logps` and `entropy` differentiable, for another loss of the same tokens. A
            support of few tokens then waits for its gradients, so that one product with the head serves both.

    Raises:
        ValueError: the weights require a gradient, or K exceeds the vocabulary.
    """
    if tokens.weights.requires_grad:
        raise ValueError("`weights` get no gradient: detach them.")
    support = support.resolved(head.vocabulary_size)
    head = head.gathered()
    inputs = (student_hidden, head.weight, head.bias)
    needs_gradient = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    hidden = student_hidden.detach()
    columns = support.topk + 1 if support.tail == "renormalize" else None
    chunk_size = head.chunk_size(hidden, columns)
    gradients = None
    if needs_gradient:
        gradients = HeadGradients.of(student_hidden, head, in_one_chunk=len(hidden) <= chunk_size)
        if with_policy and (support.tail == "bucket" or support.kind == "sampled"):
            gradients.deferred = []
    with torch.no_grad():
        product_head = head.detached().for_products(hidden)
        result = _loss_in_chunks(hidden, product_head, tokens, gradients, teacher, support, config, chunk_size)
    is_deferred = gradients is not None and gradients.deferred is not None
    if with_policy and not is_deferred and (needs_gradient or support.tail == "renormalize"):
        policy = token_policy(student_hidden, head, tokens.ids)
        result = result._replace(policy_logps=policy.logps, entropy=policy.entropies)
    if not needs_gradient:
        return result
    if is_deferred:
        loss, logps, entropy = LossGradients.apply(
            gradients, result.loss, result.policy_logps, result.entropy, student_hidden, head.weight, head.bias
        )
        return result._replace(loss=loss, policy_logps=logps, entropy=entropy)
    # One after the other, so that at most one exists in two precisions.
    gradients.hidden = _in_dtype_of(student_hidden, gradients.hidden)
    gradients.weight = _in_dtype_of(head.weight, gradients.weight)
    gradients.bias = _in_dtype_of(head.bias, gradients.bias)
    loss, _, _ = LossGradients.apply(gradients, result.loss, None, None, student_hidden, head.weight, head.bias)
    return result._replace(loss=loss)


def _in_dtype_of(tensor: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    """A gradient in the dtype of its tensor; that of an fp16 tensor stays in fp32 until the loss scale is applied."""
    if gradient is None or tensor.dtype == torch.float16:
        return gradient
    return gradient.to(tensor.dtype)


def _loss_in_chunks(
    hidden: Float[Tensor, "N H"],
    head: LMHead,
    tokens: LossTokens,
    gradients: HeadGradients | None,
    scores: Scores,
    support: SupportConfig,
    config: CreditConfig,
    chunk_size: int,
) -> CreditLoss:
    """Form the loss in chunks of tokens, with buffers that all chunks share."""
    is_conditional = support.tail == "renormalize"
    normalizers = None
    if is_conditional and tokens.needs_policy_logps(config):
        normalizers = Normalizers.of(head, hidden)
    keeps_logits = not is_conditional and (gradients is None or gradients.deferred is None)
    buffer_rows = 0
    if keeps_logits:
        buffer_rows = min(chunk_size, len(hidden))
    buffer = hidden.new_empty((buffer_rows, head.vocabulary_size), dtype=accumulation_dtype(hidden.dtype))
    chunk_losses = []
    for rows in chunks(len(hidden), chunk_size):
        chunk_tokens = tokens.rows(rows)
        chunk_scores = Scores._make(values[rows] for values in scores)
        student: Student
        if is_conditional:
            chunk_normalizers = None if normalizers is None else normalizers.rows(rows)
            student = SupportStudent(head, hidden[rows], chunk_tokens.ids, chunk_scores.support_ids, chunk_normalizers)
        else:
            logits = buffer[: rows.stop - rows.start] if keeps_logits else None
            student = VocabularyStudent(head, hidden[rows], chunk_tokens.ids, chunk_scores.support_ids, logits)
        chunk_gradients = None if gradients is None else gradients.rows(rows)
        chunk_losses.append(_chunk_loss(student, chunk_tokens, chunk_scores, support, config, chunk_gradients))
    return _joined(chunk_losses)


def _joined(chunk_losses: Sequence[CreditLoss]) -> CreditLoss:
    """The loss of all chunks."""
    joined = {}
    for name in CreditLoss._fields:
        values = [getattr(chunk_loss, name) for chunk_loss in chunk_losses]
        joined[name] = torch.stack(values).sum() if name == "loss" else torch.cat(values)
    return CreditLoss(**joined)


def _chunk_loss(
    student: Student,
    tokens: LossTokens,
    scores: Scores,
    support: SupportConfig,
    config: CreditConfig,
    gradients: HeadGradients | None,
) -> CreditLoss:
    """Loss of one chunk of tokens; writes its gradients."""
    coef = tokens.contrastive_coef
    form = config.contrastive_form
    teacher_logps = scores.teacher_logps
    if support.tail == "renormalize":  # conditional on the support, as Ĝ is
        teacher_logps = objective.renormalize(teacher_logps)
    target = objective.credit_target(teacher_logps, scores.generic_logps, coef, form)
    token_target = objective.credit_target(
        scores.teacher_token_logps.unsqueeze(-1), scores.generic_token_logps.unsqueeze(-1), coef, form
    ).squeeze(-1)
    divergence = support_divergence(student, target, support, config.distillation_alpha)
    ratio = tokens.ratio(student.policy_logps, config)
    # A token of weight 0 has no loss and no gradient, even where its scores are not finite.
    is_ignored = tokens.weights == 0
    if gradients is not None:
        factor = tokens.weights * ratio
        divergence.value_grads.mul_(factor.unsqueeze(-1)).masked_fill_(is_ignored.unsqueeze(-1), 0.0)
        if divergence.outside_grads is not None:
            divergence.outside_grads.mul_(factor).masked_fill_(is_ignored, 0.0)
        student.backward(gradients, divergence.value_grads, divergence.outside_grads)
    return CreditLoss(
        loss=(divergence.token_loss * ratio * tokens.weights).masked_fill(is_ignored, 0.0).sum(),
        token_loss=divergence.token_loss,
        token_logps=student.token_logps,
        entropy=student.entropy,
        kl_to_target=divergence.kl_to_target,
        kl_to_teacher=_kl(objective.renormalize(target), objective.renormalize(teacher_logps)),
        student_mass=student.mass,
        teacher_mass=scores.teacher_logps[:, : scores.support_ids.shape[-1]].exp().sum(dim=-1),
        teacher_token_logps=scores.teacher_token_logps,
        generic_token_logps=scores.generic_token_logps,
        teacher_entropy=scores.teacher_entropy,
        advantages=objective.advantage(token_target, student.token_logps),
        ratio=ratio,
        policy_logps=student.policy_logps,
    )


def _kl(logps: Float[Tensor, "n B"], other_logps: Float[Tensor, "n B"]) -> Float[Tensor, " n"]:
    return objective.distillation_loss(logps, other_logps, alpha=1.0)


class Divergence(NamedTuple):
    """Divergence from the student to the target at n tokens, without gradient."""

    token_loss: Float[Tensor, " n"]  # ℓ
    kl_to_target: Float[Tensor, " n"]  # KL(p ‖ softmax(a)); for "sampled" −R_t, an estimate
    value_grads: Float[Tensor, "n K"]  # dℓ / d values of the student
    outside_grads: Float[Tensor, " n"] | None  # dℓ / d log_outside; None without a tail bucket


def support_divergence(
    student: Student, target: Float[Tensor, "n B"], support: SupportConfig, alpha: float
) -> Divergence:
    """ℓ of the student and its gradients, by the equations of `objective`; `target` is a, not normalised."""
    target = target.to(student.values.dtype)
    with torch.enable_grad():
        values = student.values.detach().requires_grad_()
        leaves = [values]
        if support.kind == "sampled":
            advantages = objective.advantage(target, values).detach()
            token_loss = -(advantages * values).sum(dim=-1)
            kl_to_target = -advantages.squeeze(-1)
        else:
            student_logps = values
            normalized_target = objective.renormalize(target)
            if support.tail == "renormalize":
                student_logps = objective.renormalize(values)
                target = normalized_target
            elif support.tail == "bucket":
                log_outside = student.log_outside.detach().requires_grad_()
                leaves.append(log_outside)
                student_logps = objective.add_tail_bucket(values, log_outside)
            token_loss = objective.distillation_loss(student_logps, target, alpha)
            kl_to_target = objective.distillation_loss(student_logps.detach(), normalized_target, alpha=1.0)
        value_grads, *outside_grads = torch.autograd.grad(token_loss.sum(), leaves)
    return Divergence(token_loss.detach(), kl_to_target, value_grads, outside_grads[0] if outside_grads else None)
