"""The loss of the student; the gradients of its hidden states and head are computed in the forward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from credit_trl import objective
from credit_trl.loss.blocks import accumulation_dtype, chunks
from credit_trl.loss.head import HeadGradients, LMHead
from credit_trl.loss.projection import backward_logps, project
from credit_trl.loss.scores import Scores, condition
from credit_trl.loss.terms import CreditLoss, LossConfig, LossTokens, joined


class _Loss(torch.autograd.Function):
    """A loss whose gradients are known: the backward pass scales them, in place and once."""

    @staticmethod
    def forward(ctx, loss: Tensor, gradients: list[Tensor | None], *inputs: Tensor | None) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError(
                "An earlier backward pass released the gradient of this `credit_loss`. Call `credit_loss` again, or "
                "add the losses that share it and call `backward` once."
            )
        scaled = [None if gradient is None else gradient.mul_(upstream) for gradient in ctx.gradients]
        ctx.gradients = None
        return None, None, *scaled


def credit_loss(
    student_hidden: Float[Tensor, "N H"],
    head: LMHead,
    tokens: LossTokens,
    teacher: Scores,
    config: LossConfig,
) -> CreditLoss:
    """Weighted sum of the divergences from the student to the target a of f and Ĝ.

    The gradient is computed here and the backward pass only scales it, so `backward` can be called once. No gradient
    is computed where none is required.

    Args:
        student_hidden: (N, H), hidden states at the positions that predict the tokens; receives a gradient.
        head: head of the student; weight and bias receive gradients. A sharded head is gathered once.

    Raises:
        ValueError: the weights require a gradient, or K exceeds the vocabulary.
    """
    if tokens.weights.requires_grad:
        raise ValueError("`weights` get no gradient: detach them.")
    support = config.support.resolved(head.vocabulary_size)
    config = replace(config, support=support)
    head = head.gathered()
    inputs = (student_hidden, head.weight, head.bias)
    wanted = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    hidden = student_hidden.detach()
    size = head.chunk_size(hidden, support.topk + 1 if support.tail == "renormalize" else None)
    gradients = HeadGradients.of(student_hidden, head, len(hidden) <= size) if wanted else None
    with torch.no_grad():
        own_head = head.detached().for_products(hidden)
        result = _loss_in_chunks(hidden, own_head, tokens, gradients, teacher, config, size)
    if wanted:
        buffers = [gradients.hidden, gradients.weight, gradients.bias]
        del gradients
        for i, tensor in enumerate(inputs):
            # Gradients of fp16 inputs stay in fp32 until the loss scale is applied.
            if buffers[i] is not None and tensor.dtype != torch.float16:
                buffers[i] = buffers[i].to(tensor.dtype)
        result.loss = _Loss.apply(result.loss, buffers, *inputs)
    return result


def _loss_in_chunks(
    hidden: Float[Tensor, "N H"],
    head: LMHead,
    tokens: LossTokens,
    gradients: HeadGradients | None,
    scores: Scores,
    config: LossConfig,
    size: int,
) -> CreditLoss:
    """Form the loss in chunks of `size` tokens, with buffers that all chunks share."""
    is_within = config.support.tail == "renormalize"
    has_ratio = tokens.engine_logps is not None or (tokens.old_logps is not None and config.is_clip is not None)
    statistics = None
    if is_within and has_ratio:  # in chunks of logits, which read the head less often
        found = [project(head, hidden[rows]) for rows in chunks(len(hidden), head.chunk_size(hidden))]
        statistics = torch.cat([torch.stack([one.log_normalizer, one.entropy], dim=-1) for one in found])
    count = 0 if is_within else min(size, len(hidden))
    workspace = hidden.new_empty((count, head.vocabulary_size), dtype=accumulation_dtype(hidden.dtype))
    parts = []
    for rows in chunks(len(hidden), size):
        of_chunk = (hidden[rows], tokens[rows], scores.support_ids[rows])
        if is_within:
            student = student_within_support(*of_chunk, head, None if statistics is None else statistics[rows])
        else:
            buffer = workspace[: rows.stop - rows.start]
            student = student_over_vocabulary(*of_chunk, head, buffer)
        part = None if gradients is None else gradients.rows(rows)
        parts.append(_chunk_loss(student, tokens[rows], scores[rows], config, part))
    return joined(parts)


def _chunk_loss(
    student: Student, tokens: LossTokens, scores: Scores, config: LossConfig, gradients: HeadGradients | None
) -> CreditLoss:
    """Loss of one chunk of tokens; writes its gradients."""
    target_of = partial(objective.credit_target, contrastive_coef=tokens.contrastive_coef, form=config.form)
    teacher = scores.teacher_logps
    if config.support.tail == "renormalize":  # conditional on the support, as Ĝ is
        teacher = objective.renormalize(teacher)
    target = target_of(teacher, scores.generic_logps)
    of_token = (scores.teacher_token_logps, scores.generic_token_logps)
    token_target = target_of(*(values.unsqueeze(-1) for values in of_token)).squeeze(-1)
    normalized = objective.renormalize(target)
    kl_to_teacher = torch.linalg.vecdot(normalized.exp(), normalized - objective.renormalize(teacher))
    token_loss, kl_to_target, grads, outside_grads = support_divergence(student, target, config)
    ratio = tokens.ratio(student.policy_logps, config)
    # A token of weight 0 has no loss and no gradient, even where its scores are not finite.
    is_ignored = tokens.weights == 0
    if gradients is not None:
        factors = tokens.weights * ratio
        grads = grads.mul_(factors.unsqueeze(-1)).masked_fill_(is_ignored.unsqueeze(-1), 0.0)
        if outside_grads is not None:
            outside_grads = outside_grads.mul_(factors).masked_fill_(is_ignored, 0.0)
        student.backward(grads, outside_grads, gradients)
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
    student: Student, target: Float[Tensor, "n B"], config: LossConfig
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"], Float[Tensor, "n K"], Float[Tensor, " n"] | None]:
    """ℓ, `KL(p ‖ softmax(a))`, dℓ/d values and dℓ/d log_outside of the student, by the equations of `objective`.

    `target` is a, not normalised.
    """
    support = config.support
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
            token_loss = objective.distillation_loss(student_logps, target, config.alpha)
            kl = objective.distillation_loss(student_logps.detach(), normalized, alpha=1.0)
        grads = torch.autograd.grad(token_loss.sum(), leaves)
    return token_loss.detach(), kl, grads[0], grads[1] if support.tail == "bucket" else None


@dataclass
class Student:
    """The student at one chunk of tokens."""

    values: Float[Tensor, "n K"]  # log-probabilities of the support; logits where the support is renormalised
    log_outside: Float[Tensor, " n"] | None  # log-probability outside the support; None where that is renormalised
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
    head: LMHead,
    buffer: Float[Tensor, "n V"],
) -> Student:
    """True log-probabilities: of K tokens and of the rest of the vocabulary, or of the sampled token."""
    found = project(head, hidden, buffer, tokens.ids.unsqueeze(-1), ids=support_ids)
    logps = found.logps
    token_logps = found.token_logps
    return Student(
        logps,
        found.log_outside,
        token_logps,
        token_logps,
        found.entropy,
        logps.exp().sum(dim=-1),
        partial(backward_logps, head, found, hidden),
    )


def student_within_support(
    hidden: Float[Tensor, "n H"],
    tokens: LossTokens,
    support_ids: Int[Tensor, "n K"],
    head: LMHead,
    statistics: Float[Tensor, "n 2"] | None,  # normaliser and entropy over the vocabulary, which a ratio needs
) -> Student:
    """Logits of K tokens and of the sampled one, for a renormalised support: nothing else of the head is used."""
    ids = tokens.ids.unsqueeze(-1)
    everything = torch.cat([support_ids, ids], dim=-1)
    rows = head.gather_rows(everything)
    logits = head.column_logits(hidden, rows, everything)
    values = logits[:, :-1]
    logps, token_logps = condition(logits, (support_ids == ids).any(dim=-1))
    if statistics is None:
        policy_logps = mass = torch.full_like(token_logps, torch.nan)
        entropy = torch.special.entr(logps.exp()).sum(dim=-1)
    else:
        normalizer, entropy = statistics.unbind(-1)
        policy_logps = logits[:, -1] - normalizer
        mass = (values.logsumexp(dim=-1) - normalizer).exp()
    backward = partial(head.backward_columns, rows[:, :-1], support_ids, values, hidden)
    return Student(values, None, token_logps, policy_logps, entropy, mass, backward)
