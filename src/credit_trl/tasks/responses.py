"""Text of a completion as TRL passes it to reward functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def response_text(completion: str | Sequence[Mapping[str, Any]]) -> str:
    """Text of a completion: the string itself, or the content of the last assistant message of a conversation.

    Structured content is reduced to its text parts. The text is empty where that message has none.
    """
    if isinstance(completion, str):
        return completion
    if not isinstance(completion, Sequence) or not all(isinstance(turn, Mapping) for turn in completion):
        raise TypeError(f"A completion must be a text or a list of messages, got {type(completion).__name__}.")
    turns = [turn for turn in completion if turn.get("role") == "assistant"]
    content = (turns[-1].get("content") if turns else None) or ""
    if isinstance(content, str):
        return content
    parts = [part for part in content if isinstance(part, Mapping) and part.get("type", "text") == "text"]
    return "".join(part.get("text") or "" for part in parts)


def answer_part(text: str) -> str:
    """Text after the thinking: after the last `</think>`, all without that tag, "" if a `<think>` is not closed."""
    answer = text.rpartition("</think>")[2]
    return "" if "<think>" in answer else answer
