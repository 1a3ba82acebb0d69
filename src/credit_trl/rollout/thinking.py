"""The thinking of a response and its answer: one definition for tasks, demonstrations and reward functions.

A block of thinking stands between an opening and a closing mark. It is open from the start where the generation prompt
ends with the opening mark, and its first closing mark ends it. The answer is the text outside the blocks; a response
whose last block is not closed has none. A mark in quotes or backticks is the text's own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

ThinkingMarks = tuple[tuple[str, str], ...]  # pairs of opening and closing mark

# Marks of widespread chat templates. The last pair is the harmony format: all channels before the final one.
COMMON_MARKS: ThinkingMarks = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),
)
# Tags that a template or tokenizer declares: `<seed:think>`, `<|START_THINKING|>`, `<|begin_of_thought|>`, …
_DECLARED = re.compile(r"[<\[◁]\|?\w*:?(?:think|thinking|thought|reasoning)\|?[>\]▷]", re.IGNORECASE)
_CLOSING = (
    lambda tag: re.sub(r"^([<\[◁]\|?)", r"\1/", tag),
    lambda tag: tag.replace("START", "END").replace("start", "end").replace("begin", "end"),
)


def thinking_marks(tokenizer: PreTrainedTokenizerBase, chat_template: str | None = None) -> ThinkingMarks:
    """The marks of thinking that a chat template or its tokenizer declares; `<think>` and `</think>` without any.

    Args:
        tokenizer: its added tokens and its own chat template are read.
        chat_template: template in place of the tokenizer's own.
    """
    added = [token.content for token in tokenizer.added_tokens_decoder.values()]
    template = str(chat_template or getattr(tokenizer, "chat_template", None) or "")
    declared = " ".join([template, *added])
    tags = dict.fromkeys(_DECLARED.findall(declared))
    pairs = [(tag, close(tag)) for tag in tags for close in _CLOSING if close(tag) != tag]
    found = [pair for pair in pairs if pair[1] in declared]
    if "<|channel|>" in declared:
        found.append(COMMON_MARKS[-1])
    return tuple(dict.fromkeys(found)) or COMMON_MARKS[:1]


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
    found = [(m.start(), m.end(), m.group()) for m in re.finditer(_any_of(marks), text) if not _is_quoted(text, m)]
    opening, closing = {pair[0] for pair in marks}, {pair[1] for pair in marks}
    if opened is None:
        opened = bool(found) and found[0][2] in closing
    thinking: list[str] = []
    answer: list[str] = []
    is_open = opened
    start = 0
    for begin, end, mark in found:
        if is_open and mark in closing:
            thinking.append(text[start:begin])
        elif not is_open and mark in opening:
            answer.append(text[start:begin])
        elif is_open and not text[start:begin].strip():
            pass  # the response repeats the opening mark of its prompt
        else:
            continue  # part of the thinking or of the answer
        is_open = mark in opening
        start = end
    (thinking if is_open else answer).append(text[start:])
    return "\n".join(part.strip() for part in thinking), None if is_open else "".join(answer)


def answer_part(text: str, marks: ThinkingMarks = COMMON_MARKS, *, opened: bool | None = None) -> str | None:
    """The answer of a response: what follows its thinking, or None where its thinking is not closed.

    See `split_thinking` for the arguments.
    """
    return split_thinking(text, marks, opened=opened)[1]


def opens_thinking(prompt: str, marks: ThinkingMarks) -> bool:
    """Whether a rendered prompt ends with an opening mark."""
    return prompt.rstrip().endswith(tuple(opening for opening, _ in marks))


def decode_with_marks(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[Sequence[int]], marks: ThinkingMarks
) -> list[str]:
    """Texts without special tokens, except those that marks of thinking consist of."""
    added = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    special = added | set(tokenizer.all_special_ids)
    parts = "".join(mark for pair in marks for mark in pair)
    kept = {i for i in special if tokenizer.convert_ids_to_tokens(i) in parts}
    if not kept:
        return tokenizer.batch_decode(ids, skip_special_tokens=True)
    return tokenizer.batch_decode([[i for i in row if i in kept or i not in special] for row in ids])


def mark_thinking(
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]],
    tokenizer: PreTrainedTokenizerBase,
    prompt_of: Callable[[int], str],
    marks: ThinkingMarks,
) -> list[Any]:
    """Completions of one turn in TRL's form, whose text tells thinking from answer.

    The marks that decoding drops because they are special tokens are kept, and the opening mark precedes the text of a
    completion that ends inside the thinking that its prompt opened.

    Args:
        completions: texts or conversations of one assistant message; others are returned as they are.
        completion_ids: sampled ids.
        tokenizer: decodes them.
        prompt_of: renders the prompt of a completion, by its index.
        marks: see `thinking_marks`.
    """
    marked = list(completions)
    texts = decode_with_marks(tokenizer, completion_ids, marks)
    plain = tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
    for index, (completion, text) in enumerate(zip(completions, texts, strict=True)):
        is_message = not isinstance(completion, str)
        if is_message and (len(completion) != 1 or not isinstance(completion[0]["content"], str)):
            continue
        own = completion[0]["content"] if is_message else completion
        opening = next((pair[0] for pair in marks if opens_thinking(prompt_of(index), (pair,))), "")
        if opening and answer_part(text, marks, opened=True) is None:
            own = opening + (text if text != plain[index] else own)
        elif text != plain[index]:
            own = text
        marked[index] = [{**completion[0], "content": own}] if is_message else own
    return marked


def _any_of(marks: ThinkingMarks) -> str:
    return "|".join(re.escape(mark) for pair in marks for mark in pair)


def _is_quoted(text: str, match: re.Match[str]) -> bool:
    before, after = text[match.start() - 1 : match.start()], text[match.end() : match.end() + 1]
    return before == after and before in ("'", '"', "`")
