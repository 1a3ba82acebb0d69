"""Small random models of several families, with different heads and layers."""

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
}
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.01}

FAMILIES = {
    "Qwen3": {"head_dim": 16},
    "Qwen3 tied": {"head_dim": 16, "tie_word_embeddings": True},
    "Llama": {},
    "Olmo3": {"sliding_window": 512},
    "Gemma2": {"head_dim": 16, "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 16},
    "Gemma3": {"head_dim": 16, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 16, "sliding_window": 512},
    "Granite": {"logits_scaling": 4.0},
    "Cohere": {"logit_scale": 0.25},
    "Qwen3Moe": {"head_dim": 16, **EXPERTS, "output_router_logits": True},
    "Phi": {"num_key_value_heads": 2},  # a head with a bias
}
CLASSES = {"Qwen3 tied": "Qwen3", "Gemma3": "Gemma3Text"}


def build_family(tokenizer: PreTrainedTokenizerFast, family: str) -> PreTrainedModel:
    """Build the random model of a family of `FAMILIES`, the same in every call."""
    name = CLASSES.get(family, family)
    config_class = getattr(transformers, f"{name}Config")
    model_class = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")
    torch.manual_seed(0)
    model = model_class(
        config_class(
            **{"vocab_size": len(tokenizer), "initializer_range": 0.3, **SMALL, **FAMILIES[family]},
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    bias = getattr(model.get_output_embeddings(), "bias", None)
    if bias is not None:
        torch.nn.init.normal_(bias)
    return model
