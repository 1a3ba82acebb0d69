"""Triton kernels for products with K rows of the head per position, without a copy of the rows.

Also what they share with `triton_rows`: the size of a program, and where it runs.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

# Read when the kernels are defined, below, as Triton does.
INTERPRETED = bool(triton.knobs.runtime.interpret)
# Columns of one program, and its warps: 8 elements per thread, so that no kernel needs more than 40 registers.
BLOCK = 2048
WARPS = 8


def runs_on(device: torch.device) -> bool:
    """Whether the kernels run on a device: a GPU, or any device in Triton's interpreter."""
    return device.type == "cuda" or INTERPRETED


def launching_on(tensor: Tensor) -> AbstractContextManager:
    """Make the tensor's device current, on which Triton launches."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


@triton.jit
def _dot_columns(weight, ids, hidden, logits, weight_stride, hidden_stride, count, width, block: tl.constexpr):
    """Product of one position's hidden state with one row of the weight per program."""
    row = tl.program_id(0).to(tl.int64)
    entry = row * count + tl.program_id(1)
    cells = weight + tl.load(ids + entry) * weight_stride
    total = tl.zeros([block], tl.float32)
    for start in range(0, width, block):
        column = start + tl.arange(0, block)
        inside = column < width
        w = tl.load(cells + column, mask=inside, other=0.0).to(tl.float32)
        total += w * tl.load(hidden + row * hidden_stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(logits + entry, tl.sum(total, axis=0))


@triton.jit
def _sum_columns(weight, ids, factors, sums, weight_stride, sums_stride, count, width, block: tl.constexpr):
    """Weighted sum of K rows of the weight, for one block of one position per program."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    total = tl.zeros([block], tl.float32)
    for k in range(0, count):
        entry = row * count + k
        w = tl.load(weight + tl.load(ids + entry) * weight_stride + column, mask=inside, other=0.0)
        total += tl.load(factors + entry) * w.to(tl.float32)
    tl.store(sums + row * sums_stride + column, total, mask=inside)


def dot_columns(
    weight: Float[Tensor, "V H"], ids: Int[Tensor, "n K"], hidden: Float[Tensor, "n H"]
) -> Float[Tensor, "n K"]:
    """`hidden[i] · weight[ids[i, k]]` in fp32, without a copy of the rows."""
    ids, (n, count), width = ids.contiguous(), ids.shape, weight.shape[1]
    logits = hidden.new_empty((n, count), dtype=torch.float32)
    with launching_on(hidden):
        _dot_columns[n, count](
            weight, ids, hidden, logits, weight.stride(0), hidden.stride(0), count, width, BLOCK, num_warps=WARPS
        )
    return logits


def sum_columns(
    weight: Float[Tensor, "V H"], ids: Int[Tensor, "n K"], factors: Float[Tensor, "n K"], out: Float[Tensor, "n H"]
) -> None:
    """Write `Σ_k factors[i, k] · weight[ids[i, k]]` to `out`, in fp32, without a copy of the rows."""
    ids, factors, (n, count), width = ids.contiguous(), factors.contiguous(), ids.shape, weight.shape[1]
    grid = (n, triton.cdiv(width, BLOCK))
    with launching_on(out):
        _sum_columns[grid](
            weight, ids, factors, out, weight.stride(0), out.stride(0), count, width, BLOCK, num_warps=WARPS
        )
