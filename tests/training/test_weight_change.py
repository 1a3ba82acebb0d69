"""Updates that the dtype of the weights rounds away raise one alarm."""

from __future__ import annotations

import warnings

import pytest
import torch

from credit_trl.training.metrics import CreditWarning
from tiny import length_verdicts


@pytest.fixture
def warned(make_model, make_trainer):
    """Warnings of a run with weights of a dtype, at construction and while it trains."""

    def run(dtype, rewards=length_verdicts, **options):
        model = make_model().to(dtype)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer = make_trainer(rewards, model=model, learning_rate=1e-6, **options)
            count = len(caught)
            trainer.train()
        messages = [str(w.message) if w.category is CreditWarning else "" for w in caught]
        return messages[:count], messages[count:]

    return run


def test_bf16_weights_at_the_papers_rate_are_named_and_counted_once(warned):
    constructed, trained = warned(torch.bfloat16, max_steps=3)
    [message] = [text for text in constructed if "trained weights are bfloat16" in text]
    assert "keep `bf16=True`" in message
    [message] = [text for text in trained if "first update changed" in text]
    assert float(message.split("changed ")[1].split("%")[0]) < 10


@pytest.mark.parametrize(
    "options",
    [
        {"max_steps": 1},
        {"max_steps": 2, "warmup_steps": 2, "lr_scheduler_type": "constant_with_warmup"},  # first update of rate 0
        {"max_steps": 2, "rewards": lambda completions, **_: [0.0] * len(completions)},  # no gradient
    ],
    ids=["paper", "warm-up", "no loss"],
)
def test_fp32_weights_move(warned, options):
    messages = [text for texts in warned(torch.float32, **options) for text in texts]
    assert not [text for text in messages if "update changed" in text or "trained weights" in text]
