"""DeepSpeed ZeRO-2 and ZeRO-3 with gloo on CPU: precision, buffers and resumption; test_processes compares weights."""

from __future__ import annotations

import pytest
import torch

from distributed.launching import DEEPSPEED, assert_wrapped, finished, launch, weights

pytest.importorskip("deepspeed", reason=DEEPSPEED)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("wrapper", ["zero2", "zero3"])
def test_ema_is_fp32_when_deepspeed_trains_in_bf16(tmp_path, wrapper, lora):
    """At a rate of 1e-4, a bf16 average does not change."""
    options = {"bf16": True, "lora": lora, "learning_rate": 1e-2, "teacher_update_rate": 1e-4, "max_steps": 2}
    facts = finished(launch(tmp_path, 2, wrapper=wrapper, **options))
    assert_wrapped(facts, wrapper)
    assert [f["dtype"] for f in facts] == ["torch.bfloat16"] * 2
    assert [f["teacher_computes_in"] for f in facts] == ["torch.bfloat16"] * 2
    teacher = weights(tmp_path)["teacher"]
    assert {value.dtype for value in teacher.values()} == {torch.float32}
    # Averages of bf16 weights at this rate are not representable in bf16.
    assert any((value != value.to(torch.bfloat16)).any() for value in teacher.values())


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", ["zero2", "zero3"])
def test_teacher_copy_routes_to_same_experts_as_student(tmp_path, wrapper):
    """Routing depends on buffers too. At a learning rate of 0, the teacher equals the student."""
    options = {"routed": True, "from_path": True, "learning_rate": 0.0, "max_steps": 1}
    facts = finished(launch(tmp_path / "two", 2, wrapper=wrapper, **options))
    (alone,) = finished(launch(tmp_path / "one", 1, **options))
    assert_wrapped(facts, wrapper)
    assert [f["buffers_differ"] for f in facts] == [[], []]
    for name in ("credit/delta_v_mean", "credit/s_mean", "loss"):
        assert facts[0]["log"][0][name] == pytest.approx(alone["log"][0][name], rel=1e-3, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("wrapper", ["zero2", "zero3"])
def test_resumed_run_equals_uninterrupted_run(tmp_path, wrapper, lora):
    options = {"lora": lora, "wrapper": wrapper, "max_steps": 4, "num_iterations": 2}
    whole = finished(launch(tmp_path / "whole", 2, **options))
    finished(launch(tmp_path / "parts", 2, **options, stop_at=3, save_strategy="steps", save_steps=3))
    assert (tmp_path / "parts" / "run" / "checkpoint-3" / "rollouts_1.pt").is_file()
    resumed = finished(launch(tmp_path / "parts", 2, **options, resume=True))
    assert [f["step"] for f in resumed] == [4, 4]
    assert [f["losses"] for f in resumed] == [f["losses"][3:] for f in whole]
    for kind in ("weights", "teacher"):
        one, two = weights(tmp_path / "whole")[kind], weights(tmp_path / "parts")[kind]
        assert all(torch.equal(two[key], value) for key, value in one.items())
