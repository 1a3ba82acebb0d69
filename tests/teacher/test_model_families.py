"""Model families with different heads and layers: scored log-probabilities and training."""

from __future__ import annotations

import pytest
import torch
import transformers

from credit_trl import CreditTrainer
from credit_trl.loss.head import lm_head
from credit_trl.teacher.causal_lm import backbone
from tiny import length_verdicts

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


@pytest.fixture
def make_family(tokenizer):
    def make(family):
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
        with torch.no_grad():
            bias = getattr(model.get_output_embeddings(), "bias", None)
            if bias is not None:
                bias.normal_()
        return model

    return make


@pytest.mark.parametrize("family", FAMILIES)
def test_scored_head_reproduces_model_logps(make_family, family):
    model = make_family(family).eval()
    ids = torch.randint(0, 200, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = torch.log_softmax(model(input_ids=ids).logits / 0.7, dim=-1)
        hidden = backbone(model)(input_ids=ids, use_cache=False).last_hidden_state
        actual = lm_head(model, temperature=0.7).logps(hidden.flatten(0, 1)).view_as(expected)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_family_trains_and_logs(make_family, make_config, tokenizer, dataset, family):
    trainer = CreditTrainer(
        make_family(family), length_verdicts, make_config(max_steps=1), dataset, processing_class=tokenizer
    )
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    logged = trainer.state.log_history[0]
    assert logged["credit/frac_without_teacher"] == 0.0
    assert abs(logged["credit/s_mean"]) > 0.0
    assert ("aux_loss" in logged) == (family == "Qwen3Moe")
    assert any(not torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())
