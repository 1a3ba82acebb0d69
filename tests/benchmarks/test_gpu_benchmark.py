"""The GPU benchmark on a CPU: its plan, its search, and a full run at tiny shapes."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import gpu
import measure
import pair
import update_phase
from measure import Results, Sample, Trial, TrialError, in_turns, none_if_out_of_memory

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CAN_INTERPRET = importlib.util.find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"


class InProcess:
    """A `Trial` in this process. As in a child process, errors of `build` are raised by the first `ask`."""

    def __init__(self, build, *arguments) -> None:
        self.build = build, arguments
        self.answer = None

    def ask(self, *request):
        build, arguments = self.build
        self.answer = self.answer or build(*arguments)
        return self.answer(*request)

    def close(self) -> None:
        pass


def tiny_plan() -> gpu.Plan:
    shape = gpu.model_shape(
        "qwen3-0.6b",
        vocabulary=300,
        hidden=16,
        layers=1,
        heads=2,
        key_value_heads=1,
        head_dim=8,
        intermediate=16,
        prompt=4,
        teacher_prompt=6,
        topk=5,
        dtype="float32",
        device="cpu",
    )
    alone = pair.Pair(tokens=4, hidden=8, vocabulary=50, topk=5, dtype="float32", device="cpu")
    return gpu.Plan(
        models={"tiny": shape},
        points={"4 tokens": {"completion": 4}, "C = 2": {"completion": 4, "contrasts": 2}},
        longest=(4, 8),
        pair=alone,
        liger=replace(alone, student_hidden=4),
        kernels=("torch", "triton") if CAN_INTERPRET else ("torch",),
    )


def test_plan_has_the_shapes_of_the_models():
    plan = gpu.Plan()
    large, small = plan.models["Qwen3-8B"], plan.models["Qwen3-0.6B"]
    assert (large.hidden, large.layers, large.intermediate, large.tied) == (4096, 36, 12_288, False)
    assert (small.hidden, small.layers, small.intermediate, small.tied) == (1024, 28, 3072, True)
    for shape in (large, small):
        assert (shape.vocabulary, shape.dtype, shape.device, shape.checkpointing) == (
            151_936,
            "bfloat16",
            "cuda",
            True,
        )
    longest = large.with_(**plan.points["18,944 tokens"])
    assert longest.teacher_prompt + longest.completion == 18_944
    assert (plan.pair.hidden, plan.pair.vocabulary, plan.pair.tokens) == (4096, 128_256, 8192)
    trials = gpu.kinds(large, plan.kernels)
    assert {name: (kind, of.kernels, of.tail) for name, (kind, of) in trials.items()} == {
        "credit, torch": ("credit", "torch", "bucket"),
        "credit, triton": ("credit", "triton", "bucket"),
        "credit, triton, renormalize": ("credit", "triton", "renormalize"),
        "sdpo": ("sdpo", "torch", "bucket"),
        "grpo": ("grpo", "torch", "bucket"),
        "distillation": ("distillation", "torch", "bucket"),
    }


@given(start=st.integers(1, 50), factor=st.integers(1, 100), limit=st.integers(0, 6000))
def test_search_finds_the_longest_length_to_a_sixteenth(start, factor, limit):
    most, asked = start * factor, []
    found = gpu.longest_that_fits(lambda t: asked.append(t) or t <= limit, start, most)
    assert max(asked) <= most
    if limit < start:
        assert found == 0
    elif limit >= most:
        assert found == most
    else:
        assert found <= limit <= found + max(found // 16, 1)
    assert len(asked) <= 20


def test_out_of_memory_is_none_and_other_errors_are_raised():
    def answer(tokens: int) -> Sample:
        if tokens > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        if tokens < 0:
            raise RuntimeError("something else")
        return Sample(1.0)

    attempt = none_if_out_of_memory(answer)
    assert attempt(2) == Sample(1.0)
    assert attempt(3) is None
    with pytest.raises(RuntimeError, match="something else"):
        attempt(-1)


def test_models_that_do_not_fit_are_reported_without_a_ratio(monkeypatch):
    def build(kind, workload):
        if kind == "sdpo":
            raise TrialError("build(...) failed: OutOfMemoryError('CUDA out of memory')")
        return lambda changes: Sample(2.0 if workload.kernels == "torch" else 1.5, peak_mb=10.0)

    monkeypatch.setattr(gpu, "Trial", InProcess)
    monkeypatch.setattr(pair, "Trial", InProcess)
    monkeypatch.setattr(gpu, "build", build)
    monkeypatch.setattr(pair, "build_pair", lambda shape, kind: lambda: Sample(0.05, peak_mb=1000.0))
    monkeypatch.setattr(pair, "chunk_size", lambda shape: 4)
    results, plan = Results(), replace(tiny_plan(), kernels=("torch", "triton"))
    gpu.measure(replace(plan, parts=("points", "pair")), 1, results)
    result = gpu.measure(replace(plan, parts=("longest",)), 1, results)  # keeps the other parts
    failed = result["models"]["tiny"]["sdpo"]
    assert failed["points"] == {"4 tokens": None, "C = 2": None}
    assert "CUDA out of memory" in failed["error"]
    assert result["ratios"] == {
        "tiny, 4 tokens: credit, triton over credit, torch": 0.75,
        "tiny, C = 2: credit, triton over credit, torch": 0.75,
    }
    lines = gpu.table(result).splitlines()
    assert "| tiny, 4 tokens | sdpo | does not fit | |" in lines
    assert "| tiny | sdpo | 0 |" in lines
    assert "| full, triton | 50.0 | 1.0 |" in lines
    assert "| Liger, as published for an H100 | 60.7 | 11.1 |" in lines


def test_preset_without_a_gpu_is_an_error(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["update_phase.py", "--preset", "gpu"])
    with pytest.raises(SystemExit):
        update_phase.main()
    assert "needs a GPU, and torch finds none" in capsys.readouterr().err


def test_preset_runs_at_tiny_shapes(monkeypatch, capsys, tmp_path):
    plan = tiny_plan()
    monkeypatch.setattr(gpu, "Trial", InProcess)
    monkeypatch.setattr(pair, "Trial", InProcess)
    monkeypatch.setattr(gpu, "Plan", lambda: plan)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(update_phase, "provenance", dict)
    monkeypatch.setattr(measure, "_has_time", lambda *_: False)
    output = tmp_path / "result"
    monkeypatch.setattr(sys, "argv", ["update_phase.py", "--preset", "gpu", "--rounds", "1", "--output", str(output)])
    update_phase.main()
    result = json.loads(output.with_suffix(".json").read_text())
    for of_kind in result["models"]["tiny"].values():
        assert of_kind["longest_completion"] == 8
        assert all(point["seconds"] > 0 for point in of_kind["points"].values())
    for shape in ("head", "liger"):
        assert set(result["pair"][shape]) == {*pair.pairs(plan.kernels), "ceilings"}
        assert result["pair"][shape]["full, torch"]["chunk_tokens"] >= 1
        assert result["pair"][shape]["ceilings"]["product_tflops"] > 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["tiny, 4 tokens: credit, torch over sdpo"] > 0


def test_pair_needs_neither_trl_nor_datasets():
    code = "import sys, pair; pair.build_pair(pair.Pair(4, 8, 50, 5, 'float32', 'cpu'), 'full, torch')()"
    code += "; sys.exit(bool({'trl', 'datasets', 'transformers'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], cwd=BENCHMARKS, check=True)


def build_mortal(name):
    """A trial whose process dies at its second request."""
    asked = []

    def answer():
        asked.append(name)
        if name == "dies" and len(asked) == 2:
            os._exit(1)
        return Sample(float(len(asked)))

    return answer


@pytest.mark.slow
def test_dead_process_costs_its_own_entry(tmp_path, capsys):
    results = Results(tmp_path / "result.json")
    running = {name: Trial(build_mortal, name) for name in ("lives", "dies")}
    try:
        samples = in_turns(running, 3, results=results)
    finally:
        for trial in running.values():
            trial.close()
    assert [sample.seconds for sample in samples["lives"]] == [1.0, 2.0, 3.0]
    assert set(samples) == {"lives"}
    assert "dies failed" in capsys.readouterr().out
    rounds = json.loads((tmp_path / "result.json").read_text())["rounds"]
    assert set(rounds["1"]) == {"lives", "dies"}  # written when it was measured
    assert set(rounds["3"]) == {"lives"}


def test_results_of_an_interrupted_run_are_merged(tmp_path):
    Results(tmp_path / "result.json").merge({"models": {"a": {"x": 1, "y": 2}}, "commit": "old"})
    Results(tmp_path / "result.json").merge({"models": {"a": {"y": 3}, "b": {}}, "commit": "new"})
    merged = json.loads((tmp_path / "result.json").read_text())
    assert merged == {"models": {"a": {"x": 1, "y": 3}, "b": {}}, "commit": "new"}


def test_gpu_plan_is_reduced_to_the_chosen_parts():
    plan = gpu.Plan().only(["Qwen3-0.6B"], ["sdpo"], None, searches=False)
    assert (list(plan.models), plan.kinds, plan.parts) == (["Qwen3-0.6B"], ("sdpo",), ("points", "pair"))
    assert gpu.Plan().only(None, None, ["pair"], searches=True).parts == ("pair",)
