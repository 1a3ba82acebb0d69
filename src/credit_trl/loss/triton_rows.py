"""Triton kernels for the elementwise passes over rows of logits, one pass each.

Between the matrix products of the head, the work over (tokens × vocabulary) is limited by memory bandwidth:

- one kernel reads a row of raw logits, applies bias, scale, soft-cap and temperature (writing back only where needed)
  and sums `Σ exp z` and, for the entropy, `Σ exp(z) z`, rescaled when the maximum grows;
- one kernel writes the gradient of the raw logits from the finished ones, in the dtype of the following product.

Work on the K tokens of a support is O(n K) and stays in torch: their logits are replaced by `BLANK` before the first
kernel, which skips blanks, and their gradients are written after the second.

The kernels agree with the torch path in Triton's interpreter on a CPU (`TRITON_INTERPRET=1`). docs/performance.md
counts the bytes that they save; nothing has been timed on a GPU. Imported only where
`LMHead.kernels` is `"triton"`; needs the package triton, which torch's CUDA builds include.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from credit_trl.loss.blocks import ByBlock, Statistics, top_columns
from credit_trl.loss.head import BLANK, HeadGradients, LMHead, Projection, matmul_dtype
from credit_trl.loss.triton_columns import BLOCK, WARPS, launching_on


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

    def fold(self, logits: Float[Tensor, "n w"], scratch: Tensor | None = None) -> None:
        """Add a block of finished logits."""
        self._launch(logits)

    def fold_raw(
        self, logits: Float[Tensor, "n w"], bias: Float[Tensor, " w"] | None, head: LMHead, keeps: bool
    ) -> None:
        """Add a block of raw logits, with blanks; `keeps` writes the finished logits back."""
        self._launch(logits, bias, *_factors(head), finishes=_finishes(head), softcaps=_softcaps(head), keeps=keeps)

    def _launch(
        self,
        logits: Tensor,
        bias: Tensor | None = None,
        inner: float = 1.0,
        outer: float = 1.0,
        finishes: bool = False,
        softcaps: bool = False,
        keeps: bool = False,
    ) -> None:
        n, width = logits.shape
        kept = [self.maxima, self.sums, self.weighted][: 2 + self.wants_entropy]
        for of_block in kept:
            of_block.append(logits.new_empty(n))
        with launching_on(logits):
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
                finishes=finishes,
                has_bias=bias is not None,
                softcaps=softcaps,
                keeps=keeps,
                wants_entropy=self.wants_entropy,
                block=BLOCK,
                num_warps=WARPS,
            )


def project_rows(
    head: LMHead,
    hidden: Float[Tensor, "n H"],
    out: Float[Tensor, "n V"] | None,
    tokens: Int[Tensor, "n 1"] | None,
    ids: Int[Tensor, "n K"] | None,
    topk: int | None,
    wants_entropy: bool,
    keeps_logits: bool,
) -> Projection:
    """`projection.project` in fp32."""
    blocks = head.blocks(hidden)
    scratch = hidden.new_empty((len(hidden), blocks[0].stop), dtype=torch.float32) if out is None else None
    hidden = hidden.to(matmul_dtype(hidden))
    statistics = RowStatistics(wants_entropy)
    taken = [
        None if x is None else (ByBlock(x, blocks), torch.empty_like(x, dtype=torch.float32)) for x in (tokens, ids)
    ]
    for i, block in enumerate(blocks):
        logits = scratch[:, : block.stop - block.start] if out is None else out[:, block]
        head.multiply_block(hidden, block, logits)
        for which in taken:
            if which is not None:
                which[0].take(i, logits, which[1])
        if ids is not None:
            taken[1][0].put(i, logits, BLANK)
        if topk is None or _finishes(head):
            statistics.fold_raw(
                logits, None if head.bias is None else head.bias[block], head, keeps=keeps_logits and out is not None
            )
    token_logits, columns = (
        None if which is None else head.finish(which[1], None if head.bias is None else head.bias[x])
        for which, x in zip(taken, (tokens, ids), strict=True)
    )
    if topk is not None:
        ids = top_columns(out, topk)
        columns = out.gather(-1, ids)
        out.scatter_(-1, ids, BLANK)
        # Sum the tokens outside the support again, instead of subtracting those inside.
        statistics = RowStatistics(wants_entropy)
        statistics.fold(out)
    if ids is None:
        return Projection(out, *statistics.result(), token_logits=token_logits)
    outside, _ = statistics.result()
    statistics.fold(columns)
    log_normalizer, entropy = statistics.result()
    return Projection(out, log_normalizer, entropy, ids, columns, outside - log_normalizer, token_logits)


def backward_rows(
    head: LMHead,
    projection: Projection,
    column_grads: Float[Tensor, "n K"],
    factor: Float[Tensor, " n"],
    hidden: Float[Tensor, "n H"],
    gradients: HeadGradients,
) -> None:
    """Second half of `projection.backward_logps`, given the gradients of the support's raw logits.

    Args:
        column_grads: dℓ/d raw logits on the support.
        factor: `f` in `dℓ/d raw logit = f · p_v · slope` outside.
    """
    blocks = head.blocks(hidden)
    dtype = matmul_dtype(hidden)
    support = ByBlock(projection.ids, blocks)
    column_grads = column_grads.to(dtype)
    for i, block in enumerate(blocks):
        grads = logit_gradients(head, projection.logits[:, block], projection.log_normalizer, factor, dtype)
        support.put(i, grads, column_grads)
        head.backward_block(grads, block, hidden, gradients)


def logit_gradients(
    head: LMHead,
    logits: Float[Tensor, "n w"],
    log_normalizer: Float[Tensor, " n"],
    factor: Float[Tensor, " n"],
    dtype: torch.dtype,
) -> Float[Tensor, "n w"]:
    """`factor · exp(z − log_normalizer)`, times the soft-cap's slope; in place where the dtype is the logits'."""
    grads = logits if logits.dtype == dtype else torch.empty_like(logits, dtype=dtype)
    with launching_on(logits):
        _write_gradients[len(logits), triton.cdiv(logits.shape[1], BLOCK)](
            logits,
            grads,
            log_normalizer,
            factor,
            logits.stride(0),
            grads.stride(0),
            logits.shape[1],
            1.0 if head.softcap is None else head.temperature / head.softcap,
            softcaps=_softcaps(head),
            block=BLOCK,
            num_warps=WARPS,
        )
    return grads


def _softcaps(head: LMHead) -> bool:
    return head.softcap is not None


def _finishes(head: LMHead) -> bool:
    """Whether finishing changes raw logits."""
    return _softcaps(head) or head.bias is not None or head.scale != head.temperature


def _factors(head: LMHead) -> tuple[float, float]:
    """Factors of the logits before and after the soft-cap."""
    if head.softcap is None:
        return 1.0, head.scale / head.temperature
    return head.scale / head.softcap, head.softcap / head.temperature
