"""Another model as the teacher, sharded over two gloo processes on CPU, matches one process."""

from __future__ import annotations

import pytest
import torch

import rounding
from distributed.launching import DEEPSPEED, finished, launch
from tiny import save_model

COMMON = {"max_steps": 2, "optim": "sgd", "learning_rate": 0.5, "max_grad_norm": 0.0, "teacher_update_rate": 0.01}
PLAIN = {"teacher_prompt": "student", "contrastive_coef": 0.0, "contrastive_count": 1}
CASES = [
    ("ddp", PLAIN),
    ("fsdp2", PLAIN),
    ("fsdp2", {}),
    ("fsdp2", {"distillation_topk": None, **PLAIN}),
    ("fsdp2", {"teacher_model_init_kwargs": rounding.OPTIONS, **PLAIN}),
    ("zero2", PLAIN),
    ("zero3", PLAIN),
    ("zero3", {}),
    ("zero3", {"distillation_topk": None, **PLAIN}),
]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """Options of a wider teacher with weights of its own."""
    path = save_model(tmp_path_factory.mktemp("teacher"), seed=5, hidden_size=48)
    return {"teacher_model_kind": "model", "teacher_model_name_or_path": path}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory, teacher):
    """options -> (folder, facts) of the same run in one process."""
    known = {}

    def get(options):
        key = repr(sorted(options.items()))
        if key not in known:
            folder = tmp_path_factory.mktemp("one")
            (facts,) = finished(launch(folder, 1, **COMMON, **teacher, **options))
            known[key] = folder, facts
        return known[key]

    return get


@pytest.mark.slow
@pytest.mark.parametrize(("wrapper", "options"), CASES, ids=lambda value: value if isinstance(value, str) else None)
def test_external_teacher_matches_single_process(tmp_path, one_process, teacher, wrapper, options):
    if wrapper.startswith("zero"):
        pytest.importorskip("deepspeed", reason=DEEPSPEED)
    folder, alone = one_process(options)
    facts = finished(launch(tmp_path, 2, wrapper=wrapper, **COMMON, **teacher, **options))
    assert [f["sharded"] for f in facts] == [wrapper in ("fsdp2", "zero3")] * 2
    is_whole = wrapper in ("ddp", "zero2") or "teacher_model_init_kwargs" in options  # quantized weights are
    share = 1.0 if is_whole else 0.5
    assert [f["teacher_held"] for f in facts] == pytest.approx([share] * 2, abs=0.02)
    losses = torch.tensor([f["losses"] for f in facts], dtype=torch.float64).mean(0)
    torch.testing.assert_close(losses, torch.tensor(alone["losses"], dtype=torch.float64), rtol=1e-4, atol=1e-5)
    expected = torch.load(folder / "weights_0.pt", weights_only=True)
    for rank in range(2):
        found = torch.load(tmp_path / f"weights_{rank}.pt", weights_only=True)
        assert found["teacher"].keys() == expected["teacher"].keys() != set()
        assert all(torch.equal(found["teacher"][key], value) for key, value in expected["teacher"].items())
        for key, value in expected["weights"].items():
            torch.testing.assert_close(found["weights"][key], value, rtol=1e-4, atol=2e-5, msg=key)


@pytest.mark.slow
def test_zero3_refuses_a_quantized_teacher(tmp_path, teacher):
    pytest.importorskip("deepspeed", reason=DEEPSPEED)
    ended = launch(tmp_path, 2, wrapper="zero3", teacher_model_init_kwargs=rounding.OPTIONS, **COMMON, **teacher)
    assert ended.codes == [1, 1]
    assert "Use FSDP2 or ZeRO-2, or remove the `quantization_config`" in ended.output
