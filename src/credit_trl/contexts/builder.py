"""Token ids of the teacher's prompt (x, z) and of the contrast prompts (x'_k, z).

z is a demonstration (a successful rollout of the same group) and feedback. Both are untrusted text: control tokens in
them are encoded as plain text, so that they cannot end a turn or begin one, and the chat template renders slots in
their place. The prompt around them is tokenised as it is for the student.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils import get_json_schema

from credit_trl.config import CreditConfig
from credit_trl.contexts.contrast import Contrast, find_source
from credit_trl.contexts.privileged import PrivilegedContext
from credit_trl.contexts.prompts import Prompt, Render, chat_renderer, user_text, with_user_text
from credit_trl.contexts.tokens import TokenContexts
from credit_trl.rollout.thinking import thinking_marks

# Parts of z, in the order in which they are cut.
_PARTS = ("feedback", "demonstration")
_MAX_MISSES = 32  # contrasts that do not fit beside z before a sample has none
# Characters of untrusted text for each token of the budget; the middle of a longer text is never tokenised.
_CHARACTERS_PER_TOKEN = 8
_MAX_RENDERED = 4096  # prompts whose rendered text is kept


@dataclass(frozen=True)
class SlottedText:
    """Trusted text with slots for parts of z."""

    pieces: list[str]  # trusted text and, at odd indices, the part whose text comes there
    first: bool  # whether the tokenizer adds its special tokens, as for the student's plain prompts
    controls: list[int]  # the control tokens of the trusted text


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
        slots: for each part of z the text that stands for it, which no prompt contains.

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
        self.slots = {part: f"\x02{secrets.token_hex(16)}\x03" for part in _PARTS}
        self._rendered: dict[str, SlottedText] = {}
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
        wanted = self.config.contrastive_count if teacher is not None else 0
        drawn = (
            self._encode_contrast(contrast, fitted, tools) for contrast in islice(contrasts, wanted + _MAX_MISSES)
        )
        fitting = islice((ids for ids in drawn if ids is not None), wanted)
        return TokenContexts(
            teacher,
            list(islice(cycle(fitting), wanted)),
            privileged=fitted,
            cut=fitted != privileged,
            feedback_dropped=privileged.feedback is not None and fitted.feedback is None,
        )

    def _encode_contrast(self, contrast: Contrast, z: PrivilegedContext, tools: list[Any] | None) -> list[int] | None:
        """Ids of one contrast prompt; None where it does not fit."""
        encode = partial(self.encode, contrast.prompt, tools=tools)
        if contrast.privileged is None:
            ids = encode(z)
            return ids if len(ids) <= self.config.max_reprompt_len else None
        if z.turns or contrast.privileged.turns:
            raise ValueError(
                f"`contrastive_source={self.config.contrastive_source!r}` exchanges the whole privileged context, and "
                "feedback on single turns belongs to one rollout. Use a source of prompts, such as 'batch', or return "
                "no `Verdict.turn_feedback`."
            )
        return self.fit(encode, contrast.privileged)[0]

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
        fitted = replace(whole, **{part: self._shortened(getattr(whole, part)) for part in _PARTS})
        ids = encode(fitted) if whole else []
        for part in _PARTS:
            cut = 0
            while len(ids) > budget and getattr(fitted, part) is not None:
                cut += len(ids) - budget
                fitted = replace(fitted, **{part: self._shortened(getattr(whole, part), cut)})
                ids = encode(fitted)
        return (ids, fitted) if fitted and len(ids) <= budget else (None, PrivilegedContext())

    def _shortened(self, text: str | None, cut: int = 0) -> str | None:
        """The text with a mark in place of its middle, of `cut` tokens less; None where nothing remains.

        It keeps at most `_CHARACTERS_PER_TOKEN` characters for each token of the budget.
        """
        if text is None:
            return None
        half = _CHARACTERS_PER_TOKEN * self.config.max_reprompt_len // 2
        begin, end = (text, "") if len(text) <= 2 * half else (text[:half], text[-half:])
        if cut:
            ids = self.tokenize(_encodable(begin + end), plain=True)
            kept = len(ids) - cut - len(self.tokenize(_with_mark("", len(text), ""), plain=True))
            if kept < 2:
                return None
            # A character that is cut in two decodes to the replacement character.
            begin = self.tokenizer.decode(ids[: kept - kept // 2]).rstrip("\ufffd")
            end = self.tokenizer.decode(ids[len(ids) - kept // 2 :]).lstrip("\ufffd")
        dropped = len(text) - len(begin) - len(end)
        return _with_mark(begin, dropped, end) if dropped > 0 else text

    def encode(self, prompt: Prompt, z: PrivilegedContext, tools: list[Any] | None = None) -> list[int]:
        """Token ids of one context, of any length. Without feedback and demonstration it is the student's prompt."""
        return self.fill(self._render(prompt, [part for part in _PARTS if getattr(z, part) is not None], tools), z)

    def student_text(self, prompt: Prompt, tools: list[Any] | None = None) -> str:
        """The prompt as the student reads it, with the generation prompt."""
        return self._render(prompt, [], tools).pieces[0]

    def _render(self, prompt: Prompt, parts: list[str], tools: list[Any] | None) -> SlottedText:
        """The prompt with slots for parts of z. The chat template renders it once for all samples that have them."""
        if tools:
            tools = [tool if isinstance(tool, dict) else get_json_schema(tool) for tool in tools]
        key = json.dumps([prompt, parts, tools], default=str)
        if key not in self._rendered:
            if len(self._rendered) >= _MAX_RENDERED:
                self._rendered.clear()
            self._rendered[key] = self._render_anew(prompt, parts, tools)
        return self._rendered[key]

    def _render_anew(self, prompt: Prompt, parts: list[str], tools: list[dict[str, Any]] | None) -> SlottedText:
        is_text = isinstance(prompt, str)
        config = self.config
        solution = feedback = ""
        if "demonstration" in parts:
            solution = config.solution_template.format(successful_previous_attempt=self.slots["demonstration"])
        if "feedback" in parts:
            feedback = config.feedback_template.format(feedback_raw=self.slots["feedback"])
        if is_text:
            text = f"{(solution + feedback).strip()}\n\n{prompt}" if parts else prompt
        else:
            if parts:
                turn = config.reprompt_template.format(prompt=user_text(prompt), solution=solution, feedback=feedback)
                prompt = with_user_text(prompt, turn)
            text = self.render(prompt, tools=tools)
        slotted = self.slotted(text, first=is_text)
        if not set(parts) <= {*slotted.pieces[1::2]}:
            raise ValueError(
                "The chat template changes or drops the text of the last user turn, where the teacher reads "
                f"demonstration and feedback; it renders …{text[-100:]!r}. Use a `chat_template` that renders "
                "`message['content']` as it is."
            )
        return slotted

    def slotted(self, text: str, *, first: bool = False) -> SlottedText:
        """Trusted text, split at its slots."""
        parts = {slot: part for part, slot in self.slots.items()}
        pieces = [parts.get(piece, piece) for piece in re.split(f"({'|'.join(parts)})", text)]
        letters = "".join("x" if i % 2 else piece for i, piece in enumerate(pieces))
        return SlottedText(pieces, first, self._controls(self.tokenize(letters, first=first)))

    def fill(self, slotted: SlottedText, z: PrivilegedContext) -> list[int]:
        """Token ids of a text with the parts of z in its slots, which add no control token."""
        texts = [_encodable(getattr(z, piece) or "") if i % 2 else piece for i, piece in enumerate(slotted.pieces)]
        ids = self.tokenize("".join(texts), first=slotted.first)
        if self._controls(ids) == slotted.controls:
            return ids
        # z contains the text of a control token: encode it as plain text, separately from the text around it.
        ids = []
        for i, text in enumerate(texts):
            ids += self.tokenize(text, first=slotted.first and i == 0, plain=i % 2 == 1)
        if self._controls(ids) != slotted.controls:
            raise ValueError(
                "A demonstration or feedback encodes to control tokens although `split_special_tokens=True`: the "
                f"tokenizer {type(self.tokenizer).__name__} cannot encode untrusted text safely. Use another one."
            )
        return ids

    def tokenize(self, text: str, *, first: bool = False, plain: bool = False) -> list[int]:
        """Token ids; `first` adds special tokens as to the student's plain prompts, `plain` reads none in the text."""
        options = {"split_special_tokens": True} if plain else {}
        return self.tokenizer(text, add_special_tokens=first, **options)["input_ids"]

    def _controls(self, ids: list[int]) -> list[int]:
        return [i for i in ids if i in self._control_ids]


def _with_mark(begin: str, count: int, end: str) -> str:
    return f"{begin}\n[… {count} characters cut …]\n{end}"


def _encodable(text: str) -> str:
    """The text with lone surrogates replaced."""
    return text.encode("utf-8", "replace").decode()
