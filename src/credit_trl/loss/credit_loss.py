"""The loss of the student; the gradients of its hidden states and head are computed in the forward pass.

Where a micro-batch is computed in parts, the backward pass may add the gradient of the head to `.grad` instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from credit_trl.loss.blocks import CPU_HEAD_ROWS, MAX_LOSS_CHUNK, accumulation_dtype, chunk_size, chunks
from credit_trl.loss.head import HeadGradients, LMHead
from credit_trl.loss.scores import Scores, SupportConfig
from credit_trl.loss.student import SupportStudent, VocabularyStudent, with_normalizer
from credit_trl.loss.target import support_divergence, support_target
from credit_trl.loss.terms import CreditLoss, LossConfig, LossTokens


class _Gradients(torch.autograd.Function):
    """Autograd function whose backward pass is `backpropagate`: upstream gradient to those of the inputs, once."""

    @staticmethod
    def forward(ctx, loss: Tensor, backpropagate: Callable[[Tensor], list[Tensor | None]], *inputs: Tensor) -> Tensor:
        ctx.backpropagate = backpropagate
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.backpropagate is None:
            raise RuntimeError(
                "An earlier backward pass released the gradient of this `credit_loss`. Call `credit_loss` again, or "
                "add the losses that share it and call `backward` once."
            )
        gradients = ctx.backpropagate(upstream)
        ctx.backpropagate = None
        return None, None, *gradients


def credit_loss(
    student_hidden: Float[Tensor, "N H"],
    head: LMHead,
    tokens: LossTokens,
    teacher: Scores,
    config: LossConfig,
) -> CreditLoss:
    """Weighted sum of the divergences from the student to the target a of f and Ĝ.

    The gradient is computed here and the backward pass only scales it, so `backward` can be called once; for
    `config.adds_to_grad` see `LossConfig`. No gradient is computed where none is required.

    Args:
        student_hidden: (N, H), hidden states at the positions that predict the tokens; receives a gradient.
        head: head of the student; weight and bias receive gradients. A sharded head is gathered once.
        tokens: the sampled tokens, their weights and λ.
        teacher: scores of the tokens.

    Raises:
        ValueError: the weights require a gradient, or K exceeds the vocabulary.
    """
    if tokens.weights.requires_grad:
        raise ValueError("`weights` get no gradient: detach them.")
    support = config.support.resolved(head.vocabulary_size)
    head = head.gathered()
    inputs = (student_hidden, head.weight, head.bias)
    wanted = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    hidden = student_hidden.detach()
    tokens = tokens.to(accumulation_dtype(hidden.dtype))
    vocabulary, width = head.weight.shape
    itemsize = accumulation_dtype(hidden.dtype).itemsize
    if support.renormalizes:
        size = chunk_size(len(hidden), (support.topk + 1) * width * itemsize, hidden.device, CPU_HEAD_ROWS)
    else:
        size = chunk_size(len(hidden), vocabulary * itemsize, hidden.device, most=MAX_LOSS_CHUNK)
    own_head = head.detached().for_products(hidden)
    loss_in_chunks = partial(_loss_in_chunks, hidden, own_head, scores=teacher, config=config, size=size)
    if wanted and config.adds_to_grad and _has_grad(head, student_hidden):
        return _loss_adding_to_grad(loss_in_chunks, tokens, student_hidden, head)
    gradients = HeadGradients.of(student_hidden, head, len(hidden) <= size) if wanted else None
    with torch.no_grad():
        result = loss_in_chunks(tokens, gradients)
        if wanted:
            result.loss = _with_gradients(result.loss, gradients, inputs)
    return result


def _with_gradients(loss: Tensor, gradients: HeadGradients, inputs: tuple[Tensor | None, ...]) -> Tensor:
    """Connect the loss to its inputs. The gradient of the head is stored once, in the parameter's dtype."""
    buffers = [gradients.hidden, gradients.weight, gradients.bias]
    del gradients
    for i, tensor in enumerate(inputs):
        # Gradients of fp16 inputs stay in fp32 until the loss scale is applied.
        if buffers[i] is not None and tensor.dtype != torch.float16:
            buffers[i] = buffers[i].to(tensor.dtype)

    def backpropagate(upstream: Float[Tensor, ""]) -> list[Tensor | None]:
        return [None if buffer is None else buffer.mul_(upstream) for buffer in buffers]

    with torch.enable_grad():
        return _Gradients.apply(loss, backpropagate, *inputs)


def _loss_adding_to_grad(
    loss_in_chunks: Callable[[LossTokens, HeadGradients | None], CreditLoss],
    tokens: LossTokens,
    hidden: Float[Tensor, "N H"],
    head: LMHead,
) -> CreditLoss:
    """The loss whose backward pass forms it again, with gradients: it is linear in the weights, so in `upstream`."""

    def backpropagate(upstream: Float[Tensor, ""]) -> list[Float[Tensor, "N H"]]:
        gradients = HeadGradients.adding(hidden.detach(), head)
        loss_in_chunks(replace(tokens, weights=tokens.weights * upstream), gradients)
        return [gradients.hidden.to(hidden.dtype)]

    with torch.no_grad():
        result = loss_in_chunks(tokens, None)
    result.loss = _Gradients.apply(result.loss, backpropagate, hidden)
    return result


def _has_grad(head: LMHead, hidden: Tensor) -> bool:
    """Whether the gradient of the head can be added to its `.grad`, and the hidden states require one too."""
    dtype = accumulation_dtype(hidden.dtype)
    tensors = [x for x in (head.weight, head.bias) if x is not None]
    return hidden.requires_grad and all(x.is_leaf and x.grad is not None and x.grad.dtype == dtype for x in tensors)


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
    support = config.support.resolved(head.vocabulary_size)
    tokens = with_normalizer(tokens, hidden, head, support, config)
    count = 0 if support.renormalizes else min(size, len(hidden))
    workspace = hidden.new_empty((count, head.vocabulary_size), dtype=accumulation_dtype(hidden.dtype))
    parts = []
    for rows in chunks(len(hidden), size):
        of_chunk = (hidden[rows], tokens[rows], scores.support_ids[rows])
        if support.renormalizes:
            student = SupportStudent(*of_chunk, head)
        else:
            student = VocabularyStudent(*of_chunk, support, head, workspace[: rows.stop - rows.start])
        part = None if gradients is None else gradients.rows(rows)
        parts.append(_chunk_loss(student, tokens[rows], scores[rows], config, support, part))
    return CreditLoss.joined(parts)


def _chunk_loss(
    student: VocabularyStudent | SupportStudent,
    tokens: LossTokens,
    scores: Scores,
    config: LossConfig,
    support: SupportConfig,
    gradients: HeadGradients | None,
) -> CreditLoss:
    """Loss of one chunk of tokens; writes its gradients."""
    target, token_target, kl_to_teacher = support_target(scores, tokens.contrastive_coef, config.form, support)
    token_loss, kl_to_target, grads, outside_grads = support_divergence(
        student.values, student.log_outside, target, config.alpha, support
    )
    ratio = tokens.ratio(student.policy_logps, config)
    if gradients is not None:
        factors = tokens.weights * ratio
        grads = _weigh(grads, factors, tokens.weights)
        if outside_grads is not None:
            outside_grads = _weigh(outside_grads, factors, tokens.weights)
        student.backward(grads, outside_grads, gradients)
    return CreditLoss(
        loss=(token_loss * ratio * tokens.weights).masked_fill(tokens.weights == 0, 0.0).sum(),
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


def _weigh(grads: Float[Tensor, "n ..."], factors: Float[Tensor, " n"], weights: Float[Tensor, " n"]) -> Tensor:
    """Gradients of the weighted loss, in place; exactly 0 where the weight is 0, even where scores are not finite."""
    shape = (-1, *(1 for _ in grads.shape[1:]))
    return grads.mul_(factors.view(shape)).masked_fill_((weights == 0).view(shape), 0.0)
