"""The language-model head, applied to blocks of the vocabulary, with sums over them, or to K columns of a support.

`projection.py` projects chunks of tokens with it, so that no (tokens × vocabulary) tensor exists.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial

from credit_trl.objective import IMPOSSIBLE
from credit_trl.teacher.causal_lm import unwrap_adapters
from credit_trl.teacher.sharding import full_tensor

# Bytes of one chunk on the CPU: of logits, and of gathered head rows, which should stay in cache.
_CPU_LOGITS = 160 * 2**20
_CPU_HEAD_ROWS = 16 * 2**20
# Bytes of one chunk on an accelerator: fp32 logits of 4096 tokens for a vocabulary of 152,000. They are fixed, so that
# the order of summation does not depend on the free memory.
_ACCELERATOR_BYTES = 5 * 2**29
# Most tokens of a chunk. A chunk of the loss reads the head twice and its gradient once.
_MOST_TOKENS = 8192
# Elements of one block of logits on the CPU: 8 MB in fp32, so that exp and sums read it from cache.
_CPU_BLOCK = 2**21


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
        weighted = (torch.stack(self.weighted) * scale).sum(dim=0)
        return log_normalizer, log_normalizer - weighted / total


@dataclass
class HeadGradients:
    """Gradients of one loss, to which chunks add in fp32 (fp64 for fp64 inputs); None where not required."""

    hidden: Float[Tensor, "N H"] | None
    weight: Float[Tensor, "V H"] | None  # fp32; the parameter's dtype if products use it and there is one chunk
    bias: Float[Tensor, " V"] | None
    # Chunks whose gradients the backward pass adds; None where the forward pass adds them.
    deferred: list[Any] | None = None

    @classmethod
    def of(cls, hidden: Tensor, head: "LMHead", in_one_chunk: bool) -> Self:
        """Buffers for the tensors that require a gradient."""
        dtype = accumulation_dtype(hidden.dtype)
        weight_dtype = dtype
        if in_one_chunk and head.weight.dtype == matmul_dtype(hidden):
            weight_dtype = head.weight.dtype
        return cls(
            hidden=_gradient_buffer(hidden, dtype),
            weight=_gradient_buffer(head.weight, weight_dtype),
            bias=_gradient_buffer(head.bias, dtype),
        )

    def rows(self, rows: slice) -> Self:
        """The same buffers for one chunk of tokens."""
        if self.hidden is None:
            return self
        return replace(self, hidden=self.hidden[rows])


def _gradient_buffer(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if tensor is None or not tensor.requires_grad:
        return None
    return torch.zeros_like(tensor, dtype=dtype)


@dataclass(frozen=True)
class LMHead:
    """Map from hidden states to the logits that are sampled from: `softcap(scale · (h Wᵀ + b)) / temperature`."""

    weight: Float[Tensor, "V H"]  # tied or not; a sharded `DTensor` is gathered once by each entry point
    bias: Float[Tensor, " V"] | None = None
    scale: float = 1.0  # `logit_scale`, or `1 / logits_scaling`
    softcap: float | None = None  # `final_logit_softcapping` of Gemma, under the name of the model family, or None
    temperature: float = 1.0

    @property
    def vocabulary_size(self) -> int:
        return self.weight.shape[0]

    def gathered(self, dtype: torch.dtype | None = None) -> Self:
        """The head with sharded tensors gathered; gradients are averaged over the mesh.

        A shard of the weight is converted to `dtype`, if that is not None, before it is gathered.
        """
        return replace(self, weight=_gather(self.weight, dtype)).map(_gather)

    def for_products(self, hidden: Tensor) -> Self:
        """The head in the dtype of its products with `hidden`; a CPU converts the block that it uses."""
        if hidden.device.type == "cpu":
            return self
        return replace(self, weight=self.weight.to(matmul_dtype(hidden)))

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """The head with a function of tensors applied to weight and bias."""
        bias = None if self.bias is None else change(self.bias)
        return replace(self, weight=change(self.weight), bias=bias)

    def detached(self) -> Self:
        """The head without gradients."""
        return self.map(Tensor.detach)

    def column_logits(
        self, hidden: Float[Tensor, "n H"], rows: Float[Tensor, "n K H"], ids: Int[Tensor, "n K"]
    ) -> Float[Tensor, "n K"]:
        """Logits of K tokens per position, from their rows of the weight."""
        logits = _batched(rows, hidden.unsqueeze(-1), matmul_dtype(hidden)).squeeze(-1)
        bias = None if self.bias is None else self.bias[ids]
        return self.finish(logits, bias)

    def backward_columns(
        self,
        rows: Float[Tensor, "n K H"],
        ids: Int[Tensor, "n K"],
        logits: Float[Tensor, "n K"],
        hidden: Float[Tensor, "n H"],
        gradients: HeadGradients,
        logit_grads: Float[Tensor, "n K"],
    ) -> None:
        """Backpropagate a gradient of K logits per position; other rows of the head get none."""
        grads = self.raw_gradients(logit_grads, logits)
        if gradients.hidden is not None:
            hidden_grads = _batched(grads.unsqueeze(1), rows, matmul_dtype(hidden))
            gradients.hidden.copy_(hidden_grads.squeeze(1))
        if gradients.weight is not None:
            scatter_columns(ids, grads, hidden.to(grads.dtype), gradients.weight)
        if gradients.bias is not None:
            scatter_columns(ids, grads, None, gradients.bias)

    def chunk_size(self, hidden: Float[Tensor, "N H"], columns: int | None = None) -> int:
        """Tokens per chunk: the largest power of two whose logits fit into a fixed number of bytes.

        With a number of `columns`, so do the rows of the weight for these columns of each token.
        """
        row = self.vocabulary_size
        budget = _CPU_LOGITS
        if columns is not None:
            row = columns * hidden.shape[-1]
            budget = _CPU_HEAD_ROWS
        if hidden.device.type != "cpu":
            budget = _ACCELERATOR_BYTES
        rows = budget // (row * accumulation_dtype(hidden.dtype).itemsize)
        rows = min(max(rows, 1), _MOST_TOKENS, max(len(hidden), 1))
        return 1 << (rows.bit_length() - 1)

    def blocks(self, hidden: Tensor) -> list[slice]:
        """Blocks of the vocabulary; on a CPU the logits of one block fit into the cache."""
        width = self.vocabulary_size
        if hidden.device.type == "cpu":
            width = min(width, max(1024, _CPU_BLOCK // max(len(hidden), 1)))
        return list(chunks(self.vocabulary_size, width))

    def block_logits(self, hidden: Tensor, block: slice, out: Tensor) -> None:
        """Write the logits of one block to `out`; `hidden` has the dtype of the product."""
        weight = self.weight[block].to(hidden.dtype)
        bias = None if self.bias is None else self.bias[block]
        _multiply(hidden, weight.T, out, adds=False)
        self.finish(out, bias)

    def finish(self, logits: Tensor, bias: Tensor | None) -> Tensor:
        """Apply bias, scale, soft-cap and temperature, in place."""
        if bias is not None:
            logits += bias.to(logits.dtype).clamp(min=IMPOSSIBLE)  # −∞ forbids a token
        if self.softcap is not None:
            logits.mul_(self.scale / self.softcap).tanh_()
            logits.mul_(self.softcap / self.temperature)
        elif self.scale != self.temperature:
            logits.mul_(self.scale / self.temperature)
        return logits

    def softcap_slope(self, logits: Tensor) -> Tensor | None:
        """d softcap(u) / du = 1 − tanh²(u / softcap), from the finished logits; None without soft-cap."""
        if self.softcap is None:
            return None
        tanh = logits * (self.temperature / self.softcap)
        return torch.square(tanh).neg_().add_(1.0)

    def raw_gradients(self, grads: Tensor, logits: Tensor) -> Tensor:
        """Gradients of raw logits, from those of the finished logits."""
        grads = grads * (self.scale / self.temperature)
        slope = self.softcap_slope(logits)
        if slope is not None:
            grads = grads * slope
        return grads

    def backward_block(self, grads: Tensor, block: slice, hidden: Tensor, gradients: HeadGradients) -> None:
        """Backpropagate a gradient of one block of raw logits, before scale, soft-cap and temperature."""
        dtype = matmul_dtype(hidden)
        if gradients.bias is not None:
            gradients.bias[block] += grads.sum(dim=0, dtype=gradients.bias.dtype)
        grads = grads.to(dtype)
        if gradients.hidden is not None:
            _multiply(grads, self.weight[block].to(dtype), gradients.hidden, adds=True)
        if gradients.weight is not None:
            _multiply(grads.T, hidden.to(dtype), gradients.weight[block], adds=True)


def matmul_dtype(hidden: Tensor) -> torch.dtype:
    """See `product_dtype`."""
    return product_dtype(hidden.dtype, hidden.device)


def product_dtype(hidden: torch.dtype, device: torch.device) -> torch.dtype:
    """dtype of matrix products: bf16 on CUDA, whose products accumulate in fp32; otherwise the accumulation dtype.

    fp16 underflows in the gradients of single tokens, and a CPU's bf16 product would round the logits.
    """
    if hidden == torch.bfloat16 and device.type == "cuda":
        return hidden
    return accumulation_dtype(hidden)


def scatter_columns(
    ids: Int[Tensor, "n K"],
    grads: Float[Tensor, "n K"],
    hidden: Float[Tensor, "n H"] | None,
    total: Float[Tensor, "V H"] | Float[Tensor, " V"],
) -> None:
    """`total[v] += Σ grads[i, k] · hidden[i]` over the entries of `ids` that are v, always in the same order.

    `hidden` is None for ones, where `total` is (V,).
    """
    n, k = ids.shape
    if _adds_in_order(ids.device):
        products = grads
        if hidden is not None:
            products = grads.unsqueeze(-1) * hidden.unsqueeze(1)
        total.index_add_(0, ids.flatten(), products.flatten(0, 1))
        return
    # The gradient of an embedding's sum, which sorts the entries by their id; `index_add_` adds in any order.
    if hidden is None:
        hidden = grads.new_ones(n, 1)
        total = total.unsqueeze(-1)
    bags = torch.arange(n, device=ids.device).repeat_interleave(k, output_size=n * k)
    sizes = bags.new_full((n,), k)
    none = bags.new_empty(0)
    total += torch.ops.aten._embedding_bag_dense_backward(
        hidden, ids.flatten(), bags, sizes, none, len(total), False, 0, grads.flatten()
    )


def _adds_in_order(device: torch.device) -> bool:
    """Whether `index_add_` adds entries of one row in their order."""
    return device.type == "cpu"


def _batched(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """`a @ b` of batches, with factors in `dtype` and sums in fp32 (fp64 for fp64)."""
    wide = torch.promote_types(dtype, torch.float32)
    options = {} if wide == dtype else {"out_dtype": wide}
    return torch.bmm(a.to(dtype), b.to(dtype), **options)


def _multiply(a: Tensor, b: Tensor, out: Tensor, adds: bool) -> None:
    """`out = a @ b`, or `out += a @ b`, accumulated in the dtype of `out`."""
    options = {} if a.dtype == out.dtype else {"out_dtype": out.dtype}
    if adds:
        torch.addmm(out, a, b, **options, out=out)
    else:
        torch.mm(a, b, **options, out=out)


def _gather(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A sharded tensor, gathered, in a given dtype. FSDP averages its gradient over processes.

    Under ZeRO-3 the weight is already gathered inside a forward pass; elsewhere a copy without gradient is returned.
    """
    dtype = dtype or tensor.dtype
    status = getattr(tensor, "ds_status", None)
    if status is not None and status.name != "AVAILABLE":
        return full_tensor(tensor).to(dtype)
    tensor = tensor.to(dtype)
    if not isinstance(tensor, DTensor):
        return tensor
    placements = [Partial("avg")] * tensor.device_mesh.ndim
    return tensor.full_tensor(grad_placements=placements)


def lm_head(model: nn.Module, temperature: float) -> LMHead:
    """The head of a causal LM, with the logit scale and soft-cap of its family; sharded until `gathered()`."""
    causal_lm = unwrap_adapters(model)
    config = causal_lm.config.get_text_config()
    head = causal_lm.get_output_embeddings()
    # Names of Gemma, RecurrentGemma and xLSTM.
    softcap = _first_set(config, "final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
    bias = getattr(head, "bias", None)
    return LMHead(head.weight, bias, _logit_scale(config), softcap, temperature)


def _logit_scale(config: object) -> float:
    """Factor of the logits, by the names of the model families; some divide by theirs."""
    scale = _first_set(config, "logit_scale", "output_multiplier", "lm_head_multiplier")
    if scale is not None:
        return scale
    scaling = _first_set(config, "logits_scaling")
    if scaling is None:
        return 1.0
    is_factor = getattr(config, "model_type", "") == "hyperclovax"
    return scaling if is_factor else 1.0 / scaling


def _first_set(config: object, *names: str) -> float | None:
    """The first of these options that a configuration has."""
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    return None
