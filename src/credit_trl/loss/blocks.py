"""Chunks of tokens, blocks of the vocabulary, and the top K of a row without sorting it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor

# Columns of one group in `top_columns`.
_TOPK_GROUP = 32


def chunks(n: int, size: int) -> Iterator[slice]:
    """Slices of at most `size` rows; one empty slice for n = 0, so that results keep their shapes."""
    for start in range(0, max(n, 1), size):
        yield slice(start, min(start + size, n))


def accumulation_dtype(hidden: torch.dtype) -> torch.dtype:
    """fp64 for fp64 hidden states, else fp32."""
    return torch.promote_types(hidden, torch.float32)


class Statistics:
    """Streaming `log Σ exp z`, and optionally `Σ p z`, of rows whose logits arrive in blocks."""

    def __init__(self, wants_entropy: bool) -> None:
        self.wants_entropy = wants_entropy
        self.maxima: list[Tensor] = []
        self.sums: list[Tensor] = []
        self.weighted: list[Tensor] = []

    def fold(self, logits: Float[Tensor, "n w"], scratch: Float[Tensor, "n s"]) -> None:
        """Add a block of logits, in pieces as wide as `scratch`, which is overwritten."""
        for piece in logits.split(max(scratch.shape[1], 1), dim=1):
            self.maxima.append(piece.amax(dim=-1))
            mass = torch.sub(piece, self.maxima[-1].unsqueeze(-1), out=scratch[:, : piece.shape[1]]).exp_()
            self.sums.append(mass.sum(dim=-1))
            if self.wants_entropy:
                self.weighted.append(mass.mul_(piece).sum(dim=-1))

    def result(self) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"] | None]:
        """Log-normaliser, and entropy `log Σ exp z − Σ p z` or None."""
        maxima = torch.stack(self.maxima)
        top = maxima.amax(dim=0)
        scale = torch.exp(maxima - top)
        total = (torch.stack(self.sums) * scale).sum(dim=0)
        log_normalizer = top + total.log()
        if not self.wants_entropy:
            return log_normalizer, None
        return log_normalizer, log_normalizer - (torch.stack(self.weighted) * scale).sum(dim=0) / total


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
