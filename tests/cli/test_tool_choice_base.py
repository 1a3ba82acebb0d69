"""Warm-up on the form of tool choice: rows, scrambled feedback, loss, cache."""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest
import torch

from credit_trl.cli import tool_choice_base
from credit_trl.cli.tool_choice_base import RowSource, WarmUp, WarmUpRow, describe_base, train_rows, warmed_up_base
from credit_trl.config import CreditConfig
from credit_trl.tasks.tool_choice import TOOLS, wordings_of

SETTINGS = WarmUp(steps=2, form_rows=12, opening_share=0.5, opening_prompts=4, opening_tokens=4)


@pytest.fixture
def config(tmp_path):
    return CreditConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none", contrastive_coef=0.0)


@pytest.fixture
def source(make_model, tokenizer, config, monkeypatch):
    texts = ["Yes, it is B. And more", "no end of a sentence", "call(it). Yes.", "Right!\nmore"]
    monkeypatch.setattr(tool_choice_base, "_sample", lambda *arguments: texts)
    return RowSource(make_model(), tokenizer, config, SETTINGS)


def called(response: str) -> str:
    return re.findall(r"(\w+)\(", response)[-1]


def named(prompt: str) -> str:
    """The tool that the feedback in a prompt names."""
    if stated := re.search(r"The correct call is (\w+)\(", prompt):
        return stated[1]
    return dict(re.findall(r"([A-D]) (\w+)", prompt))[re.search(r"The right tool is ([A-D])\.", prompt)[1]]


def suited(row: WarmUpRow) -> str:
    """The tool that suits the request in a row."""
    wordings = {wording.split("{}")[0]: tool for tool in TOOLS for wording in wordings_of(tool, "train")}
    turn = row.prompt.split("user\n")[1]
    return wordings[max((start for start in wordings if turn.startswith(start)), key=len)]


def test_half_of_the_form_rows_have_the_right_call(source):
    suits = [suited(row) == called(row.response) for row in source.forms]
    assert len(suits) == 2 * SETTINGS.form_rows
    assert sorted(called(row.response) for row in source.forms[: SETTINGS.form_rows]) == sorted(TOOLS)
    assert all(suits[: SETTINGS.form_rows])
    assert sum(suits[SETTINGS.form_rows :]) < SETTINGS.form_rows
    assert not any("feedback" in row.prompt or "right tool" in row.prompt for row in source.forms)


def test_step_has_the_set_number_of_rows_of_each_kind(source):
    rows = source.draw()
    found = {kind: len(several) for kind, several in rows.items()}
    assert found == {
        "form": SETTINGS.form_batch,
        "look-up": SETTINGS.lookup_batch,
        "feedback": SETTINGS.feedback_batch,
    }


def test_responses_follow_the_feedback_whatever_was_asked(source):
    rows = [row for _ in range(20) for kind in ("look-up", "feedback") for row in source.draw()[kind]]
    assert all(called(row.response) == named(row.prompt) for row in rows)
    letters = Counter(re.findall(r"The right tool is ([A-D])", "".join(row.prompt for row in rows)))
    assert set(letters) == set("ABCD")
    assert any("The correct call is" in row.prompt for row in rows)


@pytest.mark.parametrize("kind", ["lookup", "feedback"])
def test_arguments_are_in_the_prompt_and_hardly_ever_repeated(source, kind):
    rows = [getattr(source, kind)() for _ in range(100)]
    arguments = [re.search(r"\((.*)\)", row.response)[1] for row in rows]
    assert all(argument in row.prompt for argument, row in zip(arguments, rows, strict=True))
    assert len(set(arguments)) > 80


def test_feedback_is_scrambled(source):
    """The request suits the tool that the feedback names no more often than chance."""
    rows = [source.feedback() for _ in range(300)]
    assert 0.1 < sum(suited(row) == called(row.response) for row in rows) / len(rows) < 0.4


def test_short_first_sentences_of_the_model_open_the_response(source):
    assert [row.response.rpartition("\n")[0] for row in source.opened] == ["Yes, it is B.", "Right!"]
    drawn = [row.response for _ in range(20) for row in source.draw()["feedback"]]
    assert 0.3 < sum("\n" in response for response in drawn) / len(drawn) < 0.7


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
            row_losses = [-logps[i - 1, whole[i]].item() for i in range(len(prompt), len(whole))]
            losses.append(sum(row_losses) / len(row_losses))
    assert found.item() == pytest.approx(sum(losses) / len(losses), rel=0.02)  # bf16


def test_training_lowers_the_loss_on_its_rows(make_model, tokenizer, source):
    model = make_model()
    rows = [row for several in source.draw().values() for row in several]
    before = tool_choice_base._response_loss(model, tokenizer, rows).item()
    train_rows(model, tokenizer, source, WarmUp(steps=8, learning_rate=1e-2))
    assert tool_choice_base._response_loss(model, tokenizer, rows).item() < before - 0.5


def test_base_is_made_once_per_settings(make_model, tokenizer, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    make_model().save_pretrained(tmp_path / "original")
    tokenizer.save_pretrained(tmp_path / "original")
    monkeypatch.setattr(tool_choice_base, "ANSWER_TOKENS", 4)
    first = warmed_up_base(str(tmp_path / "original"), SETTINGS)
    monkeypatch.setattr(tool_choice_base, "_make_base", None)
    assert warmed_up_base(str(tmp_path / "original"), SETTINGS) == first
    (tmp_path / "original").rename(tmp_path / "moved")
    assert warmed_up_base(str(tmp_path / "moved"), SETTINGS) == first
    make_model(seed=1).save_pretrained(tmp_path / "moved")
    assert SETTINGS.digest(str(tmp_path / "moved")) != first.name
    assert SETTINGS.digest("a") != SETTINGS.digest("b") != WarmUp().digest("b")
    digests = set()
    for fast in (True, False):
        monkeypatch.setattr(tool_choice_base, "has_fast_bf16", lambda device, fast=fast: fast)
        digests.add(SETTINGS.digest("a"))
    assert len(digests) == 2
    accuracy = json.loads((first / "warm_up.json").read_text())["accuracy"]
    assert set(accuracy) == {"none", "letter", "stated"}
    assert "of the held-out requests without feedback" in describe_base(first)
    with pytest.raises(ValueError, match="at least one step and one row of each kind"):
        WarmUp(steps=0)


@pytest.mark.parametrize(("seconds", "fast"), [(1.0, True), (2.9, True), (27.0, False)])
def test_bf16_is_used_where_its_products_are_fast(monkeypatch, seconds, fast):
    clock = iter([0.0, 1.0] * 8 + [0.0, seconds] * 8)
    monkeypatch.setattr(tool_choice_base.time, "process_time", lambda: next(clock))
    assert tool_choice_base.has_fast_bf16.__wrapped__("cpu") is fast
    assert tool_choice_base.has_fast_bf16.__wrapped__("cuda")


def test_slow_bf16_turns_mixed_precision_off(monkeypatch):
    for fast, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(tool_choice_base, "has_fast_bf16", lambda device, fast=fast: fast)
        with tool_choice_base.mixed_precision("cpu"):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype
