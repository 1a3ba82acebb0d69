"""What a causal language model is made of: its backbone, its head, and how families differ in them."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils import is_peft_model
from jaxtyping import Float
from torch import Tensor, nn


def unwrap_adapters(model: nn.Module) -> nn.Module:
    """The causal LM inside a PEFT model, or the model itself."""
    return model.get_base_model() if is_peft_model(model) else model


def backbone(model: nn.Module) -> nn.Module:
    """The causal LM's transformer, without its head; adapters stay in place."""
    return unwrap_adapters(model).base_model


def keep_quantized_differentiable(model: nn.Module) -> None:
    """Keep the layers of a four-bit base such that gradients pass them, on every CPU.

    With AVX512-BF16, bitsandbytes lays them out for inference at the first pass without gradient, such as a rollout's.
    There is no way back, and no gradient passes them any more, without a word.
    """
    for module in model.modules():
        if getattr(module, "support_avx512bf16_for_cpu", False):
            module.support_avx512bf16_for_cpu = False


def use_fp32_lm_head(model: nn.Module) -> None:
    """From now on, under mixed precision too: what TRL's `cast_lm_head_to_fp32` asks for. Copies do it as well."""
    unwrap_adapters(model).get_output_embeddings().uses_fp32_matmul = True


def uses_fp32_lm_head(model: nn.Module) -> bool:
    """Whether `use_fp32_lm_head` said so."""
    return getattr(unwrap_adapters(model).get_output_embeddings(), "uses_fp32_matmul", False)


def head_input(model: nn.Module, hidden: Tensor) -> Tensor:
    """Last hidden states in the dtype that `head_dtype` says, under the autocast that they were computed under.

    In fp32 after `use_fp32_lm_head`, whatever the autocast.
    """
    if uses_fp32_lm_head(model):
        return hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    device = hidden.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    weight = unwrap_adapters(model).get_output_embeddings().weight
    return hidden.to(head_dtype(hidden.dtype, weight.dtype, device, autocast))


def head_dtype(hidden: torch.dtype, weight: torch.dtype, device: str, autocast: torch.dtype | None) -> torch.dtype:
    """The dtype of the states that the head multiplies: that of the model's own head, wherever its sums stay in fp32.

    Args:
        hidden: what the backbone gives.
        weight: the head's; where it is in fp32 and the states are in less, products are in fp32.
        device: its kind.
        autocast: the dtype of mixed precision, or None. bf16 on a GPU has products of bf16, as a linear layer would,
            with weights of fp32 too; fp16 has too little range for a token's share of a gradient.
    """
    if autocast == torch.bfloat16 and device == "cuda":
        return autocast
    return torch.promote_types(hidden, weight)


def completion_states(
    model: nn.Module, batch: dict[str, Any], *, router_loss: bool = False
) -> tuple[Float[Tensor, "B T H"], Float[Tensor, ""] | None]:
    """The hidden states that predict each token of the completions, under the student's own prompts.

    Args:
        model: the unwrapped student.
        batch: TRL's: `prompt_ids` (B, P), left-padded, `completion_ids` (B, T), right-padded, and their masks.
        router_loss: whether the load-balancing loss of a mixture of experts is wanted beside them.
    """
    attention_mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    outputs = backbone(model)(
        input_ids=torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
        attention_mask=attention_mask,
        use_cache=False,
        **({"output_router_logits": True} if router_loss else {}),
    )
    width = batch["completion_ids"].shape[1]
    hidden = head_input(model, outputs.last_hidden_state[:, -width - 1 : -1])
    return hidden, _router_loss(model, outputs, attention_mask) if router_loss else None


def _router_loss(model: nn.Module, outputs: Any, attention_mask: Tensor) -> Tensor:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    config = model.config.get_text_config()
    return load_balancing_loss_func(
        outputs.router_logits, config.num_experts, config.num_experts_per_tok, attention_mask
    )
