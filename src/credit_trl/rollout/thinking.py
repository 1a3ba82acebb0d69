"""Thinking and answer of a response: one definition for tasks, demonstrations and reward functions.

A block of thinking stands between an opening and a closing mark. It is open from the start where the generation prompt
ends with an opening mark, and the first closing mark ends it. The answer is the text outside the blocks; a response
whose last block is not closed has none. A mark in quotes or backticks is part of the text.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

ThinkingMarks = tuple[tuple[str, str], ...]  # pairs of opening and closing mark

# Marks of widespread chat templates; in the harmony format, all channels before the final one are thinking.
COMMON_MARKS: ThinkingMarks = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),
    ("<|channel>thought", "<channel|>"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("◁think▷", "◁/think▷"),
)
# Other opening tags that a template or tokenizer may declare: `<thought>`, `<|begin_of_thinking|>`, …
_OPENING_TAG = re.compile(r"[<\[◁]\|?[\w:]*(?:think|thinking|thought|reasoning)\|?[>\]▷]", re.IGNORECASE)


def thinking_marks(tokenizer: PreTrainedTokenizerBase) -> ThinkingMarks:
    """The marks that a tokenizer or its chat template declares; `<think>` and `</think>` without any."""
    added = [token.content for token in tokenizer.added_tokens_decoder.values()]
    declared = " ".join([str(getattr(tokenizer, "chat_template", None)), *added])
    pairs = list(COMMON_MARKS)
    for tag in _OPENING_TAG.findall(declared):
        with_slash = re.sub(r"^([<\[◁]\|?)", r"\1/", tag)
        pairs += [(tag, with_slash), (tag, tag.replace("START", "END").replace("begin", "end"))]
    found = dict.fromkeys(pair for pair in pairs if pair[0] != pair[1] and all(mark in declared for mark in pair))
    return tuple(found) or COMMON_MARKS[:1]


def split_thinking(
    text: str, marks: ThinkingMarks = COMMON_MARKS, *, opened: bool | None = None
) -> tuple[str, str | None]:
    """The thinking of a response, its blocks joined by line breaks, and its answer; None where a block is open.

    Args:
        text: decoded response.
        marks: see `thinking_marks`.
        opened: whether the generation prompt opened a block. None reads it from the text: a closing mark comes before
            any opening one.
    """
    either = "|".join(re.escape(mark) for pair in marks for mark in pair)
    quoted = rf"(?<=(['\"`]))(?:{either})(?=\1)"
    found = [mark for mark in re.finditer(f"{quoted}|{either}", text) if mark[1] is None]
    closing = {pair[1] for pair in marks}
    is_open = opened if opened is not None else bool(found) and found[0].group() in closing
    blocks: list[str] = []
    answer: list[str] = []
    start = 0
    last_end = 0  # of the mark before
    for mark in found:
        # The response repeats its prompt's opening mark. Only texts between neighbours are sliced, for linear time.
        is_repeated = is_open and not blocks and start == last_end and not text[start : mark.start()].strip()
        if is_open == (mark.group() in closing) or is_repeated:
            (blocks if is_open else answer).append(text[start : mark.start()])
            is_open = mark.group() not in closing
            start = mark.end()
        last_end = mark.end()
    (blocks if is_open else answer).append(text[start:])
    thinking = "\n".join(block.strip() for block in blocks if block.strip())
    return thinking, None if is_open else "".join(answer)


def opening_mark(prompt: str, marks: ThinkingMarks) -> str:
    """The opening mark that a rendered prompt ends with; empty without one."""
    return next((opening for opening, _ in marks if prompt.rstrip().endswith(opening)), "")


def decode_with_marks(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[Sequence[int]], marks: ThinkingMarks
) -> list[str]:
    """Texts without special tokens, except those that the marks consist of."""
    added = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    special = added | set(tokenizer.all_special_ids)
    in_marks = " ".join(mark for pair in marks for mark in pair)
    dropped = {i for i in special if tokenizer.convert_ids_to_tokens(i) not in in_marks}
    return tokenizer.batch_decode([[i for i in row if i not in dropped] for row in ids])


def mark_thinking(
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]],
    tokenizer: PreTrainedTokenizerBase,
    prompt_of: Callable[[int], str],
    marks: ThinkingMarks,
) -> list[Any]:
    """Completions of one turn in TRL's form whose text tells thinking from answer.

    Marks that are special tokens, which TRL's decoding drops, are kept. A completion that ends inside the thinking
    that its prompt opened begins with the opening mark; `prompt_of` renders the prompt of a completion, by its index.
    Conversations of more than one message are returned as they are.
    """
    marked = list(completions)
    for index, text in enumerate(decode_with_marks(tokenizer, completion_ids, marks)):
        completion = completions[index]
        is_text = isinstance(completion, str)
        own = completion if is_text or len(completion) != 1 else completion[0]["content"]
        if not isinstance(own, str):
            continue
        plain = own if text == own else tokenizer.decode(completion_ids[index], skip_special_tokens=True)
        content = own if text == plain else text
        if split_thinking(content, marks, opened=True)[1] is None:
            content = opening_mark(prompt_of(index), marks) + content
        if content != own:
            marked[index] = content if is_text else [{**completion[0], "content": content}]
    return marked
