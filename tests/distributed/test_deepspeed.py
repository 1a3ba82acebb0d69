"""DeepSpeed ZeRO-2 and ZeRO-3 with gloo on CPU match a single process without DeepSpeed."""

from __future__ import annotations

import pytest
import torch

from distributed.launching import DEEPSPEED, finished, launch

pytest.importorskip("deepspeed", reason=DEEPSPEED)

# SGD, so that weights also reveal a wrong scale of the gradient.
COMMON = {"max_steps": 3, "optim": "sgd", "learning_rate": 0.5, "max_grad_norm": 0.0}
CASES = [
    ("zero2", 2, {}),
    ("zero3", 2, {}),
    ("zero2", 2, {"lora": True}),
    ("zero3", 2, {"lora": True}),
    ("zero3", 2, {"distillation_topk": None}),
    ("zero3", 2, {"teacher_model_kind": "live"}),
    ("zero3", 2, {"distillation_weight": 0.5}),
    ("zero3", 2, {"from_path": True}),
    ("zero3", 2, {"from_path": True, "lora": True}),
    ("zero2", 4, {}),
    ("zero3", 4, {"lora": True}),
]

LARGEST = 259 * 32  # elements of the tiny model's largest parameter, its embedding


def name(case):
    wrapper, processes, options = case
    return "-".join([wrapper, str(processes), *(f"{k}={v}" for k, v in options.items())])


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """options -> (folder, facts) of the same run in one process, without DeepSpeed."""
    known = {}

    def get(options):
        key = repr(sorted(options.items()))
        if key not in known:
            known[key] = tmp_path_factory.mktemp("one")
            (facts,) = finished(launch(known[key], 1, **COMMON, **options))
            assert facts["distributed_type"] == "NO"
            known[key] = known[key], facts
        return known[key]

    return get


def state(folder, rank=0):
    return torch.load(folder / f"weights_{rank}.pt", weights_only=True)


def assert_wrapped(facts, wrapper):
    for fact in facts:
        assert (fact["distributed_type"], fact["wrapper"]) == ("DEEPSPEED", "DeepSpeedEngine")
        assert fact["zero_stage"] == int(wrapper[-1])
        assert fact["sharded"] == (wrapper == "zero3")
        assert fact["collectives"] == facts[0]["collectives"] > 0


def assert_average_in_parts(facts, wrapper, options):
    """Under ZeRO-3, the EMA is partitioned and gathered one parameter at a time.

    The EMA of an adapter is complete on every process, and a live teacher has none.
    """
    is_none, is_whole = options.get("teacher_model_kind") == "live", wrapper == "zero2" or "lora" in options
    share = 0.0 if is_none else 1.0 if is_whole else 1 / len(facts)
    assert [f["teacher_held"] for f in facts] == pytest.approx([share] * len(facts), abs=0.01)
    if wrapper == "zero3" and not is_none:
        copies = 1 if is_whole else 2  # the parameter of the student and that of the EMA
        assert 0 < max(f["gathered"] for f in facts) <= copies * LARGEST < copies * facts[0]["parameters"] / 3


@pytest.mark.slow
@pytest.mark.parametrize(("wrapper", "processes", "options"), CASES, ids=map(name, CASES))
def test_zero_matches_single_process(tmp_path, one_process, wrapper, processes, options):
    folder, alone = one_process(options)
    facts = finished(launch(tmp_path, processes, wrapper=wrapper, **COMMON, **options))
    assert_wrapped(facts, wrapper)
    assert_average_in_parts(facts, wrapper, options)
    draws = sorted((d[1], d[0]) for f in facts for d in f["draws"])
    assert draws == sorted((d[1], d[0]) for d in alone["draws"])
    assert draws
    expected, losses = state(folder), torch.tensor([f["losses"] for f in facts], dtype=torch.float64).mean(0)
    torch.testing.assert_close(losses, torch.tensor(alone["losses"], dtype=torch.float64), rtol=1e-4, atol=1e-5)
    for rank in range(processes):
        found = state(tmp_path, rank)
        for kind in ("weights", "teacher"):
            assert found[kind].keys() == expected[kind].keys()
            for key, value in expected[kind].items():
                torch.testing.assert_close(found[kind][key], value, rtol=1e-4, atol=2e-5, msg=f"{kind} {key}")
    for ours, theirs in zip(facts[0]["log"], alone["log"], strict=True):
        for metric in ("credit/teacher_drift", "credit/kl_to_target", "credit/frac_without_teacher", "grad_norm"):
            if theirs[metric] is not None:
                assert ours[metric] == pytest.approx(theirs[metric], rel=1e-3, abs=1e-5), metric


def test_control_weights_move_beyond_tolerance(one_process):
    """The weights change by more than the tolerance, and the teacher follows."""
    folder, facts = one_process({})
    moved = {k: (v - state(folder)["teacher"][k]).abs().max() for k, v in state(folder)["weights"].items()}
    assert moved["lm_head.weight"] > 1e-3
    assert min(moved.values()) > 2e-5
    assert facts["log"][-1]["credit/teacher_drift"] > 0


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
    teacher = state(tmp_path)["teacher"]
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
        one, two = state(tmp_path / "whole")[kind], state(tmp_path / "parts")[kind]
        assert all(torch.equal(two[key], value) for key, value in one.items())
