"""The credit's part of a model card, and the card of a push to the hub."""

from __future__ import annotations

import re
from importlib.metadata import version
from types import SimpleNamespace

import pytest
import transformers.trainer
from peft import LoraConfig

from credit_trl import CreditTrainer
from tiny import length_verdicts


@pytest.fixture
def train(make_model, make_config, tokenizer, dataset, tmp_path):
    def run(model=None, *, peft_config=None, facts=(), **options):
        config = make_config(output_dir=str(tmp_path / "run"), **options)
        trainer = CreditTrainer(
            model or make_model(),
            length_verdicts,
            config,
            dataset,
            processing_class=tokenizer,
            peft_config=peft_config,
        )
        trainer.run_log.facts.update(facts)
        trainer.train()
        return trainer

    return run


def read_card(trainer) -> str:
    with open(f"{trainer.args.output_dir}/README.md", encoding="utf-8") as file:
        return file.read()


def test_card_states_method_data_metrics_and_versions(train):
    trainer = train(facts={"task": "sums"}.items(), contrastive_coef=0.07, contrastive_count=2, distillation_topk=9)
    trainer.create_model_card(model_name="tiny")
    card = read_card(trainer)
    assert "https://huggingface.co/papers/2605.11613" in card
    for row in (
        "| form of the target | `contrastive_form=subtract` |",
        "| λ | 0.07 |",
        "| C | 2, `contrastive_source=batch` |",
        "| support | teacher_topk, K = 9 |",
        "| teacher | ema, rate 0.01 |",
        "| privileged context | feedback and demonstration |",
        "| data | sums, 12 rows |",
        "| steps | 2 |",
    ):
        assert row in card, row
    assert "further options" not in card
    assert f"- credit_trl: {version('credit-trl')}\n- TRL: {version('trl')}\n" in card
    first, last = trainer.state.log_history[:2]
    for label, name in {"S_t, nats (training)": "credit/s_mean", "reward (training)": "reward"}.items():
        assert f"| {label} | {first[name]:.4g} (step 1) | {last[name]:.4g} (step 2) |" in card
    assert "None" not in card


@pytest.mark.parametrize("peft_config", [None, LoraConfig(r=2, target_modules="all-linear")], ids=["full", "lora"])
def test_loading_code_of_the_card_loads_the_model(train, make_model, tokenizer, tmp_path, peft_config):
    make_model().save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    trainer = train(str(tmp_path / "base"), peft_config=peft_config, max_steps=1)
    trainer.save_model()
    trainer.create_model_card()
    code = re.search(r"### Load\n\n```python\n(.*?)```", read_card(trainer), re.DOTALL)[1]
    names = {}
    exec(code, names)
    assert type(names["model"]).__name__ == ("Qwen3ForCausalLM" if peft_config is None else "PeftModelForCausalLM")
    assert len(names["tokenizer"]) == len(tokenizer)


def test_card_of_grpo_states_no_contrast(train):
    trainer = train(distillation_weight=0.0, max_steps=1)
    trainer.create_model_card(model_name="tiny")
    assert "| λ |" not in (card := read_card(trainer))
    assert "| data | 12 rows |" in card


def test_card_states_another_use_of_the_credit(train):
    trainer = train(credit_use="route", contrastive_swap="hint", max_steps=1)
    trainer.create_model_card(model_name="tiny")
    assert "| further options | `credit_use=route`, `contrastive_swap=hint` |" in read_card(trainer)


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
    assert 'AutoModelForCausalLM.from_pretrained("user/tiny", dtype="auto")' in card
    assert "| data | user/sums, 12 rows |" in card
    assert "https://huggingface.co/papers/2605.11613" in card
