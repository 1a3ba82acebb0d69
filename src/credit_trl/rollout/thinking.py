"""Thinking that the generation prompt opens, with `<think>` at its end, and that a completion does not close.

The text of such a completion, which was cut off inside its thinking, has no tag that tells it from an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

OPEN, CLOSE = "<think>", "</think>"


def opens_thinking(prompt: str) -> bool:
    """Whether a rendered prompt ends inside a block of thinking."""
    return prompt.rstrip().endswith(OPEN)


def closes_thinking(tokenizer: PreTrainedTokenizerBase, completion_ids: Sequence[int]) -> bool:
    """Whether a completion has the end of a block of thinking, also as a special token, which its text lacks."""
    return CLOSE in tokenizer.decode(list(completion_ids), skip_special_tokens=False)


def open_unclosed_thinking(
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]],
    tokenizer: PreTrainedTokenizerBase,
    prompt_of: Callable[[int], str],
) -> list[Any]:
    """Completions of one turn in TRL's form, with `<think>` before the text of those that end inside their thinking.

    `prompt_of` renders the prompt of a completion, by its index.
    """
    opened = list(completions)
    for index, (completion, ids) in enumerate(zip(completions, completion_ids, strict=True)):
        if closes_thinking(tokenizer, ids) or not opens_thinking(prompt_of(index)):
            continue
        if isinstance(completion, str):
            opened[index] = OPEN + completion
        elif len(completion) == 1 and isinstance(completion[0]["content"], str):
            opened[index] = [{**completion[0], "content": OPEN + completion[0]["content"]}]
    return opened
