"""Token classes, over which a summary sums credit.

The default classifies the word that a token is part of. A task's module can define its own function
`token_classes(response_ids, tokenizer) -> list[str]` (`task_classes`).
"""

import inspect
import re
import sys
from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerBase

from credit_trl.contexts.prompts import user_text
from credit_trl.lab.analysis.responses import Rollout
from credit_trl.lab.analysis.tokentext import NEWLINE, TAB, TokenText
from credit_trl.tasks.registry import Task

# (response, its tokens) → class of each token.
Classify = Callable[[Rollout, Sequence[TokenText]], list[str]]

_WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)*")
# Bytes and hidden characters as `tokentext` spells them out.
_SPELLED_OUT = re.compile(r"⟨([0-9A-F]{2}|U\+[0-9A-F]{4,6}|id \d+)⟩")


def default_classes(response: Rollout, tokens: Sequence[TokenText]) -> list[str]:
    """Class of each token: prompt word, other word, number, punctuation, white space or control.

    A token with letters has the class of the word that it begins or continues: a prompt word occurs in the last user
    turn, ignoring case. Bytes of characters that span tokens are punctuation.
    """
    prompt_words = {word.lower() for word in _WORD.findall(user_text(response.prompt))}
    text = _SPELLED_OUT.sub(lambda m: "\ufffd" * len(m[0]), "".join(token.text for token in tokens))
    words: dict[int, str] = {}  # at each place of the text
    for match in _WORD.finditer(text):
        words |= dict.fromkeys(range(match.start(), match.end()), match[0].lower())
    classes = []
    start = 0
    for token in tokens:
        places = range(start, start + len(token.text))
        start = places.stop
        longest = max((words.get(place, "") for place in places), key=len, default="")
        if longest and not token.special:
            classes.append("prompt word" if longest in prompt_words else "other word")
        else:
            classes.append(_class_of(token))
    return classes


def task_classes(task: Task, tokenizer: PreTrainedTokenizerBase) -> Classify:
    """The task's own `token_classes` if its module defines it, otherwise `default_classes`."""
    module = sys.modules.get(getattr(inspect.unwrap(task.build), "__module__", ""))
    classes_of = getattr(module, "token_classes", None)
    if classes_of is None:
        return default_classes
    return lambda response, tokens: classes_of(list(response.token_ids), tokenizer)


def _class_of(token: TokenText) -> str:
    if token.special:
        return "control"
    if not token.text.strip(f"{NEWLINE}{TAB} \n"):
        return "white space"
    is_number = any(c.isdigit() for c in _SPELLED_OUT.sub("", token.text))
    return "number" if is_number else "punctuation"
