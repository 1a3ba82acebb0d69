"""Several gloo processes on CPU match one: contrast draws, gradients, weights, teacher and metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from distributed.launching import finished, launch

DEFAULTS = {"lora": False, "fsdp2": False, "topk": 20, "kind": "ema"}


def run(out: Path, processes: int, per_device: int, **options: Any) -> list[dict]:
    """Return the facts of each process of a run."""
    facts = finished(launch(out, processes, job="credit_run", per_device=per_device, **{**DEFAULTS, **options}))
    sharded = options.get("fsdp2", False)
    assert all(f["distributed_type"].endswith("FSDP" if sharded else "MULTI_CPU") for f in facts)
    assert all(f["sharded"] == sharded for f in facts)
    # The EMA is sharded as the student.
    expected = 0.0 if options.get("kind") == "live" else 1 / processes if sharded else 1.0
    assert [f["teacher_held"] for f in facts] == pytest.approx([expected] * processes, abs=0.1 * expected)
    return facts


def assert_same_tensors(first: dict, second: dict, rtol: float) -> None:
    assert first.keys() == second.keys()
    assert first
    for name, tensor in first.items():
        scale = tensor.abs().max().clamp(min=1e-6)
        assert ((second[name] - tensor).abs().max() / scale).item() < rtol, name


def load(path: Path) -> dict:
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize(
    ("processes", "options"),
    [
        pytest.param(2, {}, id="full-topk"),
        pytest.param(2, {"lora": True, "topk": None}, id="lora-whole"),
        pytest.param(2, {"fsdp2": True}, id="fsdp2-topk"),
        pytest.param(2, {"fsdp2": True, "topk": None}, id="fsdp2-whole", marks=pytest.mark.slow),
        pytest.param(2, {"fsdp2": True, "lora": True}, id="fsdp2-lora", marks=pytest.mark.slow),
        pytest.param(2, {"fsdp2": True, "kind": "live"}, id="fsdp2-live", marks=pytest.mark.slow),
        pytest.param(4, {"fsdp2": True}, id="fsdp2-four", marks=pytest.mark.slow),
        pytest.param(4, {"topk": None}, id="four-whole", marks=pytest.mark.slow),
        # Four processes of two rollouts, so that each group spans two processes.
        pytest.param(4, {"lora": True}, id="four-lora", marks=pytest.mark.slow),
    ],
)
def test_processes_match_single_process(tmp_path, processes, options):
    total = 8 if processes == 4 else 16
    (single,) = run(tmp_path / "one", 1, total, **{**options, "fsdp2": False})
    many = run(tmp_path / "many", processes, total // processes, **options)

    draws = sorted((tuple(d[1]), d[0]) for facts in many for d in facts["draws"])
    assert draws == sorted((tuple(d[1]), d[0]) for d in single["draws"])

    one = load(tmp_path / "one" / "state_0.pt")
    for rank in range(processes):
        state = load(tmp_path / "many" / f"state_{rank}.pt")
        assert_same_tensors(one["gradients"], state["gradients"], rtol=2e-4)
        # Adam divides by a gradient's size, so that a weight whose gradient is near zero keeps its relative rounding.
        assert_same_tensors(one["weights"], state["weights"], rtol=2e-4)
        if options.get("kind") != "live":
            teacher = load(tmp_path / "many" / f"teacher_{rank}.pt")
            assert_same_tensors(load(tmp_path / "one" / "teacher_0.pt"), teacher, rtol=2e-4)

    for ours, theirs in zip(many[0]["log"], single["log"], strict=True):
        credit = [name for name in theirs if name.startswith("credit/") and "seconds" not in name]
        credit.remove("credit/padding_factor")  # of the micro-batches, which depend on the processes
        for name in [*credit, "loss", "grad_norm", "reward"]:
            expected = theirs[name] if theirs[name] is None else pytest.approx(theirs[name], rel=1e-3, abs=1e-5)
            assert ours[name] == expected, name
    assert any(entry["credit/frac_without_teacher"] > 0 for entry in single["log"])
