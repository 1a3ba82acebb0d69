"""FSDP2 with LoRA on two processes, resumed, with contrasts of the global batch, matches one process."""

from __future__ import annotations

import pytest
import torch

from distributed.launching import finished, launch, losses, weights

STEPS = 10
# Two iterations over each generation batch, so that the checkpoint of step 5 lies inside one. Two steps per batch are
# split at random on each process, so that steps could not be compared.
CURVE = {"lora": True, "max_steps": STEPS, "num_iterations": 2, "learning_rate": 5e-3}
TWO = {**CURVE, "wrapper": "fsdp2"}


def assert_sharded_by_fsdp2(facts: list[dict]) -> None:
    assert [(f["distributed_type"], f["wrapper"], f["sharded"]) for f in facts] == [
        ("FSDP", "FSDPPeftModel", True)
    ] * 2


@pytest.mark.slow
def test_resumed_fsdp2_lora_loss_curve_equals_one_process(tmp_path):
    alone = finished(launch(tmp_path / "one", 1, **CURVE))
    expected = losses(alone)
    assert alone[0]["distributed_type"] == "NO"
    assert len(expected) == STEPS

    begun = finished(launch(tmp_path / "two", 2, **TWO, stop_at=5, save_strategy="steps", save_steps=5))
    assert_sharded_by_fsdp2(begun)
    assert [f["step"] for f in begun] == [5, 5]
    saved = tmp_path / "two" / "run" / "checkpoint-5"
    assert (saved / "rollouts_1.pt").is_file()  # inside a generation batch
    continued = finished(launch(tmp_path / "two", 2, **TWO, resume=True))
    assert_sharded_by_fsdp2(continued)
    assert [f["step"] for f in continued] == [STEPS, STEPS]

    curve = torch.cat([losses(begun), losses(continued)])
    assert (curve - expected).abs().max().item() < 1e-5
    for ours, theirs in zip(begun[0]["log"] + continued[0]["log"][5:], alone[0]["log"], strict=True):
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
    for kind in ("weights", "teacher"):
        one, two = weights(tmp_path / "one")[kind], weights(tmp_path / "two")[kind]
        assert one.keys() == two.keys()
        for name, value in one.items():
            torch.testing.assert_close(two[name], value, rtol=1e-3, atol=1e-4, msg=name)

    # Control: the loss changes at each step, and another λ gives another curve.
    assert (expected[1:] - expected[:-1]).abs().min().item() > 1e-4
    other = losses(finished(launch(tmp_path / "other", 1, **{**CURVE, "contrastive_coef": 0.0})))
    assert (other - expected).abs().min().item() > 1e-4
