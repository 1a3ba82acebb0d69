"""Model families with different heads and layers: scored log-probabilities and training."""

import pytest
import torch

from families import FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
def test_family_trains_and_logs(make_family, make_trainer, family):
    trainer = make_trainer(model=make_family(family), max_steps=1)
    initial = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    logged = trainer.state.log_history[0]
    assert logged["credit/frac_without_teacher"] == 0.0
    assert abs(logged["credit/s_mean"]) > 0.0
    assert ("aux_loss" in logged) == (family == "Qwen3Moe")
    assert any(not torch.equal(p, initial[name]) for name, p in trainer.model.named_parameters())
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())


def test_router_loss_needs_no_name_of_the_number_of_experts(make_family, make_trainer, monkeypatch):
    """GraniteMoe's configuration has `num_local_experts`."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    monkeypatch.setitem(FAMILIES, "GraniteMoe", experts)
    trainer = make_trainer(model=make_family("GraniteMoe"), max_steps=1, router_aux_loss_coef=0.1)
    trainer.train()
    assert trainer.state.log_history[0]["aux_loss"] >= 1.0  # even routing to two of four experts gives 2


def test_router_loss_of_another_form_is_refused_with_the_option(make_family, make_trainer, monkeypatch):
    """An expert of Doge is a pair of keys, so that its router has two logits of each token's key."""
    experts = {"is_moe": True, "num_experts": 16, "num_experts_per_tok": 4, "initializer_range": 0.02}
    monkeypatch.setitem(FAMILIES, "Doge", experts)
    with pytest.raises(ValueError, match=r"router of `DogeForCausalLM` .*Set `router_aux_loss_coef=0`"):
        make_trainer(model=make_family("Doge"), max_steps=1).train()
    trainer = make_trainer(model=make_family("Doge"), max_steps=1, router_aux_loss_coef=0.0)
    trainer.train()
    assert "aux_loss" not in trainer.state.log_history[0]
