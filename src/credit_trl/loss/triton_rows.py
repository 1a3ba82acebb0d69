"""A chunk's rows of logits in one pass each, in Triton: where torch reads and writes them a dozen times.

Between the head's matrix products, elementwise work over (tokens × vocabulary) waits for a GPU's memory alone. Two
kernels do it:

- one reads a row of raw logits, finishes them (bias, scale, soft-cap, temperature; written back only where they are
  needed again) and sums `Σ exp z` and, for the entropy, `Σ exp(z) z` on the way, rescaled whenever the maximum grows;
- one writes the gradient of the raw logits from the finished ones, in the dtype that the product after it takes.

What concerns the K tokens of a support is O(n K) and stays in torch, so their order does not matter: they are taken
out before the first kernel, which leaves blanks alone, and their gradients are put in after the second.

The kernels agree with the torch path in Triton's interpreter, on a CPU (`TRITON_INTERPRET=1`). What they save is a
count of bytes (docs/performance.md), not a time: nothing has been measured on a GPU, so torch is the default. Imported
only where `LMHead.kernels` is `"triton"`; needs the package triton, which torch's CUDA builds bring along.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from credit_trl.loss.blocks import ByBlock, Statistics, top_columns
from credit_trl.loss.head import BLANK, HeadGradients, LMHead, Projection, matmul_dtype

# Read when the kernels are defined, below, as Triton does.
INTERPRETED = bool(triton.knobs.runtime.interpret)
# Columns that a program takes at once, and its warps: 16 elements a thread.
BLOCK = 4096
_WARPS = 8


def runs_on(device: torch.device) -> bool:
    """Whether the kernels run there: on a GPU, or anywhere in Triton's interpreter."""
    return device.type == "cuda" or INTERPRETED


@triton.jit
def _tanh(x):
    """From one exp of a number that is never positive, so it cannot overflow; to 1e-7, absolute."""
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
    """One row a program."""
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
            # What was taken out stays out: a soft-cap would bring it back.
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
    """One block of a row a program; `grads` may be `logits`."""
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
    """Running `log Σ exp z` and, if wanted, `Σ p z`, of blocks that are read once each."""

    def fold(self, logits: Float[Tensor, "n w"], scratch: Tensor | None = None) -> None:
        """Take logits that are finished."""
        self._launch(logits)

    def fold_raw(
        self, logits: Float[Tensor, "n w"], bias: Float[Tensor, " w"] | None, head: LMHead, keeps: bool
    ) -> None:
        """Take the head's raw logits, blanks among them; with `keeps` they are finished in place."""
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
        with _launching_on(logits):
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
                num_warps=_WARPS,
            )


def project(
    head: LMHead,
    hidden: Float[Tensor, "n H"],
    out: Float[Tensor, "n V"] | None,
    tokens: Int[Tensor, "n 1"] | None,
    ids: Int[Tensor, "n K"] | None,
    topk: int | None,
    wants_entropy: bool,
) -> Projection:
    """`LMHead.project` in fp32. Without `out` no logits are written but the products'."""
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
            statistics.fold_raw(logits, None if head.bias is None else head.bias[block], head, keeps=out is not None)
    token_logits, columns = (
        None if which is None else head.finish(which[1], None if head.bias is None else head.bias[x])
        for which, x in zip(taken, (tokens, ids), strict=True)
    )
    if topk is not None:
        ids = top_columns(out, topk)
        columns = out.gather(-1, ids)
        out.scatter_(-1, ids, BLANK)
        # The sums so far are of all tokens: those outside the support are summed, not subtracted.
        statistics = RowStatistics(wants_entropy)
        statistics.fold(out)
    if ids is None:
        return Projection(out, *statistics.result(), token_logits=token_logits)
    outside, _ = statistics.result()
    statistics.fold(columns)
    log_normalizer, entropy = statistics.result()
    return Projection(out, log_normalizer, entropy, ids, columns, outside - log_normalizer, token_logits)


def backward_logps(
    head: LMHead,
    projection: Projection,
    column_grads: Float[Tensor, "n K"],
    factor: Float[Tensor, " n"],
    hidden: Float[Tensor, "n H"],
    gradients: HeadGradients,
) -> None:
    """The rest of `LMHead.backward_logps`, where the gradients of the support's raw logits are known.

    Args:
        column_grads: dℓ/d raw logits on the support.
        factor: `f` in `dℓ/d raw logit = f · p_v · slope` outside.
    """
    blocks, dtype = head.blocks(hidden), matmul_dtype(hidden)
    support, column_grads = ByBlock(projection.ids, blocks), column_grads.to(dtype)
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
    with _launching_on(logits):
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
            num_warps=_WARPS,
        )
    return grads


def _softcaps(head: LMHead) -> bool:
    return head.softcap is not None


def _finishes(head: LMHead) -> bool:
    """Whether raw logits are not the finished ones already."""
    return _softcaps(head) or head.bias is not None or head.scale != head.temperature


def _factors(head: LMHead) -> tuple[float, float]:
    """What logits are multiplied with before the soft-cap, and after it or where there is none."""
    if head.softcap is None:
        return 1.0, head.scale / head.temperature
    return head.scale / head.softcap, head.softcap / head.temperature


def _launching_on(tensor: Tensor) -> AbstractContextManager:
    """Triton launches on the current device, which need not be the tensor's."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
