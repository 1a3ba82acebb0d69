"""Thinking and answer of a response: one definition for tasks, demonstrations and reward functions.

A block of thinking stands between an opening and a closing mark. It is open from the start where the generation prompt
ends with an opening mark, and the first closing mark ends it. The answer is the text outside the blocks; a response
whose last block is not closed has none. These marks are part of the text: one in quotes or backticks, and, outside of
thinking, one in a fenced block of code, one after a quote, an opening one between two words of a sentence, and every
closing one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
# Other tags that a template or tokenizer may declare: `<thought>`, `<|begin_of_thinking|>`, …
_TAG = re.compile(r"[<\[◁]\|?/?[\w:]*(?:think|thinking|thought|reasoning)\|?[>\]▷]", re.IGNORECASE)

_run_marks: ContextVar[ThinkingMarks | None] = ContextVar("run_marks", default=None)


def thinking_marks(processor: Any, template: str | None = None) -> ThinkingMarks:
    """The marks that a tokenizer or chat template declares; `<think>` and `</think>` without any.

    Args:
        processor: tokenizer, or processor of a multimodal model, whose template and tokenizer count.
        template: of the run, where another one than theirs.
    """
    tokenizer = getattr(processor, "tokenizer", processor)
    templates = [template, *(getattr(owner, "chat_template", None) for owner in (processor, tokenizer))]
    added = [token.content for token in tokenizer.added_tokens_decoder.values()]
    declared = " ".join([*map(str, templates), *added])
    pairs = list(COMMON_MARKS)
    for tag in _TAG.findall(declared):
        pairs += _pairs_of(tag)
    marks = []
    for pair in dict.fromkeys(pairs):
        opening, closing = pair
        if opening in declared and closing in declared:
            marks.append(pair)
    return tuple(marks) or COMMON_MARKS[:1]


def _pairs_of(tag: str) -> list[tuple[str, str]]:
    """Pairs of marks of which a tag may be one."""
    bracket, slash, name = re.fullmatch(r"([<\[◁]\|?)(/?)(.*)", tag, re.DOTALL).groups()
    opening = re.sub("(?<![a-z])end(?![a-z])", "begin", name.replace("END", "START"))
    closing = opening.replace("START", "END").replace("begin", "end")
    pairs = [(bracket + opening, f"{bracket}/{opening}")]
    if closing != opening and not slash:
        pairs.append((bracket + opening, bracket + closing))
    return pairs


@contextmanager
def use_marks(marks: ThinkingMarks | None) -> Iterator[None]:
    """Make the marks of a run's tokenizer those of `split_thinking` in this context."""
    token = _run_marks.set(marks)
    try:
        yield
    finally:
        _run_marks.reset(token)


def marks_in_use() -> ThinkingMarks | None:
    """The marks of the run for which this code grades; None outside of one."""
    return _run_marks.get()


def set_marks(marks: ThinkingMarks | None) -> None:
    """Make the marks of a run's tokenizer those of `split_thinking` in this process."""
    _run_marks.set(marks)


def split_thinking(
    text: str, marks: ThinkingMarks | None = None, *, opened: bool | None = None
) -> tuple[str, str | None]:
    """The thinking of a response, its blocks joined by line breaks, and its answer; None where a block is open.

    Args:
        text: decoded response.
        marks: see `thinking_marks`. None takes those of the run that calls the verifier. Outside of a run, as in a
            notebook, they are the common ones, and a tag like `<thinking>` with which the text begins, or whose
            closing one comes before any other.
        opened: whether the generation prompt opened a block. None reads it from the text: a closing mark comes before
            any opening one, also before one that is part of the text.
    """
    marks = marks or _run_marks.get() or _marks_of_text(text)
    matches = _find_marks(text, marks)
    closing = {pair[1] for pair in marks}
    is_open = _begins_in_thinking(matches, closing) if opened is None else opened
    blocks: list[str] = []
    answer: list[str] = []
    parts = {True: blocks, False: answer}
    start = 0
    last_end = 0  # of the mark before
    in_code = False
    for mark in matches:
        if mark["text"] is not None:
            continue
        if mark["mark"] is None:  # a fence
            in_code = not (is_open or in_code)
            continue
        is_closing = mark["mark"] in closing
        # The response repeats its prompt's opening mark. Only texts between neighbours are sliced, for linear time.
        is_repeated = is_open and not blocks and start == last_end and not text[start : mark.start()].strip()
        if (is_open == is_closing or is_repeated) and not in_code:
            parts[is_open].append(text[start : mark.start()])
            is_open = not is_closing
            start = mark.end()
        last_end = mark.end()
    parts[is_open].append(text[start:])
    thinking = "\n".join(filter(None, map(str.strip, blocks)))
    return thinking, None if is_open else "".join(answer)


def _begins_in_thinking(matches: Sequence[re.Match[str]], closing: Set[str]) -> bool:
    """Whether a closing mark comes before any opening one, also before one that is part of the text."""
    for match in matches:
        if match["mark"]:
            return match["mark"] in closing
        if match["text"] and match["text"] not in closing:
            return False
    return False


def _find_marks(text: str, marks: ThinkingMarks) -> list[re.Match[str]]:
    """The marks of a text, as group `mark`, or `text` where they are part of it, and the fences of blocks of code."""
    openings = "|".join(re.escape(opening) for opening, _ in marks)
    either = "|".join(map(re.escape, chain.from_iterable(marks)))
    quoted = rf"(?<=(?P<quote>['\"`]))(?:{either})(?=(?P=quote))"
    in_sentence = rf"(?:(?<=['\"`])|(?<=\S[ \t])(?=(?:{openings})[ \t.,;:!?)]))(?:{openings})"
    return list(re.finditer(rf"(?P<text>{quoted}|{in_sentence})|`{{3,}}|(?P<mark>{either})", text))


def _marks_of_text(text: str) -> ThinkingMarks:
    """The marks of a text whose tokenizer is unknown."""
    tag = _TAG.search(text)
    if tag is None:
        return COMMON_MARKS
    pairs = _pairs_of(tag[0])
    openings = dict(pairs)
    if tag[0] in openings and text[: tag.start()].strip():
        return COMMON_MARKS
    return tuple(dict.fromkeys([*COMMON_MARKS, *pairs]))


def opening_mark(prompt: str, marks: ThinkingMarks) -> str:
    """The opening mark that a rendered prompt ends with; empty without one."""
    for opening, _ in marks:
        if prompt.rstrip().endswith(opening):
            return opening
    return ""


def decode_with_marks(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[Sequence[int]], marks: ThinkingMarks
) -> list[str]:
    """Texts without special tokens, except those that the marks consist of."""
    special = set(tokenizer.all_special_ids)
    special |= {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    in_marks = " ".join(chain.from_iterable(marks))
    dropped = {i for i in special if tokenizer.convert_ids_to_tokens(i) not in in_marks}
    rows = []
    for row in ids:
        rows.append([i for i in row if i not in dropped])
    return tokenizer.batch_decode(rows)


def mark_thinking(
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]],
    tokenizer: PreTrainedTokenizerBase,
    prompt_of: Callable[[int], str],
    marks: ThinkingMarks,
) -> list[Any]:
    """Completions of one turn in TRL's form whose text tells thinking from answer.

    Marks that are special tokens, which TRL's decoding drops, are kept. Where a completion alone would be read in
    another way than behind its prompt, it begins with the opening mark, as one that ends inside the thinking that its
    prompt opened, or with an empty block, as an answer of which a closing mark is a part. `prompt_of` renders the
    prompt of a completion, by its index.
    Conversations of more than one message are returned as they are.
    """
    marked = list(completions)
    for index, text in enumerate(decode_with_marks(tokenizer, completion_ids, marks)):
        completion = completions[index]
        message = {} if isinstance(completion, str) or len(completion) != 1 else completion[0]
        answer = message.get("content", completion)
        if not isinstance(answer, str):
            continue
        content = text
        if text != answer and text == tokenizer.decode(completion_ids[index], skip_special_tokens=True):
            content = answer  # without a mark that is a special token
        behind_opening = split_thinking(content, marks, opened=True)
        alone = split_thinking(content, marks, opened=False)
        if behind_opening != alone:
            opening = opening_mark(prompt_of(index), marks)
            behind_prompt = behind_opening if opening else alone
            if split_thinking(content, marks) != behind_prompt:
                content = (opening or "".join(marks[0])) + content
        if content != answer:
            marked[index] = [{**message, "content": content}] if message else content
    return marked
