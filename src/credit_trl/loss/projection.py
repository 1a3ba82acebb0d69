"""Projection of hidden states on the vocabulary and its backward pass, one chunk of tokens at a time."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from credit_trl.loss.head import BLANK, HeadGradients, LMHead, Statistics, accumulation_dtype, chunks, matmul_dtype

# Columns whose exponentials exist at once on an accelerator; blocks on a CPU are narrower.
_FOLDED_COLUMNS = 2**15
# Columns of one group in `top_columns`.
_TOPK_GROUP = 32


@dataclass
class Projection:
    """Distribution of one chunk over the vocabulary. Fields that were not requested are None."""

    logits: Float[Tensor, "n V"] | None  # those of the support are replaced by `BLANK`
    log_normalizer: Float[Tensor, " n"]  # log Σ_v exp z_v
    entropy: Float[Tensor, " n"] | None  # nats
    ids: Int[Tensor, "n K"] | None = None  # the support
    columns: Float[Tensor, "n K"] | None = None  # logits of the support
    log_outside: Float[Tensor, " n"] | None = None  # log-probability outside, summed over the tokens outside
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
            self.entries = order.tensor_split(torch.searchsorted(flat[order], starts).tolist())
        self.cells = [
            (entries // ids.shape[-1], flat[entries] - block.start)
            for entries, block in zip(self.entries, blocks, strict=True)
        ]

    def take(self, block: int, tile: Float[Tensor, "n w"], out: Float[Tensor, "n K"]) -> None:
        """Copy the tile's values at the ids in this block to their places in `out`."""
        out.view(-1)[self.entries[block]] = tile[self.cells[block]]

    def put(self, block: int, tile: Float[Tensor, "n w"], values: Float[Tensor, "n K"] | float) -> None:
        """Set the tile's values at the ids in this block."""
        if isinstance(values, Tensor):
            tile[self.cells[block]] = values.view(-1)[self.entries[block]]
        else:
            # A number would be copied to a GPU, which waits.
            tile.index_put_(self.cells[block], tile.new_full((), values))


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
    candidates = (groups.unsqueeze(-1) * _TOPK_GROUP + torch.arange(_TOPK_GROUP, device=logits.device)).flatten(1)
    rest = torch.arange(grouped, size, device=logits.device).expand(len(logits), -1)
    candidates = torch.cat([candidates, rest], dim=-1)
    return candidates.gather(-1, logits.gather(-1, candidates).topk(k, dim=-1).indices)


def project(
    head: LMHead,
    hidden: Float[Tensor, "n H"],
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
    block_logits = hidden.new_empty((len(hidden), blocks[0].stop), dtype=dtype) if out is None else None
    statistics = Statistics(wants_entropy)
    scratch = hidden.new_empty((len(hidden), min(blocks[0].stop, _FOLDED_COLUMNS)), dtype=dtype)
    hidden = hidden.to(matmul_dtype(hidden))
    taken = [None if x is None else (ByBlock(x, blocks), torch.empty_like(x, dtype=dtype)) for x in (tokens, ids)]
    for i, block in enumerate(blocks):
        logits = block_logits[:, : block.stop - block.start] if out is None else out[:, block]
        head.multiply_block(hidden, block, logits)
        head.finish(logits, None if head.bias is None else head.bias[block])
        for entries, values in filter(None, taken):
            entries.take(i, logits, values)
        if ids is not None:
            taken[1][0].put(i, logits, BLANK)
        if topk is None:
            statistics.fold(logits, scratch)
    token_logits, columns = (None if which is None else which[1] for which in taken)
    if topk is not None:
        ids = top_columns(out, topk)
        columns = out.gather(-1, ids)
        out.scatter_(-1, ids, BLANK)
        statistics = Statistics(wants_entropy)  # of the tokens outside, which lose no digits by a difference
        for block in blocks:
            statistics.fold(out[:, block], scratch)
    outside, entropy = statistics.result()
    if ids is None:
        return Projection(out, outside, entropy, token_logits=token_logits)
    statistics.fold(columns, torch.empty_like(columns))
    log_normalizer, entropy = statistics.result()
    return Projection(out, log_normalizer, entropy, ids, columns, outside - log_normalizer, token_logits)


def token_logps(head: LMHead, hidden: Float[Tensor, "N H"], tokens: Int[Tensor, "N 1"]) -> Float[Tensor, " N"]:
    """Log-probabilities of N sampled tokens under a head that is not sharded, without gradient; no logits are kept."""
    slices = chunks(len(hidden), head.chunk_size(hidden))
    parts = [project(head, hidden[rows], None, tokens[rows], wants_entropy=False) for rows in slices]
    return torch.cat([part.token_logps for part in parts])


def backward_logps(
    head: LMHead,
    projection: Projection,
    hidden: Float[Tensor, "n H"],
    gradients: HeadGradients,
    column_grads: Float[Tensor, "n K"],
    outside_grads: Float[Tensor, " n"] | None = None,
) -> None:
    """Backpropagate gradients G of the support's log-probabilities and τ of `log_outside`; overwrites the logits.

    As `log p_k = z_k − log Σ_v exp z_v`, those of the logits are `G_k − c p_k` on the support, with
    `c = Σ_k G_k + τ`, and `(τ / p_outside − c) p_v` outside.
    """
    total = column_grads.sum(dim=-1)
    factor = -total
    if outside_grads is not None:
        total = total + outside_grads
        share = outside_grads * (-projection.log_outside).exp().nan_to_num(posinf=0.0)
        factor = share - total
    rate = head.scale / head.temperature
    column_grads = (column_grads - total.unsqueeze(-1) * projection.logps.exp()) * rate
    slope = head.softcap_slope(projection.columns)
    column_grads = column_grads if slope is None else column_grads * slope
    factor = factor * rate
    blocks = head.blocks(hidden)
    support = ByBlock(projection.ids, blocks)
    for i, block in enumerate(blocks):
        grads = projection.logits[:, block]
        slope = head.softcap_slope(grads)
        grads.sub_(projection.log_normalizer.unsqueeze(-1)).exp_().mul_(factor.unsqueeze(-1))
        grads = grads if slope is None else grads.mul_(slope)
        support.put(i, grads, column_grads.to(grads.dtype))
        head.backward_block(grads, block, hidden, gradients)
