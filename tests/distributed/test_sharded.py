"""Sharded runs: precision under FSDP2 and ZeRO, buffers, evaluation, and resumption."""

import json

import pytest
import torch

from distributed.launching import assert_wrapped, finished, launch, losses, needs, weights


def test_fsdp2_in_bf16_keeps_targets_and_loss_in_fp32(tmp_path):
    facts = finished(launch(tmp_path, 2, wrapper="fsdp2", bf16=True, max_steps=1))
    assert_wrapped(facts, "fsdp2")
    assert [f["dtypes"] for f in facts] == [["torch.float32"]] * 2
    losses_of = torch.tensor([f["losses"] for f in facts])
    assert not torch.equal(losses_of, losses_of.bfloat16().float())
    assert facts[0]["log"][0]["grad_norm"] > 0.0
    for f in facts:  # the teacher is not gathered at once
        assert f["teacher_groups"] == f["groups"]
        assert {"", "model.embed_tokens", "model.layers.0", "model.layers.1"} <= set(f["groups"])
        assert f["teacher_computes_in"] == "torch.bfloat16"


@pytest.mark.parametrize("sync_each_batch", [True, False], ids=["recipes", "accelerate's default"])
def test_fsdp2_gradients_are_reduced_in_fp32(tmp_path, sync_each_batch):
    """The recipes reduce each micro-batch, so that no process holds whole gradients between micro-batches."""
    config = {"gradient_accumulation_kwargs": {"sync_each_batch": sync_each_batch}}
    options = {"bf16": True, "max_steps": 1, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    facts = finished(launch(tmp_path, 2, wrapper="fsdp2", accelerator_config=config, **options))
    assert_wrapped(facts, "fsdp2")
    for fact in facts:
        assert len(fact["gradients"]) == 4
        reductions = fact["gradients"][-1]["reduced"]
        assert len(reductions) >= 4
        for number, gradient_facts in enumerate(fact["gradients"]):
            is_reduced = sync_each_batch or number == 3
            assert gradient_facts["reduced"] == ["torch.float32"] * len(reductions) * is_reduced
            assert gradient_facts["dtypes"] == ["torch.float32"] * is_reduced
            assert gradient_facts["share"] == pytest.approx(0.5 * is_reduced, abs=0.05)
            assert (gradient_facts["unsharded"] == 0) == is_reduced


@pytest.mark.slow
def test_fsdp2_adapter_trains_after_first_pass_of_scoring(tmp_path):
    """With given rollouts, FSDP2 reads the trainable parameters while the teacher's adapter is active."""
    options = {"lora": True, "from_path": True, "model_init_kwargs": {"dtype": "bfloat16"}}
    facts = finished(launch(tmp_path, 2, wrapper="fsdp2", bf16=True, max_steps=1, **options))
    assert_wrapped(facts, "fsdp2")
    assert facts[0]["log"][0]["grad_norm"] > 0.0


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("wrapper", ["zero2", "zero3"])
def test_ema_is_fp32_when_deepspeed_trains_in_bf16(tmp_path, wrapper, lora):
    """At a rate of 1e-4, a bf16 average does not change."""
    needs(wrapper)
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
    needs(wrapper)
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
    needs(wrapper)
    options = {"lora": lora, "wrapper": wrapper, "max_steps": 4, "num_iterations": 2}
    uninterrupted = finished(launch(tmp_path / "whole", 2, **options))
    finished(launch(tmp_path / "parts", 2, **options, stop_at=3, save_strategy="steps", save_steps=3))
    assert (tmp_path / "parts" / "run" / "checkpoint-3" / "rollouts_1.pt").is_file()
    resumed = finished(launch(tmp_path / "parts", 2, **options, resume=True))
    assert [f["step"] for f in resumed] == [4, 4]
    assert [f["losses"] for f in resumed] == [f["losses"][3:] for f in uninterrupted]
    for kind in ("weights", "teacher"):
        expected, two = weights(tmp_path / "whole")[kind], weights(tmp_path / "parts")[kind]
        assert all(torch.equal(two[key], value) for key, value in expected.items())


# Two iterations over each generation batch, so that the checkpoint of step 5 lies inside one. Two steps per batch are
# split at random on each process, so that steps could not be compared.
CURVE = {"lora": True, "max_steps": 10, "num_iterations": 2, "learning_rate": 5e-3}


@pytest.mark.slow
def test_resumed_fsdp2_lora_loss_curve_equals_one_process(tmp_path, one_process):
    folder, alone = one_process(**CURVE)
    expected, options = losses([alone]), {**CURVE, "wrapper": "fsdp2"}
    begun = finished(launch(tmp_path, 2, **options, stop_at=5, save_strategy="steps", save_steps=5))
    assert (tmp_path / "run" / "checkpoint-5" / "rollouts_1.pt").is_file()  # inside a generation batch
    continued = finished(launch(tmp_path, 2, **options, resume=True))
    for facts, steps in ((begun, 5), (continued, 10)):
        assert_wrapped(facts, "fsdp2")
        assert [f["step"] for f in facts] == [steps] * 2
    assert (torch.cat([losses(begun), losses(continued)]) - expected).abs().max() < 1e-5
    for ours, theirs in zip(begun[0]["log"] + continued[0]["log"][5:], alone["log"], strict=True):
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
    for kind in ("weights", "teacher"):
        expected_weights, two = weights(folder)[kind], weights(tmp_path)[kind]
        assert expected_weights.keys() == two.keys()
        for name, value in expected_weights.items():
            torch.testing.assert_close(two[name], value, rtol=1e-3, atol=1e-4, msg=name)
    # Control: the loss changes at each step, and another λ gives another curve.
    assert (expected[1:] - expected[:-1]).abs().min() > 1e-4
    _, changed = one_process(**{**CURVE, "contrastive_coef": 0.0})
    assert (losses([changed]) - expected).abs().min() > 1e-4


EVALUATED = {"evaluate": True, "max_steps": 2, "completions": "hashed"}


@pytest.mark.parametrize(
    "lora", [pytest.param(False, id="full"), pytest.param(True, id="lora", marks=pytest.mark.slow)]
)
def test_fsdp2_evaluation_equals_single_process(tmp_path, lora):
    (alone,) = finished(launch(tmp_path / "one", 1, lora=lora, **EVALUATED))
    facts = finished(launch(tmp_path / "two", 2, wrapper="fsdp2", lora=lora, **EVALUATED))
    assert_wrapped(facts, "fsdp2")
    for fact in facts:
        assert [row["step"] for row in fact["evaluations"]] == [0, 2]
        assert [r["eval_avg@3"] for r in fact["evaluations"]] == [r["eval_avg@3"] for r in alone["evaluations"]]
    for step in ("000000", "000002"):
        expected, two = (samples(tmp_path / runs / "run" / "evaluations" / f"step-{step}") for runs in ("one", "two"))
        assert len(expected) == 9
        assert two == expected
    # Evaluation has its own random streams: a run without it ends with the same weights.
    plain = finished(launch(tmp_path / "plain", 2, wrapper="fsdp2", lora=lora, **{**EVALUATED, "evaluate": False}))
    assert plain[0]["evaluations"] == []
    evaluated, without = (weights(tmp_path / runs)["weights"] for runs in ("two", "plain"))
    assert all(torch.equal(evaluated[name], value) for name, value in without.items())


def samples(folder) -> list[str]:
    """Samples of an evaluation in an order that does not depend on the process."""
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    return sorted(json.dumps([row["prompt"], row["sample"], row["text"], row["reward"]]) for row in rows)
