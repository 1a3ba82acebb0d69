"""Warm-up on the form of tool choice: rows, scrambled feedback, loss, cache."""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest
import torch

from credit_trl.cli import tool_choice_base
from credit_trl.cli.tool_choice_base import WarmUp, WarmUpRow, describe_base, make_rows, train_rows, warmed_up_base
from credit_trl.config import CreditConfig
from credit_trl.tasks.tool_choice import TOOLS, verify

SETTINGS = WarmUp(steps=2, batch_size=4, form_rows=12, feedback_rows=64, opening_tokens=4)


@pytest.fixture
def config(tmp_path):
    return CreditConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none", contrastive_coef=0.0)


@pytest.fixture
def rows(make_model, tokenizer, config, monkeypatch):
    texts = iter(["Yes, it is B. And more", "no end of a sentence", "call(it). Yes.", "Right!\nmore"] * 16)
    monkeypatch.setattr(
        tool_choice_base, "_sample", lambda model, tokenizer, prompts, *rest: [next(texts) for _ in prompts]
    )
    return make_rows(make_model(), tokenizer, config, SETTINGS)


def called(response: str) -> str:
    return re.findall(r"(\w+)\(", response)[-1]


def test_form_rows_hold_each_tool_once_with_its_call(rows):
    forms, _ = rows
    assert sorted(called(row.response) for row in forms) == sorted(TOOLS)
    assert not any("feedback" in row.prompt for row in forms)


def test_feedback_rows_follow_the_feedback_and_not_the_request(rows):
    _, read = rows
    assert len(read) == SETTINGS.feedback_rows
    for row in read:
        tools = dict(re.findall(r"([A-D]) (\w+)", row.prompt))
        stated = re.search(r"The correct call is (\w+)\(", row.prompt)
        letter = re.search(r"The right tool is ([A-D])\.", row.prompt)
        assert called(row.response) == (stated[1] if stated else tools[letter[1]])
    letters = Counter(re.findall(r"The right tool is ([A-D])", "".join(row.prompt for row in read)))
    assert set(letters) == set("ABCD")
    requests = [next(tool for tool in TOOLS if f" {tool}" in row.prompt) for row in read]
    agreement = sum(a == called(row.response) for a, row in zip(requests, read, strict=True)) / len(read)
    assert agreement < 0.6


def test_short_first_sentences_of_the_model_open_the_response(rows):
    _, read = rows
    openings = [row.response.rpartition("\n")[0] for row in read[:4]]
    assert openings == ["Yes, it is B.", "", "", "Right!"]


def test_loss_is_that_of_the_response_and_its_end(make_model, tokenizer):
    model = make_model().eval()
    row = WarmUpRow("<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n", "call(Emma)")
    longer = WarmUpRow(row.prompt * 2, "weather(Oslo)")
    with torch.no_grad():
        found = tool_choice_base._response_loss(model, tokenizer, [row, longer])
        losses = []
        for one in (row, longer):
            prompt = tokenizer(one.prompt, add_special_tokens=False)["input_ids"]
            whole = tokenizer(one.prompt + one.response + tokenizer.eos_token, add_special_tokens=False)["input_ids"]
            logps = model(torch.tensor([whole])).logits[0].log_softmax(-1)
            losses += [-logps[i - 1, whole[i]].item() for i in range(len(prompt), len(whole))]
    assert found.item() == pytest.approx(sum(losses) / len(losses), rel=0.02)  # bf16


def test_training_lowers_the_loss_on_its_rows(make_model, tokenizer, rows):
    model = make_model()
    before = tool_choice_base._response_loss(model, tokenizer, rows[0]).item()
    train_rows(model, tokenizer, *rows, WarmUp(steps=8, batch_size=8, learning_rate=1e-2))
    assert tool_choice_base._response_loss(model, tokenizer, rows[0]).item() < before - 0.5


def test_base_is_made_once_per_settings(make_model, tokenizer, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    make_model().save_pretrained(tmp_path / "original")
    tokenizer.save_pretrained(tmp_path / "original")
    monkeypatch.setattr(tool_choice_base, "ANSWER_TOKENS", 4)
    first = warmed_up_base(str(tmp_path / "original"), SETTINGS)
    monkeypatch.setattr(tool_choice_base, "_make_base", None)
    assert warmed_up_base(str(tmp_path / "original"), SETTINGS) == first
    assert SETTINGS.digest("a") != SETTINGS.digest("b") != WarmUp().digest("b")
    accuracy = json.loads((first / "warm_up.json").read_text())["accuracy"]
    assert set(accuracy) == {"none", "letter", "stated"}
    assert "of the held-out requests without feedback" in describe_base(first)
    with pytest.raises(ValueError, match="at least 1 step of 2 rows"):
        WarmUp(steps=0)


def test_feedback_of_the_accuracy_is_that_of_the_verifier():
    answer = json.dumps({"option": "C", "tool": "call", "argument": "Emma"})
    assert "The right tool is C." in verify("", answer).feedback
