"""Log-probabilities and entropies with gradients, without stored logits: the backward pass computes these again."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from credit_trl.loss.head import HeadGradients, LMHead, chunks
from credit_trl.loss.projection import Projection, backward_logps, project


class TokenPolicy(NamedTuple):
    """The policy at N sampled tokens."""

    logps: Float[Tensor, " N"]
    entropies: Float[Tensor, " N"]  # nats


class DeferredChunk(NamedTuple):
    """A chunk of n tokens whose gradients are formed in the backward pass.

    Gradients of a loss that is known before, of the support and outside of it, are scaled there; None without any.
    """

    head: LMHead
    projection: Projection
    hidden: Float[Tensor, "n H"]
    gradients: HeadGradients
    value_grads: Float[Tensor, "n K"] | None = None
    outside_grads: Float[Tensor, " n"] | None = None

    def backward(
        self,
        loss_grad: Tensor | None,
        logp_grads: Float[Tensor, " n"] | None,
        entropy_grads: Float[Tensor, " n"] | None,
    ) -> None:
        """Add the gradients of the chunk to those of the head."""
        value_grads, outside_grads = (
            None if grads is None or loss_grad is None else grads.mul_(loss_grad)
            for grads in (self.value_grads, self.outside_grads)
        )
        backward_logps(
            self.head,
            self.projection,
            self.hidden,
            self.gradients,
            value_grads,
            outside_grads,
            token_grads=logp_grads,
            entropy_grads=entropy_grads,
        )


class DeferredGradients(torch.autograd.Function):
    """A loss, log-probabilities and entropies of deferred chunks; torch refuses a second backward pass."""

    @staticmethod
    def forward(
        ctx: Any, gradients: HeadGradients, loss: Tensor, policy: TokenPolicy, *inputs: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(gradients.hidden, gradients.weight, gradients.bias)
        ctx.chunks = gradients.deferred
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in inputs]
        ctx.set_materialize_grads(False)
        return loss.clone(), policy.logps.clone(), policy.entropies.clone()

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, loss_grad: Tensor | None, logp_grads: Tensor | None, entropy_grads: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        buffers = ctx.saved_tensors
        sizes = [len(chunk.hidden) for chunk in ctx.chunks]
        missing = [None] * len(sizes)
        of_logps = missing if logp_grads is None else logp_grads.split(sizes)
        of_entropies = missing if entropy_grads is None else entropy_grads.split(sizes)
        for chunk, chunk_logps, chunk_entropies in zip(ctx.chunks, of_logps, of_entropies, strict=True):
            chunk.backward(loss_grad, chunk_logps, chunk_entropies)
        del ctx.chunks
        cast = [
            None if buffer is None else buffer.to(dtype) for buffer, dtype in zip(buffers, ctx.dtypes, strict=True)
        ]
        return None, None, None, *cast


def token_policy(student_hidden: Float[Tensor, "N H"], head: LMHead, token_ids: Int[Tensor, " N"]) -> TokenPolicy:
    """Log-probabilities of N sampled tokens and entropies, over the whole vocabulary, differentiable once.

    Args:
        student_hidden: (N, H), hidden states at the positions that predict the tokens; receives a gradient.
        head: its weight and bias receive gradients. A sharded head is gathered once.
    """
    head = head.gathered()
    hidden = student_hidden.detach()
    size = head.chunk_size(hidden)
    gradients = HeadGradients.of(student_hidden, head, in_one_chunk=len(hidden) <= size)
    gradients.deferred = []
    product_head = head.detached().for_products(hidden)
    logps = []
    entropies = []
    for rows in chunks(len(hidden), size):
        with torch.no_grad():
            projection = project(product_head, hidden[rows], tokens=token_ids[rows].unsqueeze(-1))
        logps.append(projection.token_logps)
        entropies.append(projection.entropy)
        gradients.deferred.append(DeferredChunk(product_head, projection, hidden[rows], gradients.rows(rows)))
    policy = TokenPolicy(torch.cat(logps), torch.cat(entropies))
    inputs = (student_hidden, head.weight, head.bias)
    _, *differentiable = DeferredGradients.apply(gradients, policy.logps.new_zeros(()), policy, *inputs)
    return TokenPolicy(*differentiable)
