"""A loss whose gradients were formed with it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from credit_trl.kernels.head import HeadGradients


class _FormedGradients(torch.autograd.Function):
    """A value whose gradients are already known; the backward pass scales them and gives them away."""

    @staticmethod
    def forward(ctx, loss: Tensor, gradients: list[Tensor | None], *inputs: Tensor | None) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError(
                "The gradient of this `credit_loss` was given away by an earlier backward pass. Call `credit_loss` "
                "again, or add the losses that share it and go backward once."
            )
        gradients, ctx.gradients = ctx.gradients, None
        return None, None, *(None if gradient is None else gradient.mul_(upstream) for gradient in gradients)


def with_gradients(loss: Tensor, gradients: HeadGradients, inputs: tuple[Tensor | None, ...]) -> Tensor:
    """Connect the loss to its inputs. The head's gradient is held once: in the parameter's own precision."""
    buffers = [gradients.hidden, gradients.weight, gradients.bias]
    del gradients
    for i, tensor in enumerate(inputs):
        # fp16 waits in fp32 for the loss scale that lifts it into range.
        if buffers[i] is not None and tensor.dtype != torch.float16:
            buffers[i] = buffers[i].to(tensor.dtype)
    with torch.enable_grad():
        return _FormedGradients.apply(loss, buffers, *inputs)
