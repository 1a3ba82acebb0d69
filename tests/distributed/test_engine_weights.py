"""Weight sync to engines under DDP, FSDP2 and ZeRO, with a stand-in engine.

`tests/vllm_engine` tests a real engine with one process.
"""

from __future__ import annotations

import pytest
import torch

from distributed.launching import finished, launch, needs, weights

STEPS = 3
# SGD, so that weights also reveal a wrong scale of the gradient.
RUN = {"engine": True, "max_steps": STEPS, "optim": "sgd", "learning_rate": 0.5, "max_grad_norm": 0.0}
ADAPTERS = ("full", "lora")
WRAPPERS = ("ddp", "fsdp2", "zero2", "zero3")


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_engines_get_same_weights_as_from_single_process(tmp_path, one_process, wrapper, adapter):
    needs(wrapper)
    options = {**RUN, "lora": adapter == "lora"}
    (folder, _), (first, _) = one_process(**options), one_process(**{**options, "max_steps": 1})
    # Those after the last weight sync, before the last step.
    expected, start = weights(folder)["engine"], weights(first)["engine"]
    facts = finished(launch(tmp_path, 2, wrapper=wrapper, **options))
    assert [fact["synchronised"] for fact in facts] == [STEPS] * 2
    assert [fact["sharded"] for fact in facts] == [wrapper in ("fsdp2", "zero3")] * 2
    engines = [weights(tmp_path, rank)["engine"] for rank in range(2)]
    for engine in engines:
        assert engine.keys() == expected.keys()
        for name, weight in expected.items():
            torch.testing.assert_close(engine[name], weight, rtol=1e-4, atol=2e-5, msg=name)
    assert all(torch.equal(engines[0][name], engines[1][name]) for name in expected)
    # Control: weights at the start differ.
    moved = {name for name, weight in expected.items() if (weight - start[name]).abs().max() > 1e-3}
    assert len(moved) == (len(expected) if adapter == "full" else 4)  # two adapted matrices in each of two layers
