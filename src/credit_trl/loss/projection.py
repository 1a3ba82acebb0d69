"""Projection of hidden states on the vocabulary and its backward pass, one chunk of tokens at a time."""

from __future__ import annotations

from types import ModuleType

import torch
from jaxtyping import Float, Int
from torch import Tensor

from credit_trl.loss.blocks import ByBlock, Statistics, accumulation_dtype, chunk_size, chunks, top_columns
from credit_trl.loss.head import BLANK, HeadGradients, LMHead, Projection, matmul_dtype

# Columns whose exponentials exist at once on an accelerator; blocks on a CPU are narrower.
_FOLDED_COLUMNS = 2**15


def project(
    head: LMHead,
    hidden: Float[Tensor, "n H"],
    out: Float[Tensor, "n V"] | None = None,
    tokens: Int[Tensor, "n 1"] | None = None,
    ids: Int[Tensor, "n K"] | None = None,
    topk: int | None = None,
    wants_entropy: bool = True,
    keeps_logits: bool = True,
) -> Projection:
    """Project one chunk of tokens on the vocabulary.

    Args:
        out: (n, V) in the accumulation dtype, for the logits; None allocates a block of them.
        tokens: (n, 1), the sampled tokens, if their logits are needed.
        ids: (n, K), a support, whose logits are taken out of the vocabulary.
        topk: size of a support of the most likely tokens, instead of `ids`; needs `out`.
        keeps_logits: whether the logits are used later; False leaves `out` undefined.
    """
    dtype = accumulation_dtype(hidden.dtype)
    blocks = head.blocks(hidden)
    block_logits = hidden.new_empty((len(hidden), blocks[0].stop), dtype=dtype) if out is None else None
    kernels = row_kernels(head, hidden)
    statistics = Statistics(wants_entropy) if kernels is None else kernels.RowStatistics(wants_entropy)
    width = 0 if kernels else min(blocks[0].stop, _FOLDED_COLUMNS)  # the kernels need no scratch memory
    scratch = hidden.new_empty((len(hidden), width), dtype=dtype)
    hidden = hidden.to(matmul_dtype(hidden))
    taken = [None if x is None else (ByBlock(x, blocks), torch.empty_like(x, dtype=dtype)) for x in (tokens, ids)]
    for i, block in enumerate(blocks):
        logits = block_logits[:, : block.stop - block.start] if out is None else out[:, block]
        head.multiply_block(hidden, block, logits)
        bias = None if head.bias is None else head.bias[block]
        if kernels is None:
            head.finish(logits, bias)
        for entries, values in filter(None, taken):
            entries.take(i, logits, values)
        if ids is not None:
            taken[1][0].put(i, logits, BLANK)
        if kernels is not None and (topk is None or head.finishes):
            statistics.fold(logits, raw=head, bias=bias, keeps=keeps_logits and out is not None)
        elif topk is None:
            statistics.fold(logits, scratch)
    token_logits, columns = (None if which is None else which[1] for which in taken)
    for logits, of in ((token_logits, tokens), (columns, ids)):
        if kernels is not None and logits is not None:  # taken before the kernel finished the others
            head.finish(logits, None if head.bias is None else head.bias[of])
    if topk is not None:
        ids = top_columns(out, topk)
        columns = out.gather(-1, ids)
        out.scatter_(-1, ids, BLANK)
        statistics = type(statistics)(wants_entropy)  # of the tokens outside, which lose no digits by a difference
        for block in blocks:
            statistics.fold(out[:, block], scratch)
    outside, entropy = statistics.result()
    if ids is None:
        return Projection(out, outside, entropy, token_logits=token_logits)
    statistics.fold(columns, torch.empty_like(columns))
    log_normalizer, entropy = statistics.result()
    return Projection(out, log_normalizer, entropy, ids, columns, outside - log_normalizer, token_logits)


def row_kernels(head: LMHead, hidden: Tensor) -> ModuleType | None:
    """The module of Triton kernels for the rows of logits of `hidden`, or None for torch."""
    if head.kernels != "triton" or accumulation_dtype(hidden.dtype) != torch.float32:
        return None
    from credit_trl.loss import triton_rows

    return triton_rows if triton_rows.runs_on(hidden.device) else None


def token_logps(head: LMHead, hidden: Float[Tensor, "N H"], tokens: Int[Tensor, "N 1"]) -> Float[Tensor, " N"]:
    """Log-probabilities of N sampled tokens under a head that is not sharded, without gradient; no logits are kept."""
    slices = chunks(len(hidden), chunk_size(hidden, head.vocabulary_size))
    parts = [project(head, hidden[rows], None, tokens[rows], wants_entropy=False) for rows in slices]
    return torch.cat([part.token_logps for part in parts])


def backward_logps(
    head: LMHead,
    projection: Projection,
    hidden: Float[Tensor, "n H"],
    column_grads: Float[Tensor, "n K"],
    outside_grads: Float[Tensor, " n"] | None,
    gradients: HeadGradients,
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
    kernels = row_kernels(head, hidden)
    blocks = head.blocks(hidden)
    support = ByBlock(projection.ids, blocks)
    for i, block in enumerate(blocks):
        grads = projection.logits[:, block]
        if kernels is None:
            slope = head.softcap_slope(grads)
            grads.sub_(projection.log_normalizer.unsqueeze(-1)).exp_().mul_(factor.unsqueeze(-1))
            grads = grads if slope is None else grads.mul_(slope)
        else:
            grads = kernels.logit_gradients(head, grads, projection.log_normalizer, factor, matmul_dtype(hidden))
        support.put(i, grads, column_grads.to(grads.dtype))
        head.backward_block(grads, block, hidden, gradients)
