"""The loss of the student; the gradients of its hidden states and head are computed in the forward pass."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding

from credit_trl import objective
from credit_trl.config import CreditConfig
from credit_trl.loss.head import HeadGradients, LMHead, accumulation_dtype, chunks
from credit_trl.loss.projection import backward_logps, project
from credit_trl.loss.scores import Scores, SupportConfig, condition


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
        return LossTokens(*(None if x is None else x[rows] for x in self))

    def ratio(self, logps: Float[Tensor, " N"], config: CreditConfig) -> Float[Tensor, " N"]:
        """Factor of each token's loss: importance ratio and correction for the engine, from log π_θ, both detached.

        TRL's correction truncates ratios to the bounds, or masks (0) those outside; None is no bound.
        """
        ratio = torch.ones_like(logps)
        is_clip = config.distillation_is_clip
        if self.old_logps is not None and is_clip is not None:
            ratio = engine_difference(logps, self.old_logps).clamp(-20.0, 20.0).exp().clamp(max=is_clip)
        if self.engine_logps is None:
            return ratio
        correction = engine_difference(logps, self.engine_logps).exp()
        low = config.vllm_importance_sampling_clip_min or 0.0
        high = config.vllm_importance_sampling_clip_max
        high = math.inf if high is None else high
        if config.vllm_importance_sampling_mode == "token_truncate":
            return ratio * correction.clamp(low, high)
        return ratio * correction.masked_fill((correction < low) | (correction > high), 0.0)


def engine_difference(logps: Float[Tensor, " N"], engine_logps: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
    """Log-probabilities minus those that a vLLM engine reported; 0 where it reported none."""
    return torch.nan_to_num(logps - engine_logps, nan=0.0)


class CreditLoss(NamedTuple):
    """The loss and per-token values for logging; all but `loss` are detached.

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


@dataclass(frozen=True)
class MicroBatchLoss:
    """Loss of one micro-batch."""

    terms: CreditLoss  # over the N tokens that carry loss
    contrasted: Bool[Tensor, " N"]  # True where the sample has a contrast
    # Part of the teacher's fidelity: Σ_i w_i mean_t ΔV_t of sample i, with the weights of
    # `training.metrics.teacher_success_weights`; NaN where no group is mixed.
    fidelity: Float[Tensor, ""]
    aux_loss: Float[Tensor, ""] | None  # load-balancing loss of a mixture of experts
    read: int  # tokens of the student's forward pass, with padding
    valid: int  # the same without padding
    engine_logps: Float[Tensor, " N"] | None  # what the engine reported, where the loss uses it


class _Loss(torch.autograd.Function):
    """A loss whose gradients are known: the backward pass scales them in place, so that torch refuses a second one."""

    @staticmethod
    def forward(ctx, loss: Tensor, gradients: list[Tensor | None], *inputs: Tensor | None) -> Tensor:
        ctx.save_for_backward(*gradients)
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream: Tensor) -> tuple[Tensor | None, ...]:
        scaled = (None if gradient is None else gradient.mul_(upstream) for gradient in ctx.saved_tensors)
        return None, None, *scaled


def credit_loss(
    student_hidden: Float[Tensor, "N H"],
    head: LMHead,
    tokens: LossTokens,
    teacher: Scores,
    support: SupportConfig,
    config: CreditConfig,
) -> CreditLoss:
    """Weighted sum of the divergences from the student to the target a of f and Ĝ.

    The gradient is computed here and the backward pass only scales it, so `backward` can be called once. No gradient
    is computed where none is required.

    Args:
        student_hidden: (N, H), hidden states at the positions that predict the tokens; receives a gradient.
        head: head of the student; weight and bias receive gradients. A sharded head is gathered once.
        config: form of the target, α, and the bounds of the ratio of each token.

    Raises:
        ValueError: the weights require a gradient, or K exceeds the vocabulary.
    """
    if tokens.weights.requires_grad:
        raise ValueError("`weights` get no gradient: detach them.")
    support = support.resolved(head.vocabulary_size)
    head = head.gathered()
    inputs = (student_hidden, head.weight, head.bias)
    wanted = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    hidden = student_hidden.detach()
    size = head.chunk_size(hidden, support.topk + 1 if support.tail == "renormalize" else None)
    gradients = HeadGradients.of(student_hidden, head, len(hidden) <= size) if wanted else None
    with torch.no_grad():
        own_head = head.detached().for_products(hidden)
        result = _loss_in_chunks(hidden, own_head, tokens, gradients, teacher, support, config, size)
    if wanted:
        buffers = [gradients.hidden, gradients.weight, gradients.bias]
        del gradients
        for i, tensor in enumerate(inputs):
            # Gradients of fp16 inputs stay in fp32 until the loss scale is applied.
            if buffers[i] is not None and tensor.dtype != torch.float16:
                buffers[i] = buffers[i].to(tensor.dtype)
        result = result._replace(loss=_Loss.apply(result.loss, buffers, *inputs))
    return result


def _loss_in_chunks(
    hidden: Float[Tensor, "N H"],
    head: LMHead,
    tokens: LossTokens,
    gradients: HeadGradients | None,
    scores: Scores,
    support: SupportConfig,
    config: CreditConfig,
    size: int,
) -> CreditLoss:
    """Form the loss in chunks of `size` tokens, with buffers that all chunks share."""
    is_within = support.tail == "renormalize"
    is_clipped = tokens.old_logps is not None and config.distillation_is_clip is not None
    needs_normalizer = is_clipped or tokens.engine_logps is not None
    statistics = None
    if is_within and needs_normalizer:  # in chunks of logits, which read the head less often
        found = [project(head, hidden[rows]) for rows in chunks(len(hidden), head.chunk_size(hidden))]
        statistics = torch.cat([torch.stack([one.log_normalizer, one.entropy], dim=-1) for one in found])
    count = 0 if is_within else min(size, len(hidden))
    workspace = hidden.new_empty((count, head.vocabulary_size), dtype=accumulation_dtype(hidden.dtype))
    parts = []
    for rows in chunks(len(hidden), size):
        own = tokens.rows(rows)
        teacher = Scores(*(values[rows] for values in scores))
        if is_within:
            of_chunk = None if statistics is None else statistics[rows]
            student = student_within_support(hidden[rows], own.ids, teacher.support_ids, head, of_chunk)
        else:
            buffer = workspace[: rows.stop - rows.start]
            student = student_over_vocabulary(hidden[rows], own.ids, teacher.support_ids, head, buffer)
        part = None if gradients is None else gradients.rows(rows)
        parts.append(_chunk_loss(student, own, teacher, support, config, part))
    losses, *values = zip(*parts, strict=True)
    return CreditLoss(torch.stack(losses).sum(), *map(torch.cat, values))


@dataclass
class Student:
    """The student at one chunk of tokens."""

    values: Float[Tensor, "n K"]  # log-probabilities of the support; logits where the support is renormalised
    log_outside: Float[Tensor, " n"] | None  # log-probability outside the support; None where that is renormalised
    token_logps: Float[Tensor, " n"]  # of the sampled token; given support and token where that is renormalised
    policy_logps: Float[Tensor, " n"]  # the same over the whole vocabulary; NaN where it is not computed
    entropy: Float[Tensor, " n"]  # nats; of the distribution on the support where no normaliser is computed
    mass: Float[Tensor, " n"]  # probability of the support; NaN where it is not computed
    # Backpropagates gradients of `values` and `log_outside` to `HeadGradients`, the first argument; may overwrite the
    # logits.
    backward: Callable[..., None]


def _chunk_loss(
    student: Student,
    tokens: LossTokens,
    scores: Scores,
    support: SupportConfig,
    config: CreditConfig,
    gradients: HeadGradients | None,
) -> CreditLoss:
    """Loss of one chunk of tokens; writes its gradients."""
    coef_and_form = (tokens.contrastive_coef, config.contrastive_form)
    teacher = scores.teacher_logps
    if support.tail == "renormalize":  # conditional on the support, as Ĝ is
        teacher = objective.renormalize(teacher)
    target = objective.credit_target(teacher, scores.generic_logps, *coef_and_form)
    of_token = (scores.teacher_token_logps.unsqueeze(-1), scores.generic_token_logps.unsqueeze(-1))
    token_target = objective.credit_target(*of_token, *coef_and_form).squeeze(-1)
    normalized = objective.renormalize(target)
    kl_to_teacher = torch.linalg.vecdot(normalized.exp(), normalized - objective.renormalize(teacher))
    token_loss, kl_to_target, grads = support_divergence(student, target, support, config.distillation_alpha)
    ratio = tokens.ratio(student.policy_logps, config)
    # A token of weight 0 has no loss and no gradient, even where its scores are not finite.
    is_ignored = tokens.weights == 0
    if gradients is not None:
        for grad in grads:  # (n, K) and (n,)
            grad.t().mul_(tokens.weights * ratio).masked_fill_(is_ignored, 0.0)
        student.backward(gradients, *grads)
    return CreditLoss(
        loss=(token_loss * ratio * tokens.weights).masked_fill(is_ignored, 0.0).sum(),
        token_loss=token_loss,
        token_logps=student.token_logps,
        entropy=student.entropy,
        kl_to_target=kl_to_target,
        kl_to_teacher=kl_to_teacher,
        student_mass=student.mass,
        teacher_mass=scores.teacher_logps[:, : scores.support_ids.shape[-1]].exp().sum(dim=-1),
        teacher_token_logps=scores.teacher_token_logps,
        generic_token_logps=scores.generic_token_logps,
        teacher_entropy=scores.teacher_entropy,
        advantages=token_target - student.token_logps,
        ratio=ratio,
        policy_logps=student.policy_logps,
    )


def support_divergence(
    student: Student, target: Float[Tensor, "n B"], support: SupportConfig, alpha: float
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"], tuple[Tensor, ...]]:
    """ℓ, `KL(p ‖ softmax(a))`, and dℓ/d values and dℓ/d log_outside of the student, by the equations of `objective`.

    `target` is a, not normalised. Only a tail bucket has the gradient of `log_outside`.
    """
    target = target.to(student.values.dtype)
    with torch.enable_grad():
        read = [student.values, student.log_outside] if support.tail == "bucket" else [student.values]
        leaves = [x.detach().requires_grad_() for x in read]
        values = leaves[0]
        if support.kind == "sampled":
            advantages = (target - values).detach()
            token_loss = -(advantages * values).sum(dim=-1)
            kl = -advantages.squeeze(-1)
        else:
            normalized = objective.renormalize(target)
            if support.tail == "renormalize":
                student_logps = objective.renormalize(values)
                target = normalized
            else:
                student_logps = objective.add_tail_bucket(*leaves) if support.tail == "bucket" else values
            token_loss = objective.distillation_loss(student_logps, target, alpha)
            kl = objective.distillation_loss(student_logps.detach(), normalized, alpha=1.0)
        grads = torch.autograd.grad(token_loss.sum(), leaves)
    return token_loss.detach(), kl, grads


def student_over_vocabulary(
    hidden: Float[Tensor, "n H"],
    token_ids: Int[Tensor, " n"],
    support_ids: Int[Tensor, "n K"],
    head: LMHead,
    buffer: Float[Tensor, "n V"],
) -> Student:
    """True log-probabilities: of K tokens and of the rest of the vocabulary, or of the sampled token."""
    found = project(head, hidden, buffer, token_ids.unsqueeze(-1), ids=support_ids)
    logps = found.logps
    token_logps = found.token_logps
    mass = logps.exp().sum(dim=-1)
    backward = partial(backward_logps, head, found, hidden)
    return Student(logps, found.log_outside, token_logps, token_logps, found.entropy, mass, backward)


def student_within_support(
    hidden: Float[Tensor, "n H"],
    token_ids: Int[Tensor, " n"],
    support_ids: Int[Tensor, "n K"],
    head: LMHead,
    statistics: Float[Tensor, "n 2"] | None,  # normaliser and entropy over the vocabulary, which a ratio needs
) -> Student:
    """Logits of the K tokens and the sampled one, for a renormalised support. Only these rows of the head are read."""
    everything = torch.cat([support_ids, token_ids.unsqueeze(-1)], dim=-1)
    rows = embedding(everything, head.weight)
    logits = head.column_logits(hidden, rows, everything)
    values = logits[:, :-1]
    logps, token_logps = condition(logits, everything)
    if statistics is None:
        policy_logps = mass = torch.full_like(token_logps, torch.nan)
        entropy = torch.special.entr(logps.exp()).sum(dim=-1)
    else:
        normalizer, entropy = statistics.unbind(-1)
        policy_logps = logits[:, -1] - normalizer
        mass = (values.logsumexp(dim=-1) - normalizer).exp()
    backward = partial(head.backward_columns, rows[:, :-1], support_ids, values, hidden)
    return Student(values, None, token_logps, policy_logps, entropy, mass, backward)
