"""The properties of the imagined GPU on a real one; skipped where there is none."""

import warnings

import pytest
import torch
from accelerate.state import AcceleratorState

from device.test_imagined_gpu import CASES, SLOW, logged, make_trainer  # noqa: F401

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
GPU = {"use_cpu": False}
WAITS_IN_A_MICRO_BATCH = 3


@pytest.mark.parametrize("case", CASES | SLOW)
def test_a_run_logs_what_a_cpu_logs_and_resumes_bit_for_bit(make_trainer, case):  # noqa: F811
    options = (CASES | SLOW)[case] | {"save_strategy": "steps", "save_steps": 1}
    greedy = {"temperature": 1.0, "top_k": 1, "steps_per_generation": 2}  # so that both devices draw the same tokens
    cpu = make_trainer(**options | greedy)
    cpu.train()
    AcceleratorState._reset_state(reset_partial_state=True)  # the device of a process
    gpu, resumed = (make_trainer(**options | greedy | GPU) for _ in range(2))
    gpu.train()
    resumed.train(resume_from_checkpoint=f"{gpu.args.output_dir}/checkpoint-1")
    for logged_row, plain in zip(logged(gpu), logged(cpu), strict=True):
        assert logged_row == pytest.approx(plain, rel=1e-3, abs=1e-4)
    weights = dict(gpu.model.named_parameters())
    assert all(weight.is_cuda for weight in weights.values())
    assert all(torch.equal(weight, weights[name]) for name, weight in resumed.model.named_parameters())


@pytest.mark.parametrize("case", ["packed", "padded", "renormalize"])
def test_few_waits_in_a_micro_batch(make_trainer, monkeypatch, case):  # noqa: F811
    trainer = make_trainer(**CASES[case] | GPU)
    waits = []

    def watched(owner, method):
        work = getattr(owner, method)

        def run(*args, **kwargs):
            torch.cuda.set_sync_debug_mode("warn")
            try:
                with warnings.catch_warnings(record=True) as seen:
                    warnings.simplefilter("always")
                    return work(*args, **kwargs)
            finally:
                torch.cuda.set_sync_debug_mode("default")
                places = [
                    f"{warning.filename}:{warning.lineno}" for warning in seen if "synchroniz" in str(warning.message)
                ]
                waits.append(places)

        monkeypatch.setattr(owner, method, run)

    watched(trainer.credit_step, "loss")
    watched(trainer.accelerator, "backward")
    trainer.train()
    for loss, backward in zip(waits[::2], waits[1::2], strict=True):
        assert len(loss + backward) <= WAITS_IN_A_MICRO_BATCH, loss + backward


@pytest.mark.parametrize("packed", [False, True])
def test_attention_of_scores_and_update_is_flash(make_trainer, packed):  # noqa: F811
    trainer = make_trainer(packed=packed, bf16=True, max_steps=1, **GPU)
    names = set()

    def profiled(owner, method):
        work = getattr(owner, method)

        def run(*args, **kwargs):
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                result = work(*args, **kwargs)
                torch.cuda.synchronize()
            names.update(event.key for event in profile.key_averages())
            return result

        setattr(owner, method, run)

    profiled(trainer.credit_step, "prepare")
    profiled(trainer.credit_step, "loss")
    trainer.train()
    attention = {name for name in names if "flash" in name or "fmha" in name or "softmax" in name.lower()}
    assert any("flash" in name for name in attention), sorted(names)
    assert not any("fmha" in name and "flash" not in name for name in attention), sorted(attention)
