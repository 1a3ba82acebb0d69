"""How often a micro-batch waits for the device, without a device."""

from __future__ import annotations

import functools
from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from credit_trl import CreditTrainer
from tiny import length_verdicts

# Operations whose result's shape or value the host needs.
_WAITING = ("aten::nonzero", "aten::masked_select", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::unique")


class Waits(TorchDispatchMode):
    """Records what would wait for a GPU: reading values, boolean indices, and copies of Python lists to the device."""

    def __init__(self):
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        if name.startswith(_WAITING):
            self.found.append(name)
        indices = args[1] if name in ("aten::index", "aten::index_put_", "aten::index_put") else ()
        if any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices):
            self.found.append(f"{name} with a mask")
        return func(*args, **(kwargs or {}))


@contextmanager
def device_waits():
    """`Waits`, with what does not dispatch on a CPU."""
    with pytest.MonkeyPatch.context() as patched, Waits() as waits:
        for name in ("tolist", "cpu", "numpy"):
            patched.setattr(torch.Tensor, name, counted(waits.found, getattr(torch.Tensor, name)))
        yield waits


def counted(found, method):
    @functools.wraps(method)
    def call(tensor, *args, **kwargs):
        found.append(method.__name__)
        return method(tensor, *args, **kwargs)

    return call


CASES = {
    "padded": {},
    "packed": {"packed": True},
    "renormalize": {"distillation_tail": "renormalize", "packed": True},
    "whole vocabulary": {"distillation_topk": None},
    "sampled": {"distillation_support": "sampled", "packed": True},
    "ratio": {"num_iterations": 2, "distillation_tail": "renormalize"},
}


@pytest.mark.parametrize("case", CASES)
def test_a_micro_batch_waits_three_times_for_the_device(make_model, make_config, tokenizer, dataset, case):
    config = make_config(contrastive_count=2, **CASES[case])
    trainer = CreditTrainer(make_model(), length_verdicts, config, dataset, processing_class=tokenizer)
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    rows = [row for row in dataset.select(range(2)) for _ in range(4)]
    inputs = trainer._prepare_inputs(rows)
    with device_waits() as waits:
        trainer.compute_loss(trainer.model, inputs).backward()
    assert 1 <= len(waits.found) <= 3, waits.found
