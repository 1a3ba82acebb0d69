"""Sequences without padding: one row that holds them one after the other, and the attention that keeps them apart.

Attention implementations with variable lengths (FlashAttention) read `cu_seq_lens`, FlexAttention reads the position
ids. PyTorch's attention has no variable lengths here: `PACKED_SDPA` calls it once for every sequence, so that no mask
of the square of the row is formed.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from credit_trl.teacher.causal_lm import unwrap_adapters

# Name of PyTorch's attention with support for packed rows, as an `attn_implementation` of transformers.
PACKED_SDPA = "packed_sdpa"
# Layer types that keep packed sequences apart; a recurrent layer would carry its state across them.
_PACKABLE_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}


def packed_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    sequence_lengths: Sequence[int] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """PyTorch's attention, called once for each packed sequence.

    Args:
        module: the attention layer.
        query, key, value: (B, heads, L, D).
        attention_mask: ignored where the row is packed.
        sequence_lengths: lengths of the sequences of the row (B is 1); None where the rows are not packed.
        kwargs: of transformers' implementation.

    Returns:
        (output (B, L, heads, D), None).
    """
    if sequence_lengths is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    outputs = []
    for q, k, v in zip(*(x.split(list(sequence_lengths), dim=2) for x in (query, key, value)), strict=True):
        mask = _band(q.shape[2], kwargs.get("sliding_window"), q.device)
        outputs.append(sdpa_attention_forward(module, q, k, v, mask, **kwargs)[0])
    return torch.cat(outputs, dim=1), None


def _band(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """(1, 1, L, L), True where a query sees a key of a sliding window; None where it sees all before it."""
    if window is None or length <= window:
        return None
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    return ((distance >= 0) & (distance < window))[None, None]


AttentionInterface.register(PACKED_SDPA, packed_sdpa)
AttentionMaskInterface.register(PACKED_SDPA, sdpa_mask)


def attention_of(model: nn.Module) -> str:
    """Name of a model's attention implementation."""
    config = unwrap_adapters(model).config.get_text_config()
    return getattr(config, "_attn_implementation", None) or ""


def cannot_pack(model: nn.Module) -> str | None:
    """Why sequences of a model cannot be packed, or None."""
    implementation = attention_of(model)
    if "flash" not in implementation and implementation not in ("flex_attention", "sdpa", PACKED_SDPA):
        return (
            f"the attention implementation {implementation!r} has no variable lengths; load the model with "
            "`attn_implementation` 'sdpa', 'flex_attention' or 'flash_attention_2'"
        )
    config = unwrap_adapters(model).config.get_text_config()
    allowed = _PACKABLE_LAYERS - ({"chunked_attention"} if "sdpa" in implementation else set())
    others = sorted(set(getattr(config, "layer_types", None) or ()) - allowed)
    if others:
        return f"its {', '.join(others)} layers would carry a state from one sequence into the next"
    return None


def enable_packing(model: nn.Module) -> None:
    """Give a model whose attention is PyTorch's the implementation that reads packed rows.

    Raises:
        ValueError: sequences of the model cannot be packed.
    """
    if reason := cannot_pack(model):
        raise ValueError(
            f"`scoring_packed=True`: sequences of this model cannot be packed: {reason}; or set it to False."
        )
    if attention_of(model) == "sdpa":
        unwrap_adapters(model).set_attn_implementation(PACKED_SDPA)


def packed_inputs(model: nn.Module, input_ids: Int[Tensor, " L"], lengths: Sequence[int]) -> dict[str, Any]:
    """Model inputs of one packed row. Nothing in them makes an attention layer wait for the device.

    Args:
        model: reads them; `enable_packing` was called for it.
        input_ids: the sequences, one after the other.
        lengths: their lengths, at least 1 each.
    """
    ends = [0, *itertools.accumulate(lengths)]
    bounds = torch.tensor(ends, dtype=torch.int32).to(input_ids.device, non_blocking=True)
    positions = torch.cat([torch.arange(length) for length in lengths]).to(input_ids.device, non_blocking=True)
    inputs: dict[str, Any] = {"input_ids": input_ids[None], "position_ids": positions[None]}
    implementation = attention_of(model)
    if implementation == PACKED_SDPA:
        return inputs | {"attention_mask": _no_mask(input_ids.device), "sequence_lengths": tuple(lengths)}
    return inputs | (_flash_lengths(bounds, max(lengths)) if "flash" in implementation else {})


def padded_inputs(model: nn.Module, input_ids: Int[Tensor, "B L"]) -> dict[str, Any]:
    """Model inputs of rows that are padded on the right, whose padding a causal model needs no mask for."""
    rows, width = input_ids.shape
    if attention_of(model) == PACKED_SDPA:
        return {"input_ids": input_ids, "attention_mask": _no_mask(input_ids.device), "sequence_lengths": (width,)}
    if "flash" in attention_of(model):
        bounds = torch.arange(rows + 1, dtype=torch.int32, device=input_ids.device) * width
        return {"input_ids": input_ids, **_flash_lengths(bounds, width)}
    return {"input_ids": input_ids}


def _no_mask(device: torch.device) -> Tensor:
    """A mask of four dimensions is passed on as it is, so that none is formed from the position ids."""
    return torch.empty(1, 1, 0, 0, dtype=torch.bool, device=device)


def _flash_lengths(bounds: Int[Tensor, " n"], longest: int) -> dict[str, Any]:
    """Without them each layer reads the lengths from the position ids and waits for the device."""
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}
