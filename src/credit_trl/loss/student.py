"""Loss of the student; the gradients of its hidden states and head are computed in the forward pass.

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

from credit_trl.loss.blocks import MAX_LOSS_CHUNK, accumulation_dtype, chunks, columns_chunk, logits_chunk
from credit_trl.loss.head import HeadGradients, LMHead
from credit_trl.loss.scores import Scores
from credit_trl.loss.steps import StepTokens, project_student, step_over_vocabulary, step_within_support
from credit_trl.loss.terms import CreditLoss, LossConfig, LossTokens


class _FormedGradients(torch.autograd.Function):
    """Autograd function whose gradients are computed in the forward pass."""

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
        gradients, ctx.gradients = ctx.gradients, None
        return None, None, *(None if gradient is None else gradient.mul_(upstream) for gradient in gradients)


class _AddedGradients(torch.autograd.Function):
    """Autograd function that adds the gradient of the head to `.grad` and returns that of the hidden states."""

    @staticmethod
    def forward(ctx, loss: Tensor, backpropagate: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        ctx.backpropagate = backpropagate
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, ctx.backpropagate(upstream)


def with_gradients(loss: Tensor, gradients: HeadGradients, inputs: tuple[Tensor | None, ...]) -> Tensor:
    """Connect the loss to its inputs. The gradient of the head is stored once, in the parameter's dtype."""
    buffers = [gradients.hidden, gradients.weight, gradients.bias]
    del gradients
    for i, tensor in enumerate(inputs):
        # Gradients of fp16 inputs stay in fp32 until the loss scale is applied.
        if buffers[i] is not None and tensor.dtype != torch.float16:
            buffers[i] = buffers[i].to(tensor.dtype)
    with torch.enable_grad():
        return _FormedGradients.apply(loss, buffers, *inputs)


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
    config.support.check(head.vocabulary_size)
    head = head.gathered()
    inputs = (student_hidden, head.weight, head.bias)
    wanted = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    dtype = accumulation_dtype(student_hidden)
    chunkable = StepTokens(
        student_hidden.detach(),
        tokens.ids.unsqueeze(-1),
        tokens.weights.to(dtype),
        teacher,
        tokens.contrastive_coef.to(dtype),
        None if tokens.old_logps is None else tokens.old_logps.to(dtype),
        tokens.engine,
    )
    size = _chunk_size(chunkable, head, config)
    form = partial(_in_chunks, head=head.detached().for_products(student_hidden), config=config, size=size)
    if wanted and config.adds_to_grad and _has_grad(head, student_hidden):
        return _loss_adding_to_grad(form, chunkable, student_hidden, head)
    gradients = HeadGradients.of(student_hidden, head, len(student_hidden) <= size) if wanted else None
    with torch.no_grad():
        terms = form(chunkable, gradients=gradients)
        if wanted:
            terms.loss = with_gradients(terms.loss, gradients, inputs)
    return terms


def _loss_adding_to_grad(
    form: Callable[..., CreditLoss], tokens: StepTokens, hidden: Float[Tensor, "N H"], head: LMHead
) -> CreditLoss:
    """The loss whose backward pass forms it again, with gradients. It is linear in the weights, and so in `upstream`.

    Args:
        form: `_in_chunks` with all arguments but tokens and gradients.
    """

    def backpropagate(upstream: Float[Tensor, ""]) -> Float[Tensor, "N H"]:
        gradients = HeadGradients.adding(tokens.hidden, head)
        form(replace(tokens, weights=tokens.weights * upstream), gradients=gradients)
        return gradients.hidden.to(tokens.hidden.dtype)

    with torch.no_grad():
        terms = form(tokens, gradients=None)
    terms.loss = _AddedGradients.apply(terms.loss, backpropagate, hidden)
    return terms


def _has_grad(head: LMHead, hidden: Tensor) -> bool:
    """Whether the gradient of the head can be added to its `.grad`, and the hidden states require one too."""
    dtype, tensors = accumulation_dtype(hidden), [x for x in (head.weight, head.bias) if x is not None]
    return hidden.requires_grad and all(x.is_leaf and x.grad is not None and x.grad.dtype == dtype for x in tensors)


def _chunk_size(tokens: StepTokens, head: LMHead, config: LossConfig) -> int:
    n, (vocabulary, width) = len(tokens.hidden), head.weight.shape
    where = accumulation_dtype(tokens.hidden), tokens.hidden.device
    if config.chunk_size:
        return config.chunk_size
    if config.support.renormalizes:
        gathers = head.fused(tokens.hidden) is None
        return columns_chunk(n, config.support.topk + 1, width, *where) if gathers else max(n, 1)
    return logits_chunk(n, vocabulary, *where, 1, MAX_LOSS_CHUNK)


def _in_chunks(
    tokens: StepTokens, head: LMHead, config: LossConfig, gradients: HeadGradients | None, size: int
) -> CreditLoss:
    """Form the loss in chunks of `size` tokens, with buffers that all chunks share."""
    hidden, n = tokens.hidden, len(tokens.hidden)
    tokens = project_student(tokens, head, config)
    within = config.support.renormalizes
    step = step_within_support if within else step_over_vocabulary
    workspace = hidden.new_empty(
        (0 if within else min(size, n), head.vocabulary_size), dtype=accumulation_dtype(hidden)
    )
    parts = []
    for rows in chunks(n, size):
        part = None if gradients is None else gradients.rows(rows)
        parts.append(step(tokens[rows], head, config, part, workspace[: rows.stop - rows.start]))
    return CreditLoss.joined(parts)
