"""Projection of hidden states on the vocabulary and its backward pass, one chunk of tokens at a time."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from credit_trl.loss.head import HeadGradients, LMHead, Statistics, accumulation_dtype, chunks, matmul_dtype
from credit_trl.objective import IMPOSSIBLE

# Columns whose exponentials exist at once on an accelerator; blocks on a CPU are narrower.
_FOLDED_COLUMNS = 2**15
# Columns of one group in `top_columns`.
_TOPK_GROUP = 32


@dataclass
class Projection:
    """Distribution of one chunk over the vocabulary. Fields that were not requested are None."""

    logits: Float[Tensor, "n V"] | None  # those of the support are replaced by `IMPOSSIBLE`
    log_normalizer: Float[Tensor, " n"]  # log Σ_v exp z_v
    entropy: Float[Tensor, " n"] | None  # nats
    ids: Int[Tensor, "n K"] | None = None  # the support
    columns: Float[Tensor, "n K"] | None = None  # logits of the support
    log_outside: Float[Tensor, " n"] | None = None  # log-probability outside, summed over the tokens outside
    outside_normalizer: Float[Tensor, " n"] | None = None  # log Σ exp z over the tokens outside
    tokens: Int[Tensor, "n 1"] | None = None  # the sampled tokens
    token_logits: Float[Tensor, "n 1"] | None = None  # of the sampled tokens

    @property
    def logps(self) -> Float[Tensor, "n K"]:
        """Log-probabilities of the support."""
        return self.columns - self.log_normalizer.unsqueeze(-1)

    @property
    def token_logps(self) -> Float[Tensor, " n"]:
        """Log-probabilities of the sampled tokens."""
        return self.token_logits.squeeze(-1) - self.log_normalizer


class ByBlock:
    """Entries of (n, K) token ids, grouped by the vocabulary block of the id."""

    def __init__(self, ids: Int[Tensor, "n K"], blocks: list[slice]) -> None:
        flat = ids.flatten()
        self.entries = [torch.arange(len(flat), device=ids.device)]
        if len(blocks) > 1:
            order = flat.argsort()
            starts = torch.tensor([block.start for block in blocks[1:]], device=ids.device)
            bounds = torch.searchsorted(flat[order], starts)
            self.entries = order.tensor_split(bounds.tolist())
        self.cells = []
        for entries, block in zip(self.entries, blocks, strict=True):
            cell = (entries // ids.shape[-1], flat[entries] - block.start)
            self.cells.append(cell)

    def take(self, block: int, tile: Float[Tensor, "n w"], out: Float[Tensor, "n K"]) -> None:
        """Copy the tile's values at the ids in this block to their places in `out`."""
        out.view(-1)[self.entries[block]] = tile[self.cells[block]]

    def blank(self, block: int, tile: Float[Tensor, "n w"]) -> None:
        """Set the tile's values at the ids in this block to `IMPOSSIBLE`."""
        # A number would be copied to a GPU, which waits.
        tile.index_put_(self.cells[block], tile.new_full((), IMPOSSIBLE))

    def add(self, block: int, tile: Float[Tensor, "n w"], values: Float[Tensor, "n K"]) -> None:
        """Add to the tile's values at the ids in this block, which differ within a row."""
        tile[self.cells[block]] += values.view(-1)[self.entries[block]].to(tile.dtype)


def top_columns(logits: Float[Tensor, "n V"], k: int) -> Int[Tensor, "n K"]:
    """Ids of the k largest logits of each row, the largest first; all ids in their order for k = V.

    The k largest lie in the k groups of columns with the largest maxima, so that only the maxima and the columns of
    these groups are searched.
    """
    size = logits.shape[-1]
    if k == size:
        return torch.arange(size, device=logits.device).repeat(len(logits), 1)
    if 8 * _TOPK_GROUP * k > size:  # the groups are too large a part of the row to save time
        return logits.topk(k, dim=-1).indices
    grouped = size - size % _TOPK_GROUP
    maxima = logits[:, :grouped].unflatten(-1, (-1, _TOPK_GROUP)).amax(dim=-1)
    groups = maxima.topk(k, dim=-1, sorted=False).indices
    places = torch.arange(_TOPK_GROUP, device=logits.device)
    candidates = (groups.unsqueeze(-1) * _TOPK_GROUP + places).flatten(1)
    ungrouped = torch.arange(grouped, size, device=logits.device).expand(len(logits), -1)
    candidates = torch.cat([candidates, ungrouped], dim=-1)
    best = logits.gather(-1, candidates).topk(k, dim=-1).indices
    return candidates.gather(-1, best)


def project(
    head: LMHead,
    hidden: Float[Tensor, "n H"],
    *,
    out: Float[Tensor, "n V"] | None = None,
    tokens: Int[Tensor, "n 1"] | None = None,
    ids: Int[Tensor, "n K"] | None = None,
    topk: int | None = None,
    wants_entropy: bool = True,
) -> Projection:
    """Project one chunk of tokens on the vocabulary.

    Args:
        out: (n, V) in the accumulation dtype, for the logits; None allocates a block of them.
        tokens: (n, 1), the sampled tokens, if their logits are needed.
        ids: (n, K), a support, whose logits are taken out of the vocabulary.
        topk: size of a support of the most likely tokens, instead of `ids`; needs `out`.
    """
    dtype = accumulation_dtype(hidden.dtype)
    blocks = head.blocks(hidden)
    width = blocks[0].stop
    buffer = hidden.new_empty((len(hidden), width), dtype=dtype) if out is None else out
    statistics = Statistics(wants_entropy)
    scratch = hidden.new_empty((len(hidden), min(width, _FOLDED_COLUMNS)), dtype=dtype)
    hidden = hidden.to(matmul_dtype(hidden))
    token_logits = columns = None
    if tokens is not None:
        tokens_by_block = ByBlock(tokens, blocks)
        token_logits = torch.empty_like(tokens, dtype=dtype)
    if ids is not None:
        support_by_block = ByBlock(ids, blocks)
        columns = torch.empty_like(ids, dtype=dtype)
    for i, block in enumerate(blocks):
        start = 0 if out is None else block.start
        logits = buffer[:, start : start + block.stop - block.start]
        head.block_logits(hidden, block, logits)
        if tokens is not None:
            tokens_by_block.take(i, logits, token_logits)
        if ids is not None:
            support_by_block.take(i, logits, columns)
            support_by_block.blank(i, logits)
        if topk is None:
            statistics.fold(logits, scratch)
    if topk is not None:
        ids = top_columns(out, topk)
        columns = out.gather(-1, ids)
        out.scatter_(-1, ids, IMPOSSIBLE)
        statistics = Statistics(wants_entropy)  # of the tokens outside, which lose no digits by a difference
        for block in blocks:
            statistics.fold(out[:, block], scratch)
    outside, entropy = statistics.result()
    if ids is None:
        return Projection(out, outside, entropy, tokens=tokens, token_logits=token_logits)
    statistics.fold(columns, torch.empty_like(columns))
    log_normalizer, entropy = statistics.result()
    log_outside = outside - log_normalizer
    return Projection(out, log_normalizer, entropy, ids, columns, log_outside, outside, tokens, token_logits)


def token_logps(head: LMHead, hidden: Float[Tensor, "N H"], tokens: Int[Tensor, "N 1"]) -> Float[Tensor, " N"]:
    """Log-probabilities of N sampled tokens under a head that is not sharded, without gradient; no logits are kept."""
    logps = []
    for rows in chunks(len(hidden), head.chunk_size(hidden)):
        projection = project(head, hidden[rows], tokens=tokens[rows], wants_entropy=False)
        logps.append(projection.token_logps)
    return torch.cat(logps)


def backward_logps(
    head: LMHead,
    projection: Projection,
    hidden: Float[Tensor, "n H"],
    gradients: HeadGradients,
    column_grads: Float[Tensor, "n K"] | None = None,
    outside_grads: Float[Tensor, " n"] | None = None,
    token_grads: Float[Tensor, " n"] | None = None,
    entropy_grads: Float[Tensor, " n"] | None = None,
) -> None:
    """Backpropagate gradients of log-probabilities; overwrites the logits, or computes them again where none exist.

    They are G of the support, τ of `log_outside`, g of the sampled token, and η of the entropy H. As
    `log p_k = z_k − log Σ_v exp z_v`, with `c = Σ_k G_k + τ + g` those of the logits are `G_k − c p_k` on the support
    and `(τ − c p_outside) p_v / p_outside` outside. The sampled token has g more, every token `−η p_v (log p_v + H)`.
    """
    total = torch.zeros_like(projection.log_normalizer)  # c + η H
    if column_grads is not None:
        total = column_grads.sum(dim=-1)
    for grads in (token_grads, outside_grads):
        if grads is not None:
            total = total + grads
    if entropy_grads is not None:
        total = total + entropy_grads * projection.entropy
    blocks = head.blocks(hidden)
    additions = []
    if column_grads is not None:
        weights = total.unsqueeze(-1)
        if entropy_grads is not None:
            weights = weights + entropy_grads.unsqueeze(-1) * projection.logps
        grads = head.raw_gradients(column_grads - weights * projection.logps.exp(), projection.columns)
        additions.append((ByBlock(projection.ids, blocks), grads))
    if token_grads is not None:
        grads = head.raw_gradients(token_grads.unsqueeze(-1), projection.token_logits)
        additions.append((ByBlock(projection.tokens, blocks), grads))
    rate = head.scale / head.temperature
    factor = -total * rate
    if entropy_grads is not None:
        entropy_grads = entropy_grads * rate
    if outside_grads is not None:  # p_v / p_outside has no overflow, however small both are
        mass = projection.log_outside.exp()
        factor = outside_grads * rate + factor * mass
        if entropy_grads is not None:
            entropy_grads = entropy_grads * mass
            factor = factor - entropy_grads * projection.log_outside
        projection = replace(projection, log_normalizer=projection.outside_normalizer)
    for i, block in enumerate(blocks):
        logits = _block_logits(head, projection, hidden, block)
        if projection.logits is None and column_grads is not None:
            additions[0][0].blank(i, logits)
        slope = head.softcap_slope(logits)
        logps = logits.sub_(projection.log_normalizer.unsqueeze(-1))
        factors = factor.unsqueeze(-1)
        if entropy_grads is not None:
            factors = factors - entropy_grads.unsqueeze(-1) * logps
        grads = logps.exp_().mul_(factors)
        grads = grads if slope is None else grads.mul_(slope)
        for entries, values in additions:
            entries.add(i, grads, values)
        head.backward_block(grads, block, hidden, gradients)


def _block_logits(
    head: LMHead, projection: Projection, hidden: Float[Tensor, "n H"], block: slice
) -> Float[Tensor, "n w"]:
    """Logits of one block: those that are stored, or computed again."""
    if projection.logits is not None:
        return projection.logits[:, block]
    shape = (len(hidden), block.stop - block.start)
    logits = hidden.new_empty(shape, dtype=accumulation_dtype(hidden.dtype))
    head.block_logits(hidden.to(matmul_dtype(hidden)), block, logits)
    return logits


class TokenPolicy(NamedTuple):
    """The policy at sampled tokens, differentiable once: (N,), or (B, T) with 0 on padding."""

    logps: Tensor  # over the whole vocabulary
    entropies: Tensor  # nats
    aux_loss: Float[Tensor, ""] | None = None  # load-balancing loss of a mixture of experts


class DeferredChunk(NamedTuple):
    """A chunk of n tokens whose gradients are formed in the backward pass."""

    head: LMHead
    projection: Projection
    hidden: Float[Tensor, "n H"]
    gradients: HeadGradients
    value_grads: Float[Tensor, "n K"] | None = None  # of another loss, whose scale is known then
    outside_grads: Float[Tensor, " n"] | None = None


class LossGradients(torch.autograd.Function):
    """A loss whose gradients are known, or formed from deferred chunks with those of their tokens' log-probabilities
    and entropies, which else are None; changed in place, so that torch refuses a second backward pass.
    """

    @staticmethod
    def forward(ctx: Any, gradients: HeadGradients, *values: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.save_for_backward(gradients.hidden, gradients.weight, gradients.bias)
        ctx.chunks = gradients.deferred
        ctx.set_materialize_grads(False)
        # The values after the third are hidden states, weight and bias.
        return tuple(None if value is None else value.clone() for value in values[:3])

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, loss_grad: Tensor | None, logp_grads: Tensor | None, entropy_grads: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        buffers = ctx.saved_tensors
        if ctx.chunks is None:
            _scale(buffers, loss_grad)
            return (None,) * 4 + buffers
        end = 0
        for chunk in ctx.chunks:
            rows = slice(end, end + len(chunk.hidden))
            end = rows.stop
            _scale((chunk.value_grads, chunk.outside_grads), loss_grad)
            chunk_logp_grads = None if logp_grads is None else logp_grads[rows]
            chunk_entropy_grads = None if entropy_grads is None else entropy_grads[rows]
            backward_logps(*chunk, chunk_logp_grads, chunk_entropy_grads)
        del ctx.chunks
        return (None,) * 4 + buffers


def _scale(gradients: Sequence[Tensor | None], loss_grad: Tensor | None) -> None:
    """Multiply gradients of a loss in place by that of the loss, which is None where nothing reads it."""
    for gradient in gradients:
        if gradient is not None:
            gradient.mul_(0.0 if loss_grad is None else loss_grad)


def token_policy(student_hidden: Float[Tensor, "N H"], head: LMHead, token_ids: Int[Tensor, " N"]) -> TokenPolicy:
    """The policy at N sampled tokens.

    Args:
        student_hidden: (N, H), hidden states at the positions that predict the tokens; receives a gradient.
        head: not sharded; its weight and bias receive gradients.
    """
    hidden = student_hidden.detach()
    size = head.chunk_size(hidden)
    gradients = HeadGradients.of(student_hidden, head, in_one_chunk=len(hidden) <= size)
    gradients.deferred = []
    product_head = head.detached().for_products(hidden)
    for rows in chunks(len(hidden), size):
        projection = project(product_head, hidden[rows], tokens=token_ids[rows].unsqueeze(-1))
        chunk = DeferredChunk(product_head, projection, hidden[rows], gradients.rows(rows))
        gradients.deferred.append(chunk)
    logps = torch.cat([chunk.projection.token_logps for chunk in gradients.deferred])
    entropies = torch.cat([chunk.projection.entropy for chunk in gradients.deferred])
    loss = logps.new_zeros(())
    _, logps, entropies = LossGradients.apply(
        gradients, loss, logps, entropies, student_hidden, head.weight, head.bias
    )
    return TokenPolicy(logps, entropies)
