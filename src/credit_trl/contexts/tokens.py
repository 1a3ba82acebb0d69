"""Teacher and contrast prompts as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from credit_trl.contexts.privileged import PrivilegedContext


@dataclass(frozen=True)
class TokenContexts:
    """One response's contexts.

    Args:
        ids: token ids of the teacher's prompt, then of C contrast prompts; None where there is no teacher.
        privileged: what of z is in them.
        cut: whether z was shortened to fit the budget.
        columns: for each token of each context, the column of the completion before which it stands; None where all
            stand before the first.
    """

    ids: list[list[int]] | None
    privileged: PrivilegedContext
    cut: bool = False
    columns: list[list[int]] | None = None


def context_masks(built: Sequence[TokenContexts], device: torch.device) -> dict[str, Bool[Tensor, " B"]]:
    """Which samples have a teacher, and which of them a contrast."""
    return {
        "teacher_mask": torch.tensor([c.ids is not None for c in built], device=device),
        "contrast_mask": torch.tensor([len(c.ids or ()) > 1 for c in built], device=device),
    }


def pack_contexts(built: Sequence[TokenContexts], device: torch.device) -> dict[str, Int[Tensor, "B ..."]]:
    """TokenContexts as tensors that TRL can shuffle and split: ids (B, 1+C, P), lengths (B, 1+C), 0 where there is none.

    Where a context has tokens inside the completion, `context_columns` (B, 1+C, P) are beside them.
    """
    ids = _packed([c.ids for c in built])
    lengths = torch.zeros(ids.shape[:2], dtype=torch.long)
    for i, sample in enumerate(built):
        for k, context in enumerate(sample.ids or []):
            lengths[i, k] = len(context)
    packed = {"context_ids": ids, "context_lengths": lengths}
    if any(c.columns is not None for c in built):
        packed["context_columns"] = _packed(
            [c.columns or (c.ids and [[0] * len(row) for row in c.ids]) for c in built]
        )
    return {name: tensor.to(device) for name, tensor in packed.items()}


def unpack_contexts(batch: dict[str, Any]) -> tuple[list[list[list[int]] | None], list[list[list[int]] | None] | None]:
    """The inverse of `pack_contexts`, for one micro-batch: ids, and columns where there are any."""
    lengths = batch["context_lengths"].tolist()

    def rows(tensor: Tensor) -> list[list[list[int]] | None]:
        return [
            [row[:n] for row, n in zip(r, ns, strict=True) if n] or None
            for r, ns in zip(tensor.tolist(), lengths, strict=True)
        ]

    return rows(batch["context_ids"]), rows(batch["context_columns"]) if "context_columns" in batch else None


def _packed(samples: Sequence[list[list[int]] | None]) -> Int[Tensor, "B C P"]:
    count = max((len(rows) for rows in samples if rows is not None), default=1)
    longest = max((len(row) for rows in samples if rows is not None for row in rows), default=1)
    packed = torch.zeros(len(samples), count, longest, dtype=torch.long)
    for i, rows in enumerate(samples):
        for k, row in enumerate(rows or []):
            packed[i, k, : len(row)] = torch.tensor(row)
    return packed
