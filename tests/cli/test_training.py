"""Training script of `trl credit`."""

from __future__ import annotations

import pytest

from credit_trl import CreditTrainer
from credit_trl.cli.training import CreditScriptArguments, evaluate_during_training
from tiny import length_verdicts


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 5),
        ({"steps_per_generation": 4}, 20),
        ({"steps_per_generation": 4, "gradient_accumulation_steps": 2}, 10),
        ({"num_iterations": 2}, 10),
        ({"steps_per_generation": 1, "gradient_accumulation_steps": 8, "num_iterations": 1}, 1),
    ],
)
def test_avg_at_k_steps_counts_generation_batches(make_model, make_config, tokenizer, dataset, options, expected):
    config = make_config(**options)
    trainer = CreditTrainer(make_model(), length_verdicts, config, dataset, processing_class=tokenizer)
    script = CreditScriptArguments(task="quickstart", avg_at_k=1, avg_at_k_steps=5)
    assert evaluate_during_training(trainer, script).eval_steps == expected
