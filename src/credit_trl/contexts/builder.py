"""Token ids of the teacher's prompt (x, z) and of the contrast prompts (x'_k, z).

z is a demonstration (a successful rollout of the same group) and feedback. Both are untrusted text: control tokens in
them are encoded as plain text, so that they cannot end a turn or begin one. The prompt around them is tokenised as it
is for the student.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from typing import Any

from transformers import PreTrainedTokenizerBase

from credit_trl.config import CreditConfig
from credit_trl.contexts.contrast import Contrast, find_source
from credit_trl.contexts.privileged import PrivilegedContext
from credit_trl.contexts.prompts import Prompt, Render, chat_renderer, user_text, with_user_text
from credit_trl.contexts.tokens import TokenContexts
from credit_trl.rollout.thinking import thinking_marks

_MARK = re.compile("(\x02[0-9a-f]{32}\x03)")  # stands for untrusted text in a rendered prompt
_MAX_MISSES = 32  # contrasts that do not fit beside z before a sample has none
# Characters of untrusted text for each token of the budget; the middle of a longer text is never tokenised.
_CHARACTERS_PER_TOKEN = 8


class ContextBuilder:
    """Encodes prompts with privileged contexts as token ids, within a budget.

    z stands in the last user turn, in the words of the configuration's templates. A plain-text prompt is continued by
    the model, so z stands before it: the sections of `solution_template` and `feedback_template`, an empty line, and
    the student's prompt; `reprompt_template` is not used.

    Args:
        tokenizer: tokenizer of the student.
        config: templates, C and `max_reprompt_len`.
        eos_token_ids: ids that end a turn besides the tokenizer's special tokens.
        render: see `chat_renderer`; None renders with the tokenizer's own chat template.

    Attributes:
        source: the contrast source; None where λ = 0.
        marks: see `thinking_marks`.

    Raises:
        ValueError: there is no such contrast source.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        config: CreditConfig,
        eos_token_ids: Sequence[int] = (),
        render: Render | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.config = config
        self.render = render or chat_renderer(tokenizer)
        self.source = find_source(config.contrastive_source) if config.contrasts else None
        self.marks = thinking_marks(tokenizer)
        special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._control_ids = frozenset(special | set(tokenizer.all_special_ids) | set(eos_token_ids))

    def build(
        self,
        prompt: Prompt,
        privileged: PrivilegedContext,
        contrasts: Iterable[Contrast] = (),
        *,
        tools: list[Any] | None = None,
    ) -> TokenContexts:
        """The teacher's prompt (x, z) and C contrast prompts (x'_k, z) of one sample.

        z is fitted to x: where the prompt is longer than `max_reprompt_len`, the middle of the feedback is cut, then
        the feedback is dropped, then the same is done to the demonstration. z' of a contrast is fitted in the same
        way. A contrast with the same z that does not fit is replaced by the next one, at most 32 times.

        Args:
            prompt: x, conversational or plain text.
            privileged: z.
            contrasts: in the order of the draw; the first C that fit are taken. With fewer they repeat.
            tools: tools that the chat template lists.

        Raises:
            ValueError: the chat template changes or drops the text of the user turn, the prompt has none, or a
                contrast exchanges z where z has feedback on single turns.
        """
        encode = partial(self.encode, prompt, tools=tools)
        if self.config.teacher_prompt == "student":
            privileged = fitted = PrivilegedContext()
            teacher = encode(fitted)
        else:
            teacher, fitted = self.fit(encode, privileged)
        return TokenContexts(
            teacher,
            self._fit_contrasts(contrasts, fitted, tools) if teacher is not None else [],
            privileged=fitted,
            cut=fitted != privileged,
            feedback_dropped=privileged.feedback is not None and fitted.feedback is None,
        )

    def fit(
        self, encode: Callable[[PrivilegedContext], list[int]], whole: PrivilegedContext, budget: int | None = None
    ) -> tuple[list[int] | None, PrivilegedContext]:
        """Ids of as much of z as fits, and that z; None and an empty z where nothing of it fits.

        Args:
            encode: ids of a context with a given z.
            whole: z.
            budget: maximum number of tokens; None for `max_reprompt_len`.
        """
        budget = self.config.max_reprompt_len if budget is None else budget
        texts = {name: getattr(whole, name) for name in ("feedback", "demonstration")}
        fitted = replace(whole, **{name: text and _with_cut(text, *self._ends(text)) for name, text in texts.items()})
        for name, text in texts.items():
            cut = 0
            while getattr(fitted, name) is not None:
                ids = encode(fitted)
                if len(ids) <= budget:
                    return ids, fitted
                cut += len(ids) - budget
                fitted = replace(fitted, **{name: self._cut_middle(text, cut)})
        ids = encode(fitted) if fitted else None  # feedback on turns only
        return (ids, fitted) if ids is not None and len(ids) <= budget else (None, PrivilegedContext())

    def _fit_contrasts(
        self, contrasts: Iterable[Contrast], privileged: PrivilegedContext, tools: list[Any] | None
    ) -> list[list[int]]:
        fitting: list[list[int]] = []
        misses = 0
        for contrast in contrasts:
            z = contrast.privileged
            if z is not None and (privileged.turns or z.turns):
                raise ValueError(
                    f"`contrastive_source={self.config.contrastive_source!r}` exchanges the whole privileged context, "
                    "and feedback on single turns belongs to one rollout. Use a source of prompts, such as 'batch', "
                    "or return no `Verdict.turn_feedback`."
                )
            encode = partial(self.encode, contrast.prompt, tools=tools)
            ids = encode(privileged) if z is None else self.fit(encode, z)[0]
            if ids and len(ids) <= self.config.max_reprompt_len:
                fitting.append(ids)
            else:
                misses += 1
            if len(fitting) == self.config.contrastive_count or misses > _MAX_MISSES:
                break
        return list(islice(cycle(fitting), self.config.contrastive_count))

    def encode(self, prompt: Prompt, privileged: PrivilegedContext, tools: list[Any] | None = None) -> list[int]:
        """Token ids of one context, of any length.

        The chat template renders marks in place of demonstration and feedback, so that their text cannot change how
        it renders.
        """
        is_text = isinstance(prompt, str)
        texts = {"demonstration": privileged.demonstration, "feedback": privileged.feedback}
        marks = {name: f"\x02{secrets.token_hex(16)}\x03" for name, text in texts.items() if text is not None}
        if not marks:  # feedback on turns only: the opening prompt is the student's
            return self.encode_pieces([(self.student_text(prompt, tools), True)], first=is_text)
        solution = feedback = ""
        if "demonstration" in marks:
            solution = self.config.solution_template.format(successful_previous_attempt=marks["demonstration"])
        if "feedback" in marks:
            feedback = self.config.feedback_template.format(feedback_raw=marks["feedback"])
        if is_text:
            text = turn = f"{(solution + feedback).strip()}\n\n{prompt}"
        else:
            turn = self.config.reprompt_template.format(prompt=user_text(prompt), solution=solution, feedback=feedback)
            text = self.render(with_user_text(prompt, turn), tools=tools)
        parts = [part for part in _MARK.split(text) if part]
        untrusted = {mark: texts[name] for name, mark in marks.items()}
        if not {mark for mark in untrusted if mark in turn} <= set(parts):
            raise ValueError(
                "The chat template changes or drops the text of the last user turn, where the teacher reads "
                f"demonstration and feedback; it renders …{text[-100:]!r}. Use a `chat_template` that renders "
                "`message['content']` as it is."
            )
        return self.encode_pieces(
            [(untrusted.get(part, part), part not in untrusted) for part in parts], first=is_text
        )

    def student_text(self, prompt: Prompt, tools: list[Any] | None = None) -> str:
        """The prompt as the student reads it, with the generation prompt."""
        return prompt if isinstance(prompt, str) else self.render(prompt, tools=tools)

    def encode_pieces(self, pieces: list[tuple[str, bool]], *, first: bool = False) -> list[int]:
        """Token ids of (text, trusted) pieces, where untrusted text adds no control token; see `tokenize`."""
        pieces = [(text if trusted else _encodable(text), trusted) for text, trusted in pieces]
        ids = self.tokenize("".join(text for text, _ in pieces), first=first)
        # A letter in place of each untrusted piece leaves the control tokens of the template.
        scaffold = "".join(text if trusted else "x" for text, trusted in pieces)
        expected = self._controls(self.tokenize(scaffold, first=first))
        if self._controls(ids) == expected:
            return ids
        # z contains the text of a control token: encode it as plain text, separately from the text around it.
        ids = []
        for position, (text, trusted) in enumerate(pieces):
            ids += self.tokenize(text, first=first and position == 0) if trusted else self._tokenize_plain(text)
        if self._controls(ids) != expected:
            raise ValueError(
                "A demonstration or feedback encodes to control tokens although `split_special_tokens=True`: the "
                f"tokenizer {type(self.tokenizer).__name__} cannot encode untrusted text safely. Use another one."
            )
        return ids

    def tokenize(self, text: str, *, first: bool = False) -> list[int]:
        """Token ids; with `first` the tokenizer adds its special tokens, as for the student's plain prompts."""
        return self.tokenizer(text, add_special_tokens=first)["input_ids"]

    def _tokenize_plain(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]

    def _controls(self, ids: list[int]) -> list[int]:
        return [i for i in ids if i in self._control_ids]

    def _ends(self, text: str) -> tuple[str, str]:
        """Beginning and end of a text, together at most `_CHARACTERS_PER_TOKEN` for each token of the budget."""
        half = _CHARACTERS_PER_TOKEN * self.config.max_reprompt_len // 2
        return (text, "") if len(text) <= 2 * half else (text[:half], text[-half:])

    def _cut_middle(self, text: str, excess: int) -> str | None:
        """The text with a mark in place of `excess` tokens and those of the mark; None where nothing remains."""
        ids = self._tokenize_plain(_encodable("".join(self._ends(text))))
        kept = len(ids) - excess - len(self._tokenize_plain(_with_cut(text, "", "")))
        if kept < 2:
            return None
        # A character that is cut in two decodes to the replacement character.
        begin = self.tokenizer.decode(ids[: kept - kept // 2]).rstrip("\ufffd")
        end = self.tokenizer.decode(ids[len(ids) - kept // 2 :]).lstrip("\ufffd")
        shorter = _with_cut(text, begin, end)
        return shorter if len(self._tokenize_plain(_encodable(shorter))) < len(ids) else None


def _with_cut(text: str, begin: str, end: str) -> str:
    """Beginning and end of a text with a mark that states the number of characters between them, if any."""
    count = len(text) - len(begin) - len(end)
    return f"{begin}\n[… {count} characters cut …]\n{end}" if count > 0 else text


def _encodable(text: str) -> str:
    """The text with lone surrogates replaced."""
    return text.encode("utf-8", "replace").decode()
