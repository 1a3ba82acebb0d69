"""Triton kernels for the elementwise passes over rows of logits, one pass each.

Between the matrix products of the head, the work over (tokens × vocabulary) is limited by memory bandwidth:

- one kernel reads a row of raw logits, applies bias, scale, soft-cap and temperature (writing back only where needed)
  and sums `Σ exp z` and, for the entropy, `Σ exp(z) z`, rescaled when the maximum grows;
- one kernel writes the gradient of the raw logits from the finished ones, in the dtype of the following product.

Work on the K tokens of a support is O(n K) and stays in torch: their logits are replaced by `BLANK` before the first
kernel, which skips blanks, and their gradients are written after the second.

The kernels agree with the torch path on a GPU, and in Triton's interpreter on a CPU (`TRITON_INTERPRET=1`).
docs/performance.md counts the bytes that they save, and has the time. Needs the package triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from credit_trl.loss.head import BLANK, LMHead, Statistics

# Read when the kernels are defined, below, as Triton does.
INTERPRETED = bool(triton.knobs.runtime.interpret)
# Columns of one program, and its warps: 8 elements per thread, so that no kernel needs more than 40 registers.
BLOCK = 2048
WARPS = 8


def runs_on(device: torch.device) -> bool:
    """Whether the kernels run on a device: a GPU, or any device in Triton's interpreter."""
    return device.type == "cuda" or INTERPRETED


@triton.jit
def _tanh(x):
    """tanh from one exp of a number ≤ 0, so that it cannot overflow; absolute error 1e-7."""
    t = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - t) / (1.0 + t)
    return tl.where(x < 0.0, -size, size)


@triton.jit
def _finish_and_fold(
    logits,
    bias,
    maxima,
    sums,
    weighted,
    row_stride,
    width,
    inner,
    outer,
    blank: tl.constexpr,
    finishes: tl.constexpr,
    has_bias: tl.constexpr,
    softcaps: tl.constexpr,
    keeps: tl.constexpr,
    wants_entropy: tl.constexpr,
    block: tl.constexpr,
):
    """Finish one row of logits per program and fold its sums."""
    row = tl.program_id(0)
    cells = logits + row.to(tl.int64) * row_stride
    top = float("-inf")
    total = 0.0
    moment = 0.0
    for start in range(0, width, block):
        column = start + tl.arange(0, block)
        inside = column < width
        raw = tl.load(cells + column, mask=inside, other=float("-inf"))
        z = raw
        if finishes:
            if has_bias:
                z += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
            z = _tanh(z * inner) * outer if softcaps else z * outer
            # Keep blanks: a soft-cap would bound them.
            z = tl.where(raw <= 0.5 * blank, raw, z)
            if keeps:
                tl.store(cells + column, z, mask=inside)
        higher = tl.maximum(top, tl.max(z, axis=0))
        mass = tl.exp(z - higher)
        shrink = tl.exp(top - higher)
        total = total * shrink + tl.sum(mass, axis=0)
        if wants_entropy:
            moment = moment * shrink + tl.sum(mass * tl.where(inside, z, 0.0), axis=0)
        top = higher
    tl.store(maxima + row, top)
    tl.store(sums + row, total)
    if wants_entropy:
        tl.store(weighted + row, moment)


@triton.jit
def _write_gradients(
    logits,
    grads,
    log_normalizers,
    factors,
    logits_stride,
    grads_stride,
    width,
    inner,
    softcaps: tl.constexpr,
    block: tl.constexpr,
):
    """Write the gradient of one block of a row per program; `grads` may be `logits`."""
    row = tl.program_id(0)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    z = tl.load(logits + row.to(tl.int64) * logits_stride + column, mask=inside, other=0.0)
    grad = tl.exp(z - tl.load(log_normalizers + row)) * tl.load(factors + row)
    if softcaps:
        grad *= 1.0 - (z * inner) * (z * inner)
    cells = grads + row.to(tl.int64) * grads_stride + column
    tl.store(cells, grad.to(grads.dtype.element_ty), mask=inside)


class RowStatistics(Statistics):
    """Streaming `log Σ exp z`, and optionally `Σ p z`; each block is read once."""

    def fold(
        self,
        logits: Float[Tensor, "n w"],
        scratch: Tensor | None = None,
        raw: LMHead | None = None,
        bias: Float[Tensor, " w"] | None = None,
        keeps: bool = False,
    ) -> None:
        """Add a block of logits, with blanks.

        Args:
            raw: the head whose raw logits these are, with the block's `bias`; None for finished logits.
            keeps: write the finished logits back.
        """
        softcap = None if raw is None else raw.softcap
        inner = 1.0 if softcap is None else raw.scale / softcap  # the factor before the soft-cap
        outer = 1.0 if raw is None else (softcap or raw.scale) / raw.temperature
        n, width = logits.shape
        kept = [self.maxima, self.sums, self.weighted][: 2 + self.wants_entropy]
        for of_block in kept:
            of_block.append(logits.new_empty(n))
        with torch.cuda.device_of(logits):  # on which Triton launches
            _finish_and_fold[(n,)](
                logits,
                bias,
                self.maxima[-1],
                self.sums[-1],
                self.weighted[-1] if self.wants_entropy else None,
                logits.stride(0),
                width,
                inner,
                outer,
                blank=BLANK,
                finishes=raw is not None and raw.finishes,
                has_bias=bias is not None,
                softcaps=softcap is not None,
                keeps=keeps,
                wants_entropy=self.wants_entropy,
                block=BLOCK,
                num_warps=WARPS,
            )


def logit_gradients(
    head: LMHead,
    logits: Float[Tensor, "n w"],
    log_normalizer: Float[Tensor, " n"],
    factor: Float[Tensor, " n"],
    dtype: torch.dtype,
) -> Float[Tensor, "n w"]:
    """`factor · exp(z − log_normalizer)`, times the soft-cap's slope; in place where the dtype is the logits'."""
    grads = logits if logits.dtype == dtype else torch.empty_like(logits, dtype=dtype)
    with torch.cuda.device_of(logits):
        _write_gradients[len(logits), triton.cdiv(logits.shape[1], BLOCK)](
            logits,
            grads,
            log_normalizer,
            factor,
            logits.stride(0),
            grads.stride(0),
            logits.shape[1],
            1.0 if head.softcap is None else head.temperature / head.softcap,
            softcaps=head.softcap is not None,
            block=BLOCK,
            num_warps=WARPS,
        )
    return grads
