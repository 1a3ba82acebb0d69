"""The credit's part of a model card, and the card of a push to the hub."""

from __future__ import annotations

from importlib.metadata import version

import pytest


@pytest.fixture
def train(make_trainer):
    def run(*, facts=(), **options):
        trainer = make_trainer(**options)
        trainer.run_log.facts.update(facts)
        trainer.train()
        return trainer

    return run


def read_card(trainer) -> str:
    with open(f"{trainer.args.output_dir}/README.md", encoding="utf-8") as file:
        return file.read()


def test_card_states_method_data_and_versions(train):
    trainer = train(facts={"task": "sums"}.items(), contrastive_coef=0.07, max_reprompt_len=900)
    trainer.create_model_card(model_name="tiny")
    card = read_card(trainer)
    assert "https://huggingface.co/papers/2605.11613" in card
    for row in (
        "| `contrastive_coef` | 0.07 |",
        "| `max_reprompt_len` | 900 |",
        "| data | sums, 12 rows |",
        "| steps | 2 |",
    ):
        assert row in card, row
    assert "`teacher_prompt`" not in card
    assert f"- credit_trl: {version('credit-trl')}\n- TRL: {version('trl')}\n" in card
    assert "None" not in card
