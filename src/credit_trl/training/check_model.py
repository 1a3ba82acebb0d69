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
    name = type(unwrap_adapters(model)).__name__
    if unwrap_adapters(model).config.is_encoder_decoder:
        raise ValueError(f"`{name}` is an encoder-decoder; CREDIT trains causal language models.")
    check_logits(model, accelerator)
    if not _is_whole(model, accelerator):
        return
    input_ids = _regular_ids(model, 16).view(4, 4)
    padded = torch.cat([input_ids[:, :1].repeat(1, _PADDING), input_ids], dim=1)
    mask = torch.ones_like(padded)
    mask[:, :_PADDING] = 0
    has_positions = "position_ids" in inspect.signature(unwrap_adapters(model).forward).parameters
    counted = {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)} if has_positions and not reads_padding else {}
    with _inference(model, accelerator):
        unpadded = model(input_ids=input_ids, attention_mask=mask[:, _PADDING:], use_cache=False).logits
        shorter = model(input_ids=input_ids[:, :3], attention_mask=mask[:, _PADDING:-1], use_cache=False).logits
        behind = model(input_ids=padded, attention_mask=mask, use_cache=False, **counted).logits
    if changed := _change(unpadded[:, 2], shorter[:, -1]):
        raise refusal("not_causal", name=name, changed=changed)
    if changed := _change(unpadded[:, -1], behind[:, -1]):
        raise refusal("padding", name=name, dtype=str(unpadded.dtype).removeprefix("torch."), changed=changed)


def _change(unpadded: Tensor, padded: Tensor) -> float:
    """Largest difference of the logits (P, V) of some prompts if it exceeds rounding in each of them, else 0.

    Rounding may route a token of a single prompt to another expert. NaN in `other` alone is infinite.
    """
    eps = max(_MIN_EPS, torch.finfo(unpadded.dtype).eps)
    padded = padded.float().nan_to_num(math.inf if unpadded.isfinite().all() else 0.0)
    unpadded = unpadded.float().nan_to_num()
    changes = (unpadded - padded).abs().amax(dim=-1)
    is_real = changes > (_PADDING_TOLERANCE + 4 * eps) * unpadded.abs().amax(dim=-1)
    return changes.max().item() if is_real.all() else 0.0


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
        autocast = torch.is_autocast_enabled(model_logits.device.type)
        computed = torch.get_autocast_dtype(model_logits.device.type) if autocast else model_logits.dtype
        head = lm_head(model, temperature=1.0)
        difference = math.inf
        tolerance = 0.0
        if (*model_logits.shape, *hidden.shape) == (1, head.vocabulary_size, 1, head.weight.shape[1]):
            hidden = hidden.to(head.weight.device)
            trained = hidden.new_empty(model_logits.shape, dtype=accumulation_dtype(hidden.dtype))
            project(head, hidden, out=trained, wants_entropy=False)
            model_logits = model_logits.to(trained).nan_to_num()
            difference = (model_logits - trained.nan_to_num()).abs().max().item()
            eps = max(torch.finfo(dtype).eps for dtype in (computed, hidden.dtype, head.weight.dtype))
            tolerance = 4 * max(_MIN_EPS, eps) * model_logits.abs().max().item()
    if not difference <= tolerance:
        name = type(unwrap_adapters(model)).__name__
        raise refusal("other_head", name=name, difference=difference, tolerance=tolerance)


@contextmanager
def _inference(model: nn.Module, accelerator: Accelerator) -> Iterator[None]:
    """Eval mode without gradients; training modes and random states are restored afterwards."""
    device = model.device
    fork = torch.random.fork_rng([device] if device.type == "cuda" else [], device_type=device.type)
    with eval_mode(model), torch.no_grad(), fork, accelerator.autocast():
        yield


def _is_whole(model: nn.Module, accelerator: Accelerator) -> bool:
    return accelerator.distributed_type not in ("FSDP", "DEEPSPEED", "MEGATRON_LM") and is_whole(model)


def _regular_ids(model: nn.Module, count: int) -> Tensor:
    """Token ids spread over the vocabulary without special tokens, (1, count)."""
    config = unwrap_adapters(model).config
    text = config.get_text_config()
    marks = ("_token_id", "_token_ids", "_token_index")
    special_values = [value for part in (config, text) for name, value in vars(part).items() if name.endswith(marks)]
    special = {i for value in special_values for i in (value if isinstance(value, list | tuple) else [value])}
    ordinary = [i for i in range(text.vocab_size) if i not in special]
    spread = [ordinary[(2 * k + 1) * len(ordinary) // (2 * count)] for k in range(count)]
    return torch.tensor([spread], device=model.device)
