"""FSDP2 with bf16 mixed precision: it rounds weights and activations, and nothing that a loss is made of."""

from __future__ import annotations

import pytest
import torch

from distributed.launching import finished, launch


def test_under_fsdp2_in_bf16_targets_and_loss_stay_in_fp32(tmp_path):
    facts = finished(launch(tmp_path, 2, wrapper="fsdp2", bf16=True, max_steps=1))
    assert [(f["distributed_type"], f["sharded"]) for f in facts] == [("FSDP", True)] * 2
    assert [f["dtypes"] for f in facts] == [["torch.float32"]] * 2
    losses = torch.tensor([f["losses"] for f in facts])
    assert not torch.equal(losses, losses.bfloat16().float())
    assert facts[0]["log"][0]["grad_norm"] > 0.0
    for f in facts:  # the reference is never gathered as a whole
        assert f["reference_groups"] == f["groups"]
        assert {"", "model.embed_tokens", "model.layers.0", "model.layers.1"} <= set(f["groups"])
        assert f["reference_computes_in"] == "torch.bfloat16"


@pytest.mark.slow
def test_under_fsdp2_in_bf16_an_adapter_trains_whose_first_pass_is_one_of_scoring(tmp_path):
    """Rollouts are given, so FSDP2 sees the model first under the reference's adapter, and looks for what trains."""
    options = {"lora": True, "from_path": True, "model_init_kwargs": {"dtype": "bfloat16"}}
    facts = finished(launch(tmp_path, 2, wrapper="fsdp2", bf16=True, max_steps=1, **options))
    assert [(f["distributed_type"], f["sharded"]) for f in facts] == [("FSDP", True)] * 2
    assert facts[0]["log"][0]["grad_norm"] > 0.0
