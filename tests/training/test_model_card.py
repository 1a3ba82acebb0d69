"""The credit's part of a model card, and the card of a push to the hub."""

from __future__ import annotations

from importlib.metadata import version
from types import SimpleNamespace

import pytest
import transformers.trainer


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


def test_pushed_card_names_the_repository(train, monkeypatch, tmp_path):
    uploaded = []

    def upload(**options):
        uploaded.append((options["repo_id"], read_card(trainer)))
        return SimpleNamespace()

    hub = SimpleNamespace(create_repo=lambda name, **_: SimpleNamespace(repo_id=name), upload_folder=upload)
    if hasattr(transformers.trainer, "hf_api"):
        monkeypatch.setattr(transformers.trainer, "hf_api", lambda: hub)
    else:  # transformers 5.6
        for name, function in vars(hub).items():
            monkeypatch.setattr(transformers.trainer, name, function)
    trainer = train(max_steps=1, hub_model_id="user/tiny")
    trainer.push_to_hub(dataset_name="user/sums")
    ((repository, card),) = uploaded
    assert repository == "user/tiny"
    assert "# Model Card for tiny" in card
    assert "| data | user/sums, 12 rows |" in card
    assert "https://huggingface.co/papers/2605.11613" in card
