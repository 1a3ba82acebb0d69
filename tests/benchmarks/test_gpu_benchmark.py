"""The GPU presets on a CPU, at tiny shapes, and trials in processes."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import measure
import step
import update_phase
from measure import Results, Sample, Trial, in_turns, none_if_out_of_memory

from tables import tables_of


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


TINY = update_phase.SHAPES["Qwen3-0.6B"].with_(**tables_of(__file__)["tiny"])


def test_out_of_memory_is_none_and_other_errors_are_raised():
    def answer(tokens):
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
        if workload.tail == "renormalize":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return lambda changes: Sample(1.5 if kind == "credit" else 2.0, peak_mb=10.0)

    monkeypatch.setattr(update_phase, "Trial", InProcess)
    monkeypatch.setattr(update_phase, "build_gpu", build)
    monkeypatch.setattr(update_phase, "POINTS", {"4 tokens": {"completion": 4}})
    results = Results()
    update_phase.measure_gpu({"tiny": TINY}, None, 1, results)
    assert results.values["models"]["tiny"]["credit, renormalize"]["points"] == {"4 tokens": None}
    assert "CUDA out of memory" in results.values["models"]["tiny"]["credit, renormalize"]["error"]
    assert results.values["ratios"] == {
        "tiny, 4 tokens: credit over sdpo": 0.75,
        "tiny, 4 tokens: grpo over sdpo": 1.0,
    }
    assert (
        "| tiny, 4 tokens | credit, renormalize | does not fit | |"
        in update_phase.table_of_gpu(results.values).splitlines()
    )


def test_preset_without_a_gpu_is_an_error(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["update_phase.py", "--preset", "gpu"])
    with pytest.raises(SystemExit):
        update_phase.main()
    assert "needs a GPU, and torch finds none" in capsys.readouterr().err


def test_preset_runs_at_tiny_shapes(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(update_phase, "Trial", InProcess)
    monkeypatch.setattr(update_phase, "SHAPES", {"tiny": TINY})
    points = {"4 tokens": {"completion": 4}, "C = 2": {"completion": 4, "contrasts": 2}}
    monkeypatch.setattr(update_phase, "POINTS", points)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(update_phase, "provenance", dict)
    monkeypatch.setattr(measure, "_has_time", lambda *_: False)
    output = tmp_path / "result.json"
    line = ["--preset", "gpu", "--rounds", "1", "--output", str(output), "--kinds", "credit", "sdpo", "grpo"]
    monkeypatch.setattr(sys, "argv", ["update_phase.py", *line])
    update_phase.main()
    result = json.loads(output.read_text())
    assert set(result["models"]["tiny"]) == {"credit", "sdpo", "grpo"}
    for of_kind in result["models"]["tiny"].values():
        assert all(point["seconds"] > 0 for point in of_kind["points"].values())
    ratios = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert ratios["tiny, 4 tokens: credit over sdpo"] > 0


@pytest.mark.parametrize("name", ["credit", "sdpo", "grpo"])
def test_whole_step_counts_its_tokens(name):
    shape = TINY.with_(batch=64, micro_batches=8, group=8, completion=6, checkpointing=False)
    answer = step.build_gpu(name, shape)
    answer(6)
    sample = answer(6)
    assert sample.tokens["trained"] == 6 * 64
    assert sample.tokens["with gradient"] > sample.tokens["trained"]
    summary = step.summary([sample], parameters=1000)
    flops = 2000 * (3 * sample.tokens["with gradient"] + sample.tokens["without"])
    assert summary["mfu"] == pytest.approx(flops / sample.seconds / step.DENSE_BF16)


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
    samples = in_turns(running, 3, results=results)
    running["lives"].close()
    assert [sample.seconds for sample in samples["lives"]] == [1.0, 2.0, 3.0]
    assert set(samples) == {"lives"}
    assert "dies failed" in capsys.readouterr().out
    assert set(json.loads((tmp_path / "result.json").read_text())["rounds"]["1"]) == {"lives", "dies"}


@pytest.mark.parametrize("contrasts", [0, 2])
def test_step_against_c_has_seconds_by_stage(contrasts):
    shape = TINY.with_(batch=2, group=2, completion=4, checkpointing=False, padding="trimmed", contrasts=contrasts)
    sample = step.build_contrasts(shape)(4)
    assert {"rollout", "verdict", "contexts", "scores", "other"} <= set(sample.stages)
    assert sum(sample.stages.values()) == pytest.approx(sample.seconds)
