"""Token classes, over which a summary sums credit.

The default classifies the word that a token is part of. A task's module can define its own function
`token_classes(response_ids, tokenizer) -> list[str]` (`task_classes`).
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerBase

from credit_trl.lab.analysis.responses import Rollout
from credit_trl.lab.analysis.tokentext import NEWLINE, TAB, TokenText
from credit_trl.tasks.registry import Task

# (response, its tokens) → class of each token.
Classify = Callable[[Rollout, Sequence[TokenText]], list[str]]

CLASSES = ("prompt word", "other word", "number", "punctuation", "white space", "control")

_WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)*")
# Bytes and hidden characters as `tokentext` spells them out.
_FIRST_BYTE, _LATER_BYTE = re.compile(r"⟨[C-F][0-9A-F]⟩"), re.compile(r"⟨[89AB][0-9A-F]⟩")
_SPELLED_OUT = re.compile(r"⟨([0-9A-F]{2}|U\+[0-9A-F]{4,6}|id \d+)⟩")


def default_classes(response: Rollout, tokens: Sequence[TokenText]) -> list[str]:
    """Class of each token, one of `CLASSES`.

    Control tokens and white space come first; any other token has the class of the longest word in it, and a part of a
    word that of the whole word. A prompt word occurs in the last user turn, ignoring case.
    """
    plain = list(map(_plain, tokens))
    starts, text = [], ""
    for piece in plain:
        starts.append(len(text))
        text += piece
    known = {word.lower() for word in _WORD.findall(response.problem)}
    kinds: list[list[tuple[int, str]]] = [[] for _ in tokens]
    owner = [index for index, piece in enumerate(plain) for _ in piece]
    for match in _WORD.finditer(text):
        kind = "prompt word" if match[0].lower() in known else "other word"
        for index in dict.fromkeys(owner[match.start() : match.end()]):
            begin, end = starts[index], starts[index] + len(plain[index])
            kinds[index].append((min(end, match.end()) - max(begin, match.start()), kind))
    classes: list[str] = []
    for token, piece, words in zip(tokens, plain, kinds, strict=True):
        is_rest = token.character is not None and not piece
        classes.append(classes[-1] if is_rest else _class_of(token, piece, words))
    return classes


def task_classes(task: Task, tokenizer: PreTrainedTokenizerBase) -> Classify:
    """The task's own `token_classes` if its module defines it, otherwise `default_classes`."""
    module = sys.modules.get(getattr(inspect.unwrap(task.build), "__module__", ""))
    own = getattr(module, "token_classes", None)
    if own is None:
        return default_classes
    return lambda response, tokens: own(list(response.token_ids), tokenizer)


def _plain(token: TokenText) -> str:
    """Text of a token. The first byte of a character that spans tokens is read as it, the others as nothing."""
    text = token.text.replace(f"{NEWLINE}\n", "\n").replace(TAB, "\t")
    if token.character is not None:
        text = _LATER_BYTE.sub("", _FIRST_BYTE.sub(token.character, text))
    return _SPELLED_OUT.sub("\ufffd", text)


def _class_of(token: TokenText, piece: str, words: list[tuple[int, str]]) -> str:
    if token.special:
        return "control"
    if not piece.strip():
        return "white space"
    if words:
        return max(words)[1]
    return "number" if any(c.isdigit() for c in piece) else "punctuation"
