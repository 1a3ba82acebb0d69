"""FSDP2 in bf16 mixed precision casts weights and activations, but no inputs of the loss."""

from __future__ import annotations

import pytest
import torch

from distributed.launching import assert_wrapped, finished, launch


def test_fsdp2_in_bf16_keeps_targets_and_loss_in_fp32(tmp_path):
    facts = finished(launch(tmp_path, 2, wrapper="fsdp2", bf16=True, max_steps=1))
    assert_wrapped(facts, "fsdp2")
    assert [f["dtypes"] for f in facts] == [["torch.float32"]] * 2
    losses = torch.tensor([f["losses"] for f in facts])
    assert not torch.equal(losses, losses.bfloat16().float())
    assert facts[0]["log"][0]["grad_norm"] > 0.0
    for f in facts:  # the teacher is not gathered at once
        assert f["teacher_groups"] == f["groups"]
        assert {"", "model.embed_tokens", "model.layers.0", "model.layers.1"} <= set(f["groups"])
        assert f["teacher_computes_in"] == "torch.bfloat16"


@pytest.mark.slow
def test_fsdp2_adapter_trains_after_first_pass_of_scoring(tmp_path):
    """With given rollouts, FSDP2 reads the trainable parameters while the teacher's adapter is active."""
    options = {"lora": True, "from_path": True, "model_init_kwargs": {"dtype": "bfloat16"}}
    facts = finished(launch(tmp_path, 2, wrapper="fsdp2", bf16=True, max_steps=1, **options))
    assert_wrapped(facts, "fsdp2")
    assert facts[0]["log"][0]["grad_norm"] > 0.0
