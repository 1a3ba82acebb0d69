"""Token ids of the teacher's prompt (x, z) and of the contrast prompts (x'_k, z).

z is a demonstration (a successful rollout of the same group) and feedback. Both are untrusted text, and are encoded as
plain text, apart from the text around them: no token spans both, and no control token in z ends a turn or begins one.
The chat template renders slots in their place, once for all samples that share a prompt. The prompt is tokenised as it
is for the student.
"""

import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import chain, cycle, islice
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils import get_json_schema

from credit_trl.config import CreditConfig
from credit_trl.contexts.contrast import Contrast, find_source
from credit_trl.contexts.images import ImageReader, PromptImages
from credit_trl.contexts.prompts import Prompt, Render, chat_renderer, images_of, parts_of, with_user_text
from credit_trl.contexts.tokens import PrivilegedContext, TokenContexts
from credit_trl.rollout.batch import content_key
from credit_trl.rollout.thinking import thinking_marks

# Ids of trusted text, and names of the parts of z that stand between them.
SlottedIds = list[list[int] | str]

# Parts of z, in the order in which they are cut.
_PARTS = ("feedback", "demonstration")
_CUT = "\n[… cut …]\n"  # stands for the middle of a text that is too long
_MAX_MISSES = 32  # contrasts that do not fit beside z before a sample has none
# Characters of untrusted text for each token of the budget; the middle of a longer text is never tokenised.
_CHARACTERS_PER_TOKEN = 8
_MAX_KEPT = 1024  # prompts and texts whose ids are kept


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
        reader: of a multimodal model, whose processor adds the tokenizer's special tokens, such as BOS, to the
            student's prompts, unless the rendered prompt begins with BOS; None for a text model.

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
        reader: ImageReader | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.reader = reader
        self.config = config
        self.render = render or chat_renderer(tokenizer)
        self.source = find_source(config.contrastive_source) if config.contrasts else None
        self.marks = thinking_marks(tokenizer)
        self.slots = {part: f"\x02{secrets.token_hex(16)}\x03" for part in _PARTS}
        self.place = f"\x02{secrets.token_hex(16)}\x03"  # of the prompt's own text
        self._rendered: dict[str, str] = {}
        self.slotted = lru_cache(_MAX_KEPT)(self.slotted)
        self._tokenize_inside = lru_cache(_MAX_KEPT)(self._tokenize_inside)  # siblings share demonstrations
        self._adds_space = self.tokenize("\nx") != self.tokenize("\n") + self.tokenize("x")
        special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        placeholders = reader.placeholder_ids if reader is not None else ()
        self._control_ids = frozenset({*special, *tokenizer.all_special_ids, *eos_token_ids, *placeholders})

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
            contrasts: in the order of the draw; the first C that fit are taken. With fewer they repeat.
            tools: tools that the chat template lists.

        Raises:
            ValueError: the chat template changes or drops the text of the user turn, the prompt has none, or a
                contrast exchanges z where z has feedback on single turns.
        """
        z: dict[str, list[int]] = {}
        if self.config.teacher_prompt == "student":
            privileged = fitted = PrivilegedContext()
            teacher = self.encode(prompt, fitted, tools)
        else:
            teacher, z, fitted = self.fit(lambda parts: self._slotted_prompt(prompt, tools, parts), privileged)

        def encode_contrast(contrast: Contrast) -> list[int] | None:
            if contrast.privileged is None:
                ids = fill(self._slotted_prompt(contrast.prompt, tools, [*z]), z)
                return ids if len(ids) <= self.config.max_reprompt_len else None
            if fitted.turns or contrast.privileged.turns:
                raise ValueError(
                    f"`contrastive_source={self.config.contrastive_source!r}` exchanges z, and feedback on turns is "
                    "that of one rollout. Use a source of prompts, or return no `Verdict.turn_feedback`."
                )
            return self.fit(lambda parts: self._slotted_prompt(contrast.prompt, tools, parts), contrast.privileged)[0]

        count = self.config.contrastive_count if teacher is not None else 0
        drawn = ((encode_contrast(one), one.prompt) for one in islice(contrasts, count + _MAX_MISSES))
        fitting = islice(((ids, self.read_images(other)) for ids, other in drawn if ids is not None), count)
        encoded = list(islice(cycle(fitting), count))
        return TokenContexts(
            teacher,
            [ids for ids, _ in encoded],
            images=[self.read_images(prompt), *(images for _, images in encoded)],
            privileged=fitted,
            cut=fitted != privileged,
            feedback_dropped=privileged.feedback is not None and fitted.feedback is None,
        )

    def fit(
        self, slotted: Callable[[list[str]], SlottedIds], z: PrivilegedContext, budget: int | None = None
    ) -> tuple[list[int] | None, dict[str, list[int]], PrivilegedContext]:
        """Ids of a text with as much of z as fits, ids of the parts of z, and that z; None and nothing without any.

        Args:
            slotted: the text with slots for the given parts of z.
            budget: maximum number of tokens; None for `max_reprompt_len`.
        """
        budget = self.config.max_reprompt_len if budget is None else budget
        z = replace(z, **{part: self._without_long_middle(getattr(z, part)) for part in _PARTS})
        parts = self._encode_parts(z)
        while z:
            around = slotted([*parts])
            ids = fill(around, parts)
            if len(ids) <= budget:
                return ids, parts, z
            if not parts:  # feedback on turns only
                break
            part = next(iter(parts))
            shorter = self._without_middle(parts.pop(part), len(ids) - budget)
            z = replace(z, **{part: None if shorter is None else self.tokenizer.decode(shorter)})
            if shorter is not None:
                parts = {part: shorter} | parts
                return fill(around, parts), parts, z
        return None, {}, PrivilegedContext()

    def _without_long_middle(self, text: str | None) -> str | None:
        half = _CHARACTERS_PER_TOKEN * self.config.max_reprompt_len // 2
        return text if text is None or len(text) <= 2 * half else text[:half] + _CUT + text[-half:]

    def _without_middle(self, ids: list[int], excess: int) -> list[int] | None:
        """Ids of untrusted text with `excess` fewer tokens; None where nothing remains beside the mark."""
        mark = self._tokenize_inside(_CUT)
        kept = len(ids) - excess - len(mark)
        return None if kept < 2 else ids[: kept - kept // 2] + mark + ids[-(kept // 2) :]

    def encode(self, prompt: Prompt, z: PrivilegedContext, tools: list[Any] | None = None) -> list[int]:
        """Token ids of one context, of any length. Without feedback and demonstration it is the student's prompt."""
        parts = self._encode_parts(z)
        return fill(self._slotted_prompt(prompt, tools, [*parts]), parts)

    def _encode_parts(self, z: PrivilegedContext) -> dict[str, list[int]]:
        """Ids of the parts that z has, as plain text; lone surrogates are replaced."""
        parts = {}
        for part in _PARTS:
            text = getattr(z, part)
            if text is None:
                continue
            ids = self._tokenize_inside(text.encode("utf-8", "replace").decode(), split_special_tokens=True)
            if not self._control_ids.isdisjoint(ids):
                raise ValueError(
                    f"The {part} encodes to control tokens although `split_special_tokens=True`: the tokenizer "
                    f"{type(self.tokenizer).__name__} cannot encode untrusted text safely. Use another one."
                )
            parts[part] = ids
        return parts

    def read_images(self, prompt: Prompt) -> PromptImages | None:
        """The images of a prompt as the model reads them; None without any.

        Raises:
            ValueError: the processor, the chat template or the configuration does not support them, or the prompt
                has a video.
        """
        if self.reader is None:
            return None
        self.student_text(prompt)  # refuses videos, and other numbers of placeholders
        images = self.reader.read(images_of(prompt))
        if images is not None and self.config.packed:
            raise ValueError("`packed=True` does not support images: placeholders are equal. Set `packed=False`.")
        return images

    def unexpanded(self, prompts: Sequence[Prompt], tools: Sequence[Any]) -> dict[tuple[int, ...], list[int]]:
        """The student's ids of prompts with images, to those with one placeholder for each, as vLLM reads them.

        Args:
            tools: of each prompt; empty without any.
        """
        found = {}
        for prompt, own in zip(prompts, tools or [None] * len(prompts), strict=True):
            if images_of(prompt):
                ids = self.encode(prompt, PrivilegedContext(), own)
                found[tuple(ids)] = self.reader.encode(self.render(prompt, tools=own or None))
        return found

    def forget_texts(self) -> None:
        """Render prompts anew from now on, since a chat template may write the date."""
        self._rendered.clear()

    def student_text(self, prompt: Prompt, tools: list[Any] | None = None) -> str:
        """The prompt as the student reads it, with the generation prompt."""
        return self._render(prompt, tools, [])

    def _slotted_prompt(self, prompt: Prompt, tools: list[Any] | None, parts: list[str]) -> SlottedIds:
        """Ids of the prompt with slots for parts of z."""
        text = self._render(prompt, tools, parts)
        has_bos = self.tokenizer.bos_token is not None and text.startswith(self.tokenizer.bos_token)
        return self.slotted(text, first=isinstance(prompt, str) or (self.reader is not None and not has_bos))

    def _render(self, prompt: Prompt, tools: list[Any] | None, parts: list[str]) -> str:
        """The prompt with slots for parts of z, rendered once for all samples that have them."""
        tools = [tool if isinstance(tool, dict) else get_json_schema(tool) for tool in tools or ()] or None
        key = json.dumps([prompt, tools, sorted(parts)], default=content_key)
        if key not in self._rendered:
            if len(self._rendered) >= _MAX_KEPT:
                self._rendered.clear()
            self._rendered[key] = self._render_anew(prompt, tools, parts)
        return self._rendered[key]

    def _render_anew(self, prompt: Prompt, tools: list[dict[str, Any]] | None, parts: list[str]) -> str:
        config = self.config
        solution = feedback = ""
        if "demonstration" in parts:
            solution = config.solution_template.format(successful_previous_attempt=self.slots["demonstration"])
        if "feedback" in parts:
            feedback = config.feedback_template.format(feedback_raw=self.slots["feedback"])
        if isinstance(prompt, str):
            return f"{(solution + feedback).strip()}\n\n{prompt}" if parts else prompt
        if parts:
            turn = config.reprompt_template.format(prompt=self.place, solution=solution, feedback=feedback)
            prompt = with_user_text(prompt, turn, self.place)
        text = self.render(prompt, tools=tools)
        if self.reader is not None:
            if parts_of(prompt, "video"):
                raise ValueError(
                    "Distillation does not support prompts with videos. Use some of the frames as images."
                )
            text = self.reader.expand(text, images_of(prompt))
        if not all(self.slots[part] in text for part in parts):
            raise ValueError(
                "The chat template changes or drops the last user turn, where the teacher reads feedback; it renders "
                f"…{text[-100:]!r}. Use a `chat_template` that renders `message['content']` as it is."
            )
        return text

    def slotted(self, text: str, *, first: bool = False) -> SlottedIds:
        """Ids of trusted text that has slots; `first` as in `tokenize`."""
        parts = {slot: part for part, slot in self.slots.items()}
        start, *pieces = re.split(f"({'|'.join(parts)})", text)
        if not pieces:
            return [self.tokenize(start, first=first)]
        *inside, end = pieces
        opened = self._before_word(partial(self.tokenize, first=first), start)
        return [
            opened,
            *(parts.get(one) or self._before_word(self._tokenize_inside, one) for one in inside),
            self._tokenize_inside(end),
        ]

    def _before_word(self, encode: Callable[[str], list[int]], text: str) -> list[int]:
        """Ids of text as it is encoded before a word: byte-level tokenizers split its last whitespace there."""
        ids = encode(f"{text}x")
        word = self._tokenize_inside("x")
        return ids[: -len(word)] if text[-1:].isspace() and ids[-len(word) :] == word else encode(text)

    def tokenize(self, text: str, *, first: bool = False) -> list[int]:
        """Ids of trusted text; `first` adds the tokenizer's special tokens, as for the student's plain prompts."""
        return self.tokenizer(text, add_special_tokens=first)["input_ids"]

    def _tokenize_inside(self, text: str, **options: Any) -> list[int]:
        """Ids of text inside another, without the space that some tokenizers put before a text."""
        encode = partial(self.tokenizer, add_special_tokens=False, **options)
        if self._adds_space:
            start = encode("\n")["input_ids"]
            ids = encode(f"\n{text}")["input_ids"]
            if ids[: len(start)] == start:
                return ids[len(start) :]
        return encode(text)["input_ids"]


def fill(slotted: SlottedIds, parts: Mapping[str, list[int]]) -> list[int]:
    """Ids of a text with parts of z in its slots."""
    return [*chain.from_iterable(parts[piece] if isinstance(piece, str) else piece for piece in slotted)]
