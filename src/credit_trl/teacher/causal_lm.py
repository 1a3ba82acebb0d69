"""Backbone and LM head of causal language models."""

from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn


def unwrap_adapters(model: nn.Module) -> nn.Module:
    """Return the causal LM inside a PEFT model, or the model itself."""
    # accelerate's `is_peft_model` reads the metadata of PEFT's distribution at every call: 8 ms, 15 times a step.
    get_base_model = getattr(model, "get_base_model", None)
    if get_base_model is None:
        return model
    return get_base_model()


def backbone(model: nn.Module) -> nn.Module:
    """Return the transformer of a causal LM, without its head and with its adapters."""
    causal_lm = unwrap_adapters(model)
    if causal_lm.base_model is causal_lm:  # text models with the prefix of their multimodal model: Llama 4, Mllama
        return causal_lm.model
    return causal_lm.base_model


def load_renamed_weights(model: nn.Module, directory: str) -> None:
    """Load a checkpoint with weights that `save_pretrained` renames: of mixtures of experts, vision-language models.

    The trainer of transformers reads the files by the model's own names and ignores all others.
    """
    files = list(Path(directory).glob("model*.safetensors"))
    stored = set(model.all_tied_weights_keys)
    for file in files:
        with safe_open(file, "pt") as opened:
            stored.update(opened.keys())
    if not files or model.state_dict().keys() <= stored:
        return
    saved = type(model).from_pretrained(directory, dtype=torch.promote_types(model.dtype, torch.float32))
    model.load_state_dict(saved.state_dict())


def keep_quantized_differentiable(model: nn.Module) -> None:
    """Keep the layers of a 4-bit base differentiable on every CPU.

    On CPUs with AVX512-BF16, bitsandbytes converts them to an inference layout at the first pass without gradients,
    such as a rollout. This is permanent and silently blocks gradients.
    """
    for module in model.modules():
        if getattr(module, "support_avx512bf16_for_cpu", False):
            module.support_avx512bf16_for_cpu = False


def use_fp32_lm_head(model: nn.Module) -> None:
    """Multiply the LM head of a model and its copies in fp32, under autocast too (TRL's `cast_lm_head_to_fp32`)."""
    unwrap_adapters(model).get_output_embeddings().uses_fp32_matmul = True


def uses_fp32_lm_head(model: nn.Module) -> bool:
    """Whether `use_fp32_lm_head` was called on the model."""
    return getattr(unwrap_adapters(model).get_output_embeddings(), "uses_fp32_matmul", False)


def head_input(model: nn.Module, hidden: Tensor) -> Tensor:
    """Cast last hidden states to `head_input_dtype`. Call it under the same autocast as the forward pass."""
    return hidden.to(head_input_dtype(model, hidden.dtype, hidden.device))


def head_input_dtype(model: nn.Module, hidden: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype to cast hidden states to: that of `head_dtype`, or fp32 after `use_fp32_lm_head`."""
    if uses_fp32_lm_head(model):
        return torch.promote_types(hidden, torch.float32)
    has_autocast = torch.is_autocast_enabled(device.type)
    autocast = torch.get_autocast_dtype(device.type) if has_autocast else None
    weight = unwrap_adapters(model).get_output_embeddings().weight
    return head_dtype(hidden, weight.dtype, device.type, autocast)


def head_dtype(hidden: torch.dtype, weight: torch.dtype, device: str, autocast: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which hidden states are multiplied with the LM head.

    It is the dtype of the model's own head where that accumulates in fp32. Under bf16 autocast on a GPU it is bf16, as
    in a linear layer, also for fp32 weights. fp16 autocast is ignored: its range is too small for the gradient of one
    token.
    """
    if autocast == torch.bfloat16 and device == "cuda":
        return autocast
    return torch.promote_types(hidden, weight)
