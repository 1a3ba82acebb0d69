from __future__ import annotations

import pytest

from credit_trl.tasks.completions import answer_part, response_text


@pytest.mark.parametrize(
    ("completion", "text"),
    [
        ("plain", "plain"),
        ("", ""),
        ([{"role": "assistant", "content": "a"}], "a"),
        ([{"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}], "ab"),
        ([{"role": "assistant", "content": [{"type": "image"}, {"type": "text", "text": "b"}]}], "b"),
        (
            [
                {"role": "assistant", "content": "call", "tool_calls": []},
                {"role": "tool", "content": "result"},
                {"role": "assistant", "content": "final"},
            ],
            "final",
        ),
        ([{"role": "assistant", "content": "call"}, {"role": "tool", "content": "result"}], "call"),
        ([{"role": "assistant", "content": None, "tool_calls": [{}]}], ""),
        ([{"role": "tool", "content": "result"}], ""),
        ([], ""),
    ],
)
def test_response_is_the_last_assistant_text(completion, text):
    assert response_text(completion) == text


@pytest.mark.parametrize("completion", [None, 3, ["a text in a list"], {"role": "assistant"}, b"bytes"])
def test_other_completion_types_raise(completion):
    with pytest.raises(TypeError, match="a text or a list of messages"):
        response_text(completion)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("", ""),
        ("answer", "answer"),
        ("<think>draft</think>answer", "answer"),
        ("draft</think>answer", "answer"),  # the generation prompt opened the block
        ("<think>one</think>two<think>three</think>\nanswer", "\nanswer"),
        ("<think>draft", ""),
        ("before<think>draft", ""),
        ("<think>one</think>two<think>three", ""),
        ("<think>draft</think>", ""),
    ],
)
def test_answer_is_the_text_after_the_thinking(text, answer):
    assert answer_part(text) == answer
