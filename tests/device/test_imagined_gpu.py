"""Training on a GPU that does not exist: no operation mixes devices, and nothing waits or masks without need."""

from contextlib import contextmanager

import pytest
import torch
from peft import LoraConfig
from torch import nn

from device.imagined import Imagined, imagined_gpu, place

AVERAGE = {"teacher_model_kind": "ema"}
CASES = {
    "padded": {"distillation_support": "sampled"},
    "packed": {"packed": True, "contrastive_count": 2, "save_strategy": "steps", "save_steps": 1} | AVERAGE,
    "lora": {"lora": True, "packed": True, "distillation_topk": None} | AVERAGE,
    "renormalize": {"distillation_tail": "renormalize", "packed": True},
}
SLOW = {
    "lora-padded": {"lora": True, "save_strategy": "steps", "save_steps": 1},
    "live": {"teacher_model_kind": "live", "distillation_tail": "renormalize"},
}


@pytest.fixture
def make_trainer(make_trainer):
    def make(lora=False, **options):
        defaults = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 2}
        defaults |= {"optim": "adamw_torch", "num_iterations": 2}
        adapter = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False) if lora else None
        return make_trainer(peft_config=adapter, **defaults | options)

    return make


@contextmanager
def on_gpu(*trainers):
    """The GPU, with the models of the trainers on it."""
    with imagined_gpu() as gpu:
        for model in (model for trainer in trainers for model in [trainer.model, *trainer.teacher.models()]):
            place(model)
        yield gpu


def logged(trainer):
    rows = [row for row in trainer.state.log_history if "loss" in row]
    return [
        {name: value for name, value in row.items() if "seconds" not in name and "time" not in name} for row in rows
    ]


def watched(gpu, owner, method, monkeypatch):
    """Waits and masks of each call of a method."""
    seen = []
    work = getattr(owner, method)

    def run(*args, **kwargs):
        counts_before = len(gpu.waits), len(gpu.attention)
        result = work(*args, **kwargs)
        seen.append((gpu.waits[counts_before[0] :], gpu.attention[counts_before[1] :]))
        return result

    monkeypatch.setattr(owner, method, run)
    return seen


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_run_is_that_of_a_cpu_with_few_waits_and_no_mask(make_trainer, monkeypatch, case):
    """Generation, contexts, scores, loss, backward, average of the teacher, metrics, checkpoint and resumption."""
    options = (CASES | SLOW)[case]
    expected = make_trainer(**options)
    expected.train()
    trainer, *resumed_trainers = (make_trainer(**options) for _ in range(1 + ("save_steps" in options)))
    with on_gpu(trainer, *resumed_trainers) as gpu:
        scores = watched(gpu, trainer.credit_step, "prepare", monkeypatch)
        losses = watched(gpu, trainer.credit_step, "loss", monkeypatch)
        losses_and_backwards = [losses, watched(gpu, trainer.accelerator, "backward", monkeypatch)]
        trainer.train()
        for resumed in resumed_trainers:
            resumed.train(resume_from_checkpoint=f"{resumed.args.output_dir}/checkpoint-1")
    for logged_row, plain in zip(logged(trainer), logged(expected), strict=True):
        assert logged_row == pytest.approx(plain, rel=1e-3, abs=1e-4)
    weights = dict(trainer.model.named_parameters())
    assert all(isinstance(weight, Imagined) for weight in weights.values())
    for resumed in resumed_trainers:
        assert all(torch.equal(p.inner, weights[name].inner) for name, p in resumed.model.named_parameters())
    assert len(losses) >= 4
    for (waits, attention), (more, _) in zip(*losses_and_backwards, strict=True):
        assert 1 <= len(waits + more) <= 3, waits + more
        assert attention
        assert not any(attention)
    for _, attention in scores:
        assert attention
        assert not any(attention)


def test_mixed_devices_raise_and_waits_are_seen():
    weight, host = nn.Linear(3, 3), torch.ones(2, 3)
    with imagined_gpu() as gpu:
        place(weight)
        device = host.to("cuda")
        assert device.device.type == weight(device).device.type == "cuda"
        with pytest.raises(RuntimeError, match="mixes devices"):
            weight(host)
        with pytest.raises(RuntimeError, match="mixes devices"):
            device.index_put_((torch.zeros(1, dtype=torch.long, device="cuda"),), host[:1])
        with pytest.raises(TypeError, match="can't convert cuda"):
            device.numpy()
        gpu.waits.clear()
        host.pin_memory().to("cuda", non_blocking=True)
        assert not gpu.waits
        for wait in (lambda: device.sum().item(), device.cpu, device.tolist, lambda: bool(device.any())):
            wait()
        device[device > 0]
        device[[0]]
        host.to("cuda", non_blocking=True)
        torch.tensor([1.0], device="cuda")
        assert len(gpu.waits) == 8
