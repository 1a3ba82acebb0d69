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
from typing import Any

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

    def variable_lengths(self, device: torch.device) -> tuple[dict[str, Any], Int[Tensor, " S"] | None]:
        """The row as `varlen_attn` reads it, formed by the first layer and copied to the device without waiting.

        Returns:
            First query and first key of each piece, the ends, and the longest; index in the row of the keys of all
            pieces, or None if they are the row's.
        """
        if self._varlen is None:
            piece_columns = torch.arange(sum(self.lengths)).split(self.lengths)
            pairs = zip(self.parents, piece_columns, strict=True)
            keys = [piece if parent is None else torch.cat([piece_columns[parent], piece]) for parent, piece in pairs]
            key_lengths = list(map(len, keys))
            bounds = {f"cu_seq_{name}": _bounds(of, device) for name, of in (("q", self.lengths), ("k", key_lengths))}
            bounds |= {"max_q": max(self.lengths), "max_k": max(key_lengths)}
            is_shared = key_lengths != self.lengths
            self._varlen = bounds, to_device(torch.cat(keys), device) if is_shared else None
        return self._varlen


def packed_row(
    sequences: Sequence[list[int]], shares: bool = True
) -> tuple[Int[Tensor, " R"], Int[Tensor, " R"], RowLayout, Int[Tensor, " S"]]:
    """The row of some sequences, whose hidden states in a causal model are those of the sequences.

    With `shares` those with a common prefix of at least `SHORTEST_SHARED` tokens share it where this saves most; else
    the row is one sequence after the other.

    Returns:
        In main memory: tokens of the row, its pieces one after the other; position of each in its sequence; layout;
        and (ΣL,) index in the row of each token of the sequences, one sequence after the other.
    """
    order = sorted(range(len(sequences)), key=sequences.__getitem__) if shares else range(len(sequences))
    sharing = PrefixSharing()
    for previous, following in itertools.pairwise(order):
        sharing.add(common_prefix_length(sequences[previous], sequences[following]) if shares else 0)
    pieces: list[tuple[int, int | None]] = []  # tokens, parent
    pieces_of: list[list[int]] = [[] for _ in sequences]  # pieces of each sequence
    for start, end, common in sharing.groups():
        parent = len(pieces) if common else None
        if common:
            pieces.append((common, None))
        for i in order[start:end]:
            pieces_of[i] = [] if parent is None else [parent]
            if len(sequences[i]) > common:
                pieces_of[i].append(len(pieces))
                pieces.append((len(sequences[i]) - common, parent))
    lengths, parents = map(list, zip(*pieces, strict=True))
    of_piece = torch.arange(sum(lengths)).split(lengths)
    indices = torch.cat([of_piece[piece] for of_sequence in pieces_of for piece in of_sequence])
    ids = torch.empty(sum(lengths), dtype=torch.long)
    ids[indices] = torch.tensor(list(itertools.chain(*sequences)))
    positions = torch.empty_like(ids)
    positions[indices] = torch.cat([torch.arange(len(sequence)) for sequence in sequences])
    return ids, positions, RowLayout(lengths, parents), indices


class PrefixSharing:
    """Shared prefixes of a first sequence and of those that are added after it, in the order of their tokens.

    Groups are consecutive, and chosen by dynamic programming to save the most tokens.
    """

    def __init__(self) -> None:
        self._lengths = [0]  # of the common prefix of each sequence and the one before
        # For the first n sequences: most tokens saved, start of the last group, its common length.
        self._best = [(0, 0, 0), (0, 0, 0)]

    def add(self, common: int) -> int:
        """Add a sequence with so many tokens in common with the one before; return the tokens that all save."""
        self._lengths.append(common)
        end = len(self._lengths)
        best = (self._best[-1][0], end - 1, 0)
        for start in range(end - 2, -1, -1):
            common = min(common, self._lengths[start + 1])
            if common < SHORTEST_SHARED:
                break
            best = max(best, (self._best[start][0] + common * (end - start - 1), start, common))
        self._best.append(best)
        return best[0]

    def groups(self) -> list[tuple[int, int, int]]:
        """Start, end and common length of each group; a group of one has 0."""
        groups = []
        end = len(self._lengths)
        while end:
            _, start, common = self._best[end]
            groups.append((start, end, common))
            end = start
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
        return _varlen_attention(query, key, value, row_layout, window, kwargs.get("scaling")), None
    queries, keys, values = (x.split(row_layout.lengths, dim=2) for x in (query, key, value))
    outputs = []
    for piece, parent in enumerate(row_layout.parents):
        q, k, v = queries[piece], keys[piece], values[piece]
        if parent is not None:
            k, v = torch.cat([keys[parent], k], dim=2), torch.cat([values[parent], v], dim=2)
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
        key, value = (x.index_select(0, keys) for x in (key, value))
    options = {"enable_gqa": True} if "enable_gqa" in _VARLEN_OPTIONS else {}  # grouped heads, from torch 2.12
    seen = (-1 if window is None else window - 1, 0)
    return varlen_attn(query, key, value, **bounds, scale=scale, window_size=seen, **options)[None]


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
    if "window_size" not in _VARLEN_OPTIONS or device.type != "cuda" or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _bounds(lengths: list[int], device: torch.device) -> Int[Tensor, " n+1"]:
    """Start of each sequence in a row, and the end of the row."""
    return to_device(torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32), device)


def _causal_mask(queries: int, keys: int, window: int | None, device: torch.device) -> Bool[Tensor, "1 1 Q S"]:
    """True where one of the last tokens of a sequence sees a key: itself and, of a window, `window - 1` before it."""
    prefix = keys - queries
    mask = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=device).tril_(prefix)
    return mask if window is None else mask.triu_(prefix + 1 - window)


AttentionInterface.register(PACKED_SDPA, packed_sdpa)
AttentionMaskInterface.register(PACKED_SDPA, sdpa_mask)


def attention_of(model: nn.Module) -> str:
    """Name of a model's attention implementation."""
    return getattr(unwrap_adapters(model).config.get_text_config(), "_attn_implementation", None) or ""


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
    allowed = _PACKABLE_LAYERS - ({"chunked_attention"} if "sdpa" in implementation else set())
    unsupported = sorted(set(getattr(config, "layer_types", None) or ()) - allowed)
    if unsupported:
        return f"its {', '.join(unsupported)} layers do not keep packed sequences apart"
    if implementation == "flex_attention":
        return None
    layers = _layer_options(model)
    if not layers or any("row_layout" not in options for options in layers):
        return "its layers do not pass the lengths of the sequences on to attention"
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * len(layers)
    typed = zip(types, layers, strict=False)
    windows = [options.get("sliding_window") for kind, options in typed if kind == "sliding_attention"]
    if "sdpa" in implementation and None in windows:
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
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2), None

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
            backbone(causal_lm)(**inputs, row_layout=RowLayout([1, 1], [None, None]), use_cache=False)
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
    if packed:
        ids, positions, layout, indices = packed_row(sequences, shares and shares_prefixes(model))
        inputs = {"input_ids": to_device(ids[None], device), "position_ids": to_device(positions[None], device)}
        lengths = layout.lengths
    else:
        padded = nn.utils.rnn.pad_sequence([torch.tensor(ids) for ids in sequences], batch_first=True)
        width = padded.shape[1]
        inputs = {"input_ids": to_device(padded, device)}
        layout = RowLayout([width], [None])
        lengths = [width] * len(sequences)
        indices = torch.cat([i * width + torch.arange(len(ids)) for i, ids in enumerate(sequences)])
    if shares_prefixes(model):
        inputs |= {"attention_mask": _no_mask(device), "row_layout": layout}
        if not packed:  # some models count them in the mask
            inputs["position_ids"] = torch.arange(width, device=device)[None]
    elif "flash" in attention_of(model):
        # Without them each layer reads the lengths from the position ids and waits for the device.
        bounds = _bounds(lengths, device)
        longest = max(lengths)
        inputs |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}
    return inputs, indices


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor from main memory without waiting; to a GPU from page-locked memory, as that needs."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def shares_prefixes(model: nn.Module) -> bool:
    """Whether packed rows of the model may share prefixes."""
    return attention_of(model) == PACKED_SDPA


def _no_mask(device: torch.device) -> Tensor:
    """A mask of four dimensions is passed on as it is, so that none is formed from the position ids."""
    return torch.empty(1, 1, 0, 0, dtype=torch.bool, device=device)
