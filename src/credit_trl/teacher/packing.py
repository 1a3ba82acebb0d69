"""Sequences without padding: one row that holds them one after the other, and the attention that keeps them apart.

Attention implementations with variable lengths (FlashAttention) read `cu_seq_lens`, FlexAttention reads the position
ids. With PyTorch's attention, `PACKED_SDPA` calls the variable-length kernel of torch 2.11 once a layer on a GPU, and
`scaled_dot_product_attention` once for every sequence elsewhere; neither forms a mask. It also reads a prefix that
several sequences share once (`packed_row`): the rollouts of a group have one prompt, which is also the contrast prompt
of others.
"""

import copy
import inspect
import itertools
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from credit_trl.trl_compat import common_prefix_length

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # torch before 2.10
    varlen_attn = None

from credit_trl.teacher.causal_lm import backbone, unwrap_adapters
from credit_trl.teacher.models import eval_mode
from credit_trl.teacher.sharding import is_whole

# Name of PyTorch's attention with support for packed rows, as an `attn_implementation` of transformers.
PACKED_SDPA = "packed_sdpa"
_PROBE = "packed_probe"
_VARLEN_OPTIONS = inspect.signature(varlen_attn).parameters if varlen_attn else {}
# What the kernel of variable lengths computes with.
VARLEN_DTYPES = (torch.bfloat16, torch.float16)
# Length from which a shared prefix is read once. Each piece of a row is another call of the attention.
SHORTEST_SHARED = 16
# Layer types that keep packed sequences apart; a recurrent layer would carry its state across them.
_PACKABLE_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}


class RowLayout:
    """Pieces of a packed row: tokens of each, and the piece that precedes it in its sequence, or None at a start.

    A plain class, since wrappers copy tuples and dataclasses for each layer.
    """

    def __init__(self, lengths: list[int], parents: list[int | None]) -> None:
        self.lengths = lengths
        self.parents = parents
        self._varlen: tuple[dict[str, Any], Int[Tensor, " S"] | None] | None = None

    def add(self, length: int, parent: int | None) -> int:
        """Append a piece; return its index."""
        self.lengths.append(length)
        self.parents.append(parent)
        return len(self.lengths) - 1

    def variable_lengths(self, device: torch.device) -> tuple[dict[str, Any], Int[Tensor, " S"] | None]:
        """The row as `varlen_attn` reads it, formed by the first layer and copied to the device without waiting.

        Returns:
            First query and first key of each piece, the ends, and the longest; index in the row of the keys of all
            pieces, or None if they are the row's.
        """
        if self._varlen is None:
            piece_columns = torch.arange(sum(self.lengths)).split(self.lengths)
            keys = []
            for piece, parent in zip(piece_columns, self.parents, strict=True):
                if parent is not None:
                    piece = torch.cat([piece_columns[parent], piece])
                keys.append(piece)
            key_lengths = list(map(len, keys))
            bounds = {
                "cu_seq_q": _bounds(self.lengths, device),
                "cu_seq_k": _bounds(key_lengths, device),
                "max_q": max(self.lengths),
                "max_k": max(key_lengths),
            }
            indices = None
            if key_lengths != self.lengths:
                indices = to_device(torch.cat(keys), device)
            self._varlen = bounds, indices
        return self._varlen


class PackedRow(NamedTuple):
    """A packed row, in main memory."""

    ids: Int[Tensor, " R"]  # tokens of its pieces, one piece after the other
    positions: Int[Tensor, " R"]  # of each token in its sequence
    layout: RowLayout
    indices: Int[Tensor, " S"]  # place in the row of each token of the sequences, one sequence after the other


def packed_row(sequences: Sequence[list[int]], shares: bool = True) -> PackedRow:
    """The row of some sequences, whose hidden states in a causal model are those of the sequences.

    With `shares` those with a common prefix of at least `SHORTEST_SHARED` tokens share it where this saves most; else
    the row is one sequence after the other.
    """
    order = list(range(len(sequences)))
    if shares:
        order.sort(key=sequences.__getitem__)
    sharing = PrefixSharing()
    for previous, following in itertools.pairwise(order):
        common = 0
        if shares:
            common = common_prefix_length(sequences[previous], sequences[following])
        sharing.add(common)
    layout = RowLayout([], [])
    pieces_of: list[list[int]] = [[] for _ in sequences]  # pieces of each sequence
    for group in sharing.groups():
        prefix = None
        if group.common:
            prefix = layout.add(group.common, None)
        for i in order[group.start : group.end]:
            if prefix is not None:
                pieces_of[i].append(prefix)
            if len(sequences[i]) > group.common:
                piece = layout.add(len(sequences[i]) - group.common, prefix)
                pieces_of[i].append(piece)
    columns = torch.arange(sum(layout.lengths)).split(layout.lengths)
    indices = torch.cat([columns[piece] for piece in itertools.chain.from_iterable(pieces_of)])
    ids = torch.empty(sum(layout.lengths), dtype=torch.long)
    ids[indices] = torch.tensor(list(itertools.chain.from_iterable(sequences)))
    positions = torch.empty_like(ids)
    positions[indices] = torch.cat([torch.arange(len(sequence)) for sequence in sequences])
    return PackedRow(ids, positions, layout, indices)


class PrefixGroup(NamedTuple):
    """Consecutive sequences that share a prefix."""

    start: int
    end: int
    common: int  # tokens of the prefix; 0 in a group of one


class _Sharing(NamedTuple):
    """The best way to share prefixes among some sequences; compared by the tokens that it saves."""

    saved: int
    start: int  # of the last group
    common: int  # tokens of the prefix of the last group


class PrefixSharing:
    """Shared prefixes of a first sequence and of those that are added after it, in the order of their tokens.

    Groups are consecutive, and chosen by dynamic programming to save the most tokens.
    """

    def __init__(self) -> None:
        self._lengths = [0]  # of the common prefix of each sequence and the one before
        self._best = [_Sharing(0, 0, 0), _Sharing(0, 0, 0)]  # of the first n sequences

    def add(self, common: int) -> int:
        """Add a sequence with so many tokens in common with the one before; return the tokens that all save."""
        self._lengths.append(common)
        end = len(self._lengths)
        best = _Sharing(self._best[-1].saved, end - 1, 0)
        for start in range(end - 2, -1, -1):
            common = min(common, self._lengths[start + 1])
            if common < SHORTEST_SHARED:
                break
            saved = self._best[start].saved + common * (end - start - 1)
            best = max(best, _Sharing(saved, start, common))
        self._best.append(best)
        return best.saved

    def groups(self) -> list[PrefixGroup]:
        """The groups, in the order of the sequences."""
        groups = []
        end = len(self._lengths)
        while end:
            best = self._best[end]
            groups.append(PrefixGroup(best.start, end, best.common))
            end = best.start
        return groups[::-1]


def packed_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    row_layout: RowLayout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """PyTorch's attention over a packed row: in one call in half precision on a GPU, else called once for each piece.

    A piece after a shared prefix has more keys than queries, where causal attention needs a mask. On a GPU that would
    prevent flash attention and repeat the keys and values of grouped heads, and where most tokens are the piece's own
    it costs more than it saves: such pieces compute the queries of the prefix again. A mask is used for short pieces
    on a CPU, and for a sliding window that is shorter than the sequence.

    Args:
        query, key, value: (B, heads, L, D); the output is (B, L, heads, D).
        attention_mask: ignored where the row is packed.
        row_layout: layout of the row (B is 1); None where the rows are not packed.
    """
    if row_layout is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    window = kwargs.get("sliding_window")
    if len(query) == 1 and reads_variable_lengths(query):
        output = _varlen_attention(query, key, value, row_layout, window, kwargs.get("scaling"))
        return output, None
    queries = query.split(row_layout.lengths, dim=2)
    keys = key.split(row_layout.lengths, dim=2)
    values = value.split(row_layout.lengths, dim=2)
    outputs = []
    for piece, parent in enumerate(row_layout.parents):
        q, k, v = queries[piece], keys[piece], values[piece]
        if parent is not None:
            k = torch.cat([keys[parent], k], dim=2)
            v = torch.cat([values[parent], v], dim=2)
        mask = None
        is_cut = window is not None and k.shape[2] > window
        is_short = k.device.type == "cpu" and 2 * q.shape[2] < k.shape[2]
        if is_cut or is_short:
            mask = _causal_mask(q.shape[2], k.shape[2], window, k.device)
        elif parent is not None:
            q = torch.cat([queries[parent], q], dim=2)
        attended = sdpa_attention_forward(module, q, k, v, mask, **kwargs)[0]
        outputs.append(attended[:, -row_layout.lengths[piece] :])
    return torch.cat(outputs, dim=1), None


def _varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: RowLayout, window: int | None, scale: float | None
) -> Tensor:
    """Attention of a row, (1, L, heads, D).

    The last query of a piece sees its last key, so the own tokens of a piece see the whole prefix before them.
    """
    dtype = computing_dtype(query)
    bounds, keys = layout.variable_lengths(query.device)
    query, key, value = (x[0].transpose(0, 1).to(dtype) for x in (query, key, value))
    if keys is not None:
        key = key.index_select(0, keys)
        value = value.index_select(0, keys)
    options: dict[str, Any] = {"scale": scale, "window_size": (-1, 0)}
    if window is not None:
        options["window_size"] = (window - 1, 0)
    if "enable_gqa" in _VARLEN_OPTIONS:  # grouped heads, from torch 2.12
        options["enable_gqa"] = True
    return varlen_attn(query, key, value, **bounds, **options)[None]


def reads_variable_lengths(query: Tensor) -> bool:
    """Whether torch's kernel of variable lengths takes the states of a layer."""
    has_width = query.shape[-1] <= 256 and query.shape[-1] % 8 == 0
    return has_width and computing_dtype(query) in VARLEN_DTYPES and has_varlen_kernel(query.device)


def computing_dtype(states: Tensor) -> torch.dtype:
    """Return the dtype in which attention computes, under autocast too."""
    device = states.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states.dtype


@cache
def has_varlen_kernel(device: torch.device) -> bool:
    """Whether `varlen_attn` with windows runs on a device: on a GPU from Ampere on."""
    has_windows = "window_size" in _VARLEN_OPTIONS
    if not has_windows or device.type != "cuda" or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _bounds(lengths: list[int], device: torch.device) -> Int[Tensor, " n+1"]:
    """Start of each sequence in a row, and the end of the row."""
    bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    return to_device(bounds, device)


def _causal_mask(queries: int, keys: int, window: int | None, device: torch.device) -> Bool[Tensor, "1 1 Q S"]:
    """True where one of the last tokens of a sequence sees a key: itself and, of a window, `window - 1` before it."""
    prefix = keys - queries
    mask = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=device).tril_(prefix)
    if window is not None:
        mask.triu_(prefix + 1 - window)
    return mask


AttentionInterface.register(PACKED_SDPA, packed_sdpa)
AttentionMaskInterface.register(PACKED_SDPA, sdpa_mask)


def attention_of(model: nn.Module) -> str:
    """Name of a model's attention implementation."""
    config = unwrap_adapters(model).config.get_text_config()
    return getattr(config, "_attn_implementation", None) or ""


def cannot_pack(model: nn.Module) -> str | None:
    """Why sequences of a model cannot be packed, or None."""
    adapter = getattr(model, "active_peft_config", None)
    if adapter is not None and adapter.is_prompt_learning:
        return "its adapter adds tokens to each row"
    implementation = attention_of(model)
    if "flash" not in implementation and implementation not in ("flex_attention", "sdpa", PACKED_SDPA):
        return (
            f"the attention implementation {implementation!r} has no variable lengths; load the model with "
            "`attn_implementation` 'sdpa', 'flex_attention' or 'flash_attention_2'"
        )
    config = unwrap_adapters(model).config.get_text_config()
    layer_types = list(getattr(config, "layer_types", None) or ())
    allowed = set(_PACKABLE_LAYERS)
    if "sdpa" in implementation:
        allowed.remove("chunked_attention")
    unsupported = sorted(set(layer_types) - allowed)
    if unsupported:
        return f"its {', '.join(unsupported)} layers do not keep packed sequences apart"
    if implementation == "flex_attention":
        return None
    layers = _layer_options(model)
    if not layers or any("row_layout" not in options for options in layers):
        return "its layers do not pass the lengths of the sequences on to attention"
    window = getattr(config, "sliding_window", None)
    if not layer_types:
        kind = "sliding_attention" if window else "full_attention"
        layer_types = [kind] * len(layers)
    for kind, options in zip(layer_types, layers, strict=False):
        lacks_window = kind == "sliding_attention" and options.get("sliding_window") is None
        if lacks_window and "sdpa" in implementation:
            return "its layers do not pass the sliding window on to attention, which has it in the mask alone"
    return None


def _layer_options(model: nn.Module) -> list[dict[str, Any]]:
    """Keyword arguments of the attention of each layer that gets those of the backbone; two tokens are read.

    Empty where layers do not call transformers' attention interface, or fail. Where this process has a part of the
    weights, a copy on the meta device is read; it may fail after its first layer, as experts select tokens by value.
    """
    causal_lm = unwrap_adapters(model)
    has_weights = is_whole(causal_lm)
    layers: list[dict[str, Any]] = []

    def probe(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        layers.append(kwargs)
        groups = query.shape[1] // value.shape[1]
        return value.repeat_interleave(groups, dim=1).transpose(1, 2), None

    AttentionInterface.register(_PROBE, probe)
    config = causal_lm.config.get_text_config()
    implementation = config._attn_implementation
    config._attn_implementation = _PROBE
    try:
        if not has_weights:
            with torch.device("meta"):
                causal_lm = type(causal_lm)(copy.deepcopy(causal_lm.config))
        ids = torch.zeros(1, 2, dtype=torch.long, device=causal_lm.device)
        with eval_mode(causal_lm), torch.no_grad():
            inputs = {"input_ids": ids, "position_ids": ids, "attention_mask": _no_mask(ids.device)}
            layout = RowLayout([1, 1], [None, None])
            backbone(causal_lm)(**inputs, row_layout=layout, use_cache=False)
    except (RuntimeError, LookupError, TypeError, ValueError):
        return [] if has_weights else layers
    finally:
        config._attn_implementation = implementation
    return layers


def enable_packing(model: nn.Module) -> None:
    """Give a model whose attention is PyTorch's the implementation that reads packed rows.

    Raises:
        ValueError: sequences of the model cannot be packed.
    """
    if reason := cannot_pack(model):
        raise ValueError(f"Sequences of this model cannot be packed: {reason}; or set `packed=False`.")
    if attention_of(model) == "sdpa":
        unwrap_adapters(model).set_attn_implementation(PACKED_SDPA)


def model_inputs(
    model: nn.Module, sequences: Sequence[list[int]], device: torch.device, *, packed: bool, shares: bool = True
) -> tuple[dict[str, Any], Int[Tensor, " S"]]:
    """Inputs of a causal model for some sequences. Nothing in them makes an attention layer wait for the device.

    Args:
        model: reads them; `enable_packing` was called for it, if `packed`.
        packed: one row that holds them one after the other; else rows that are padded on the right. A causal model
            needs no mask for this padding.
        shares: read a common prefix once in a packed row where the model can, see `packed_row`.

    Returns:
        The inputs; and the index in the flattened rows of each token of the sequences, in main memory.
    """
    inputs: dict[str, Any] = {}
    if packed:
        row = packed_row(sequences, shares and shares_prefixes(model))
        inputs["input_ids"] = to_device(row.ids[None], device)
        inputs["position_ids"] = to_device(row.positions[None], device)
        layout = row.layout
        lengths = layout.lengths
        indices = row.indices
    else:
        padded = nn.utils.rnn.pad_sequence(list(map(torch.tensor, sequences)), batch_first=True)
        width = padded.shape[1]
        inputs["input_ids"] = to_device(padded, device)
        layout = RowLayout([width], [None])
        lengths = [width] * len(sequences)
        indices = torch.cat([i * width + torch.arange(len(ids)) for i, ids in enumerate(sequences)])
    if shares_prefixes(model):
        inputs["attention_mask"] = _no_mask(device)
        inputs["row_layout"] = layout
        if not packed:  # some models count them in the mask
            inputs["position_ids"] = torch.arange(width, device=device)[None]
    elif "flash" in attention_of(model):
        # Without them each layer reads the lengths from the position ids and waits for the device.
        inputs["cu_seq_lens_q"] = inputs["cu_seq_lens_k"] = _bounds(lengths, device)
        inputs["max_length_q"] = inputs["max_length_k"] = max(lengths)
    return inputs, indices


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor from main memory without waiting; to a GPU from page-locked memory, as that needs."""
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def shares_prefixes(model: nn.Module) -> bool:
    """Whether packed rows of the model may share prefixes."""
    return attention_of(model) == PACKED_SDPA


def _no_mask(device: torch.device) -> Tensor:
    """A mask of four dimensions is passed on as it is, so that none is formed from the position ids."""
    return torch.empty(1, 1, 0, 0, dtype=torch.bool, device=device)
