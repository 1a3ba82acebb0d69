"""Mistakes in the trainer's arguments are one clear error with the value and the fix, before anything is generated.

Mistakes in options stand in tests/test_config.py, in command lines in tests/cli/test_errors.py, in what reward
functions return in tests/rollout/test_verdict.py.
"""

from __future__ import annotations

import re

import pytest
from datasets import Dataset

from credit_trl import CreditTrainer
from tiny import build_model, length_verdicts


def questions(**columns) -> Dataset:
    rows = {"prompt": [[{"role": "user", "content": f"{i}+1="}] for i in range(12)], "answer": ["1"] * 12}
    return Dataset.from_dict({**rows, **{name: [value] * 12 for name, value in columns.items()}})


# Arguments -> a part of the error with the value, and one with the fix.
TRAINERS = {
    "columns without a question": (
        lambda: {"train_dataset": questions().remove_columns("prompt")},
        "its columns are answer",
        "dataset.rename_column(..., 'prompt')",
    ),
    "messages without a role": (
        lambda: {"train_dataset": questions(prompt=[{"content": "x"}])},
        "[None]",
        "role 'user'",
    ),
    "images": (lambda: {"train_dataset": questions(image="x")}, "images", "`distillation_weight=0`"),
    "images in messages": (
        lambda: {"train_dataset": questions(prompt=[{"role": "user", "content": [{"type": "image", "text": None}]}])},
        "images",
        "`distillation_weight=0`",
    ),
    "contrasts of a stream": (
        lambda: {"train_dataset": questions().to_iterable_dataset(), "options": {"contrastive_source": "dataset"}},
        "contrastive_source='dataset'",
        "contrastive_source='batch'",
    ),
    "evaluation without a question": (
        lambda: {"eval_dataset": {"harder": questions().remove_columns("prompt")}},
        "`eval_dataset['harder']`",
        "rename_column",
    ),
    "column of another argument": (
        lambda: {"train_dataset": questions(completions="x")},
        "`completions`",
        "rename_column",
    ),
    "evaluation without the answer": (
        lambda: {"eval_dataset": questions().remove_columns("answer")},
        "`eval_dataset`",
        "Add the column",
    ),
    "reward of a column that is missing": (
        lambda: {"reward_funcs": lambda completions, solution, **kwargs: [1.0]},
        "`solution`",
        "Add the column",
    ),
    "no reward": (lambda: {"reward_funcs": None}, "No reward source", "reward_funcs"),
    "misspelt source": (lambda: {"options": {"contrastive_source": "bacth"}}, "'bacth'", "'module:function'"),
    "support above the vocabulary": (
        lambda: {"options": {"distillation_topk": 10**6}},
        "got 1000000",
        "vocabulary size",
    ),
}


@pytest.fixture
def build(make_config, tokenizer, monkeypatch):
    """A function that builds a trainer with a mistake; a rollout fails the test."""

    def generate(self, prompts):
        pytest.fail("a completion was generated")

    monkeypatch.setattr(CreditTrainer, "_generate", generate)

    def make(options=(), model=None, reward_funcs=length_verdicts, **arguments):
        config = make_config(**dict(options))
        arguments = {"processing_class": tokenizer, "train_dataset": questions(), **arguments}
        return CreditTrainer(model or build_model(tokenizer), reward_funcs, config, **arguments)

    return make


@pytest.mark.parametrize("mistake", TRAINERS)
def test_mistake_in_data_model_or_reward_is_refused(build, mistake):
    arguments, value, fix = TRAINERS[mistake]
    with pytest.raises((ValueError, TypeError)) as error:
        build(**arguments())
    assert re.search("|".join(map(re.escape, value.split("|"))), str(error.value))
    assert fix in str(error.value)
