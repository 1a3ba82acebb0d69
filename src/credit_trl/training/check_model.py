"""Checks of a model's logits before the first rollout: the loss computes them from hidden states, without padding."""

import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from credit_trl.loss.head import accumulation_dtype, lm_head
from credit_trl.loss.projection import project
from credit_trl.mistakes import refusal
from credit_trl.teacher.causal_lm import backbone, unwrap_adapters
from credit_trl.teacher.models import eval_mode
from credit_trl.teacher.sharding import is_whole

# Smallest eps that logits are compared with: that of TF32, in which a GPU may multiply fp32.
_MIN_EPS = 2.0**-10
# Allowed change of logits under left padding, relative to the largest logit: recurrent states change slightly.
_PADDING_TOLERANCE = 0.01
_PADDING = 8


def check_model(model: nn.Module, accelerator: Accelerator, *, reads_padding: bool = True) -> None:
    """Check that a model can be distilled. Skipped where `check_logits` is.

    `reads_padding`: whether the policy reads TRL's padded prompts, whose positions count the padding; those of
    generation and of the distillation loss do not.

    Raises:
        ValueError: its logits are not those of its backbone and head (`check_logits`), or they change with later
            tokens or when the prompt is padded on the left.
    """
    base_model = unwrap_adapters(model)
    name = type(base_model).__name__
    if base_model.config.is_encoder_decoder:
        raise ValueError(f"`{name}` is an encoder-decoder. Give a causal language model.")
    check_logits(model, accelerator)
    if not _is_whole(model, accelerator):
        return
    input_ids = _regular_ids(model, 16).view(4, 4)
    padded = torch.cat([input_ids[:, :1].repeat(1, _PADDING), input_ids], dim=1)
    mask = torch.ones_like(padded)
    mask[:, :_PADDING] = 0
    positions = {}
    if not reads_padding and "position_ids" in inspect.signature(base_model.forward).parameters:
        positions["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    with _inference(model, accelerator):
        unpadded = model(input_ids=input_ids, attention_mask=mask[:, _PADDING:], use_cache=False).logits
        shorter = model(input_ids=input_ids[:, :3], attention_mask=mask[:, _PADDING:-1], use_cache=False).logits
        behind = model(input_ids=padded, attention_mask=mask, use_cache=False, **positions).logits
    if changed := _change(unpadded[:, 2], shorter[:, -1]):
        raise refusal("not_causal", name=name, changed=changed)
    if changed := _change(unpadded[:, -1], behind[:, -1]):
        raise refusal("padding", name=name, dtype=str(unpadded.dtype).removeprefix("torch."), changed=changed)


def _change(unpadded: Tensor, padded: Tensor) -> float:
    """Largest difference of the logits (P, V) of some prompts if it exceeds rounding in each of them, else 0.

    Rounding may route a token of a single prompt to another expert. NaN in `other` alone is infinite.
    """
    tolerance = _PADDING_TOLERANCE + 4 * max(_MIN_EPS, torch.finfo(unpadded.dtype).eps)
    nan_value = math.inf if unpadded.isfinite().all() else 0.0
    padded = padded.float().nan_to_num(nan_value)
    unpadded = unpadded.float().nan_to_num()
    changes = (unpadded - padded).abs().amax(dim=-1)
    largest = unpadded.abs().amax(dim=-1)
    is_real = changes > tolerance * largest
    if not is_real.all():
        return 0.0
    return changes.max().item()


def check_logits(model: nn.Module, accelerator: Accelerator) -> None:
    """Check that the model's logits are `softcap(scale · (h Wᵀ + b))` of its last hidden states h.

    Compares both after four tokens, with a tolerance of four times the eps of the coarsest dtype involved (at least
    TF32's) relative to the largest logit. Skipped under FSDP and DeepSpeed and for sharded or meta parameters, where
    no process can run the model yet.

    Raises:
        ValueError: they differ, so the losses would not be those of the model's distribution.
    """
    if not _is_whole(model, accelerator):
        return
    inputs = {"input_ids": _regular_ids(model, 4), "attention_mask": None, "use_cache": False}
    with _inference(model, accelerator):
        model_logits = model(**inputs).logits[0, -1:]
        hidden = backbone(model)(**inputs).last_hidden_state[0, -1:]
        head = lm_head(model, temperature=1.0)
        difference = math.inf
        tolerance = 0.0
        has_shape_of_head = model_logits.shape == (1, head.vocabulary_size)
        if has_shape_of_head and hidden.shape == (1, head.weight.shape[1]):
            dtypes = [_computed_dtype(model_logits), hidden.dtype, head.weight.dtype]
            eps = max(torch.finfo(dtype).eps for dtype in dtypes)
            hidden = hidden.to(head.weight.device)
            trained = hidden.new_empty(model_logits.shape, dtype=accumulation_dtype(hidden.dtype))
            project(head, hidden, out=trained, wants_entropy=False)
            model_logits = model_logits.to(trained).nan_to_num()
            difference = (model_logits - trained.nan_to_num()).abs().max().item()
            tolerance = 4 * max(_MIN_EPS, eps) * model_logits.abs().max().item()
    if not difference <= tolerance:
        name = type(unwrap_adapters(model)).__name__
        raise refusal("other_head", name=name, difference=difference, tolerance=tolerance)


def _computed_dtype(logits: Tensor) -> torch.dtype:
    """The dtype of the products that gave the logits."""
    device_type = logits.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else logits.dtype


@contextmanager
def _inference(model: nn.Module, accelerator: Accelerator) -> Iterator[None]:
    """Eval mode without gradients; training modes and random states are restored afterwards."""
    device = model.device
    devices = [device] if device.type == "cuda" else []
    fork = torch.random.fork_rng(devices, device_type=device.type)
    with eval_mode(model), torch.no_grad(), fork, accelerator.autocast():
        yield


def _is_whole(model: nn.Module, accelerator: Accelerator) -> bool:
    return accelerator.distributed_type not in ("FSDP", "DEEPSPEED", "MEGATRON_LM") and is_whole(model)


def _regular_ids(model: nn.Module, count: int) -> Tensor:
    """Token ids spread over the vocabulary without special tokens, (1, count)."""
    config = unwrap_adapters(model).config
    text_config = config.get_text_config()
    special: set[int] = set()
    for name, value in [*vars(config).items(), *vars(text_config).items()]:
        if name.endswith(("_token_id", "_token_ids", "_token_index")):
            special.update(value if isinstance(value, list | tuple) else [value])
    ordinary = torch.tensor([i for i in range(text_config.vocab_size) if i not in special])
    spread = (2 * torch.arange(count) + 1) * len(ordinary) // (2 * count)
    return ordinary[spread].view(1, count).to(model.device)
