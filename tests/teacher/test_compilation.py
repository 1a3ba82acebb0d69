"""`torch_compile=True` compiles the layers of student and teacher, and training stays the same."""

from __future__ import annotations

import pytest
import torch
from accelerate.state import AcceleratorState
from peft import LoraConfig
from torch._dynamo.utils import counters

from credit_trl import CreditTrainer
from credit_trl.teacher.causal_lm import backbone
from tiny import length_verdicts

OPTIONS = {
    "full": {},
    "lora": {"lora": True},
    "packed": {"packed": True},
    "checkpointing": {"gradient_checkpointing": True},
    "mixed": {"distillation_weight": 0.5},
    "aot": {"torch_compile_backend": "aot_eager"},
}


@pytest.fixture
def train(make_model, make_config, tokenizer, dataset, tmp_path):
    """Runs of two steps: the trainer, its log and its weights."""

    def run(**options):
        AcceleratorState._reset_state(reset_partial_state=True)  # keeps the first accelerator's backend
        torch._dynamo.reset()
        counters.clear()
        adapters = LoraConfig(r=4, target_modules="all-linear") if options.pop("lora", False) else None
        config = make_config(output_dir=str(tmp_path / f"{options}"[:40]), optim="sgd", **options)
        trainer = CreditTrainer(
            make_model(), length_verdicts, config, dataset, processing_class=tokenizer, peft_config=adapters
        )
        trainer.train()
        weights = torch.cat([p.detach().flatten() for p in trainer.model.parameters() if p.requires_grad])
        log = [(row["loss"], row["grad_norm"]) for row in trainer.state.log_history if "loss" in row]
        return trainer, log, weights

    yield run
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "full" else pytest.mark.slow) for name in OPTIONS]
)
def test_compiled_run_equals_plain_run(train, name):
    options = OPTIONS[name]
    _, log, weights = train(**{k: v for k, v in options.items() if not k.startswith("torch_compile")})
    assert not counters["frames"]
    compiled, compiled_log, compiled_weights = train(
        torch_compile=True, **{"torch_compile_backend": "eager", **options}
    )
    assert counters["frames"]["ok"] > 0
    # the attention of packed rows is not compiled
    assert bool(counters["graph_break"]) == (name == "packed"), dict(counters["graph_break"])
    assert not counters["recompile_limit"]
    for model in (compiled.model, *compiled.teacher.models()):
        assert all(layer._compiled_call_impl is not None for layer in backbone(model).layers)
    torch.testing.assert_close(torch.tensor(compiled_log), torch.tensor(log), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(compiled_weights, weights, rtol=0, atol=1e-6)
