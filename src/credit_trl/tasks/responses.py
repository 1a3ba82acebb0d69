"""Text of a completion as TRL passes it to reward functions, bounded before anything costly reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

MAX_CHARACTERS = 1_000_000  # characters of a response that verifiers read


def response_text(completion: str | Sequence[Mapping[str, Any]]) -> str:
    """Text of a completion: the string itself, or the content of the last assistant message of a conversation.

    Structured content is reduced to its text parts. The text is empty where that message has none. Of a text longer
    than `MAX_CHARACTERS` the middle is replaced by a line that counts the dropped characters.
    """
    if isinstance(completion, str):
        return _bounded(completion)
    if not isinstance(completion, Sequence) or not all(isinstance(turn, Mapping) for turn in completion):
        raise TypeError(f"A completion must be a text or a list of messages, got {type(completion).__name__}.")
    turns = [turn for turn in completion if turn.get("role") == "assistant"]
    content = (turns[-1].get("content") if turns else None) or ""
    if isinstance(content, str):
        return _bounded(content)
    parts = [part for part in content if isinstance(part, Mapping) and part.get("type", "text") == "text"]
    return _bounded("".join(part.get("text") or "" for part in parts))


def _bounded(text: str) -> str:
    if len(text) <= MAX_CHARACTERS:
        return text
    half = MAX_CHARACTERS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters dropped ...]\n{text[-half:]}"
