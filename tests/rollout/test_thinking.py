"""Completions that end inside the thinking that their prompt opened."""

from __future__ import annotations

import pytest

from credit_trl.rollout.thinking import open_unclosed_thinking
from credit_trl.tasks.completions import answer_part, response_text
from tiny import build_tokenizer

DRAFT = "Perhaps ```python\nprint(1)\n```"


@pytest.fixture
def special():
    """A tokenizer whose tags of thinking are special tokens, which decoding removes."""
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    return tokenizer


def opened(tokenizer, text: str, prompt: str, as_message: bool) -> str:
    ids = tokenizer(text)["input_ids"]
    decoded = tokenizer.decode(ids, skip_special_tokens=True)
    completion = [{"role": "assistant", "content": decoded}] if as_message else decoded
    [graded] = open_unclosed_thinking([completion], [ids], tokenizer, lambda _: prompt)
    return response_text(graded)


@pytest.mark.parametrize("as_message", [True, False])
@pytest.mark.parametrize(
    ("prompt", "text", "answer"),
    [
        ("assistant\n<think>\n", DRAFT, ""),
        ("assistant\n<think>", DRAFT, ""),
        ("assistant\n<think>\n", f"{DRAFT}</think>done", "done"),
        ("assistant\n<think>\n\n</think>\n\n", DRAFT, DRAFT),
        ("assistant\n", DRAFT, DRAFT),
        ("Think in <think> tags.\nassistant\n", DRAFT, DRAFT),
    ],
)
def test_unclosed_thinking_of_the_prompt_is_no_answer(tokenizer, prompt, text, answer, as_message):
    assert answer_part(opened(tokenizer, text, prompt, as_message)) == answer


def test_special_tags_that_decoding_removes_close_the_thinking(special):
    assert opened(special, "draft</think>done", "assistant\n<think>\n", True) == "draftdone"
    assert opened(special, "draft", "assistant\n<think>\n", True) == "<think>draft"


def test_completions_of_several_turns_are_kept(tokenizer):
    turns = [{"role": "assistant", "content": "call"}, {"role": "tool", "content": "result"}]
    assert open_unclosed_thinking([turns], [[1]], tokenizer, lambda _: "<think>") == [turns]
