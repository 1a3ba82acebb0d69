"""Token ids of the teacher's prompt (x, z) and of the contrast prompts (x'_k, z).

z is a demonstration (a successful rollout of the same group) and feedback. Both are untrusted text, and are encoded as
plain text, apart from the text around them. The chat template renders slots in their place, once for all samples that
share a prompt. The prompt is tokenised as it is for the student.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import cycle, islice
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase
from transformers.utils import get_json_schema

from credit_trl.config import CreditConfig
from credit_trl.contexts.contrast import Contrast, find_source
from credit_trl.contexts.encode import MAX_CACHED, PARTS, SlottedIds, TextEncoder, fill, placeholder
from credit_trl.contexts.images import ImageReader, PromptImages
from credit_trl.contexts.prompts import Prompt, Render, chat_renderer, images_of, parts_of, with_user_text
from credit_trl.contexts.tokens import PrivilegedContext, TokenContexts
from credit_trl.rollout.batch import content_key
from credit_trl.rollout.thinking import ThinkingMarks, thinking_marks

_CUT = "\n[… cut …]\n"  # stands for the middle of a text that is too long
_MAX_MISSES = 32  # contrasts that do not fit beside z before a sample has none
# Characters of untrusted text for each token of the budget; the middle of a longer text is never tokenised.
_CHARACTERS_PER_TOKEN = 8


class FittedText(NamedTuple):
    """A text with as much of z as fits the budget."""

    ids: list[int] | None  # None where nothing of z fits
    parts: dict[str, list[int]]  # ids of the parts of z
    privileged: PrivilegedContext  # the z that fits


class EncodedContrast(NamedTuple):
    """One contrast prompt (x'_k, z)."""

    ids: list[int]
    images: PromptImages | None


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
        marks: see `thinking_marks`; None for those that the tokenizer declares.

    Attributes:
        source: the contrast source; None where λ = 0.
        encoder: encodes trusted text with slots, and the parts of z.

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
        marks: ThinkingMarks | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.reader = reader
        self.config = config
        self.render = render or chat_renderer(tokenizer)
        self.source = find_source(config.contrastive_source) if config.contrasts else None
        self.marks = marks or thinking_marks(tokenizer)
        placeholder_ids = reader.placeholder_ids if reader is not None else ()
        self.encoder = TextEncoder(tokenizer, {*eos_token_ids, *placeholder_ids})
        self._prompt_place = placeholder()
        self._rendered: dict[str, str] = {}

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
        if self.config.teacher_prompt == "student":
            privileged = PrivilegedContext()
            teacher = FittedText(self.encode(prompt, privileged, tools), {}, privileged)
        else:
            teacher = self._fit_prompt(prompt, privileged, tools)
        encoded = self._first_fitting(contrasts, teacher, tools) if teacher.ids is not None else []
        return TokenContexts(
            teacher.ids,
            [contrast.ids for contrast in encoded],
            images=[self.read_images(prompt), *(contrast.images for contrast in encoded)],
            privileged=teacher.privileged,
            cut=teacher.privileged != privileged,
            feedback_dropped=privileged.feedback is not None and teacher.privileged.feedback is None,
        )

    def _first_fitting(
        self, contrasts: Iterable[Contrast], teacher: FittedText, tools: list[Any] | None
    ) -> list[EncodedContrast]:
        """The first C contrasts that fit the budget; fewer repeat."""
        count = self.config.contrastive_count
        fitting: list[EncodedContrast] = []
        for contrast in islice(contrasts, count + _MAX_MISSES):
            ids = self._encode_contrast(contrast, teacher, tools)
            if ids is None:
                continue
            fitting.append(EncodedContrast(ids, self.read_images(contrast.prompt)))
            if len(fitting) == count:
                return fitting
        return list(islice(cycle(fitting), count))

    def _encode_contrast(self, contrast: Contrast, teacher: FittedText, tools: list[Any] | None) -> list[int] | None:
        """Ids of a contrast with the teacher's z, or with its own; None where it does not fit."""
        if contrast.privileged is None:
            slotted = self._slotted_prompt(contrast.prompt, tools, [*teacher.parts])
            ids = fill(slotted, teacher.parts)
            return ids if len(ids) <= self.config.max_reprompt_len else None
        if teacher.privileged.turns or contrast.privileged.turns:
            raise ValueError(
                f"`contrastive_source={self.config.contrastive_source!r}` exchanges z, and feedback on turns is "
                "that of one rollout. Use a source of prompts, or return no `Verdict.turn_feedback`."
            )
        return self._fit_prompt(contrast.prompt, contrast.privileged, tools).ids

    def _fit_prompt(self, prompt: Prompt, z: PrivilegedContext, tools: list[Any] | None) -> FittedText:
        """A prompt with as much of z as fits `max_reprompt_len`."""

        def slotted(parts: list[str]) -> SlottedIds:
            return self._slotted_prompt(prompt, tools, parts)

        return self.fit(slotted, z, self.config.max_reprompt_len)

    def fit(self, slotted: Callable[[list[str]], SlottedIds], z: PrivilegedContext, budget: int) -> FittedText:
        """Fit z into a text: the first part is cut, then dropped, then the next.

        Args:
            slotted: the text with slots for the given parts of z.
            budget: maximum number of tokens.
        """
        z = replace(z, **{part: self._without_long_middle(getattr(z, part)) for part in PARTS})
        parts = self.encoder.encode_parts(z)
        for part in list(parts):
            text = slotted(list(parts))
            ids = fill(text, parts)
            excess = len(ids) - budget
            if excess <= 0:
                return FittedText(ids, parts, z)
            shorter = self._without_middle(parts[part], excess)
            if shorter is not None:
                parts[part] = shorter
                z = replace(z, **{part: self.tokenizer.decode(shorter)})
                return FittedText(fill(text, parts), parts, z)
            del parts[part]
            z = replace(z, **{part: None})
        if z.turns is not None:  # feedback on turns is placed later, see `place_turns`
            ids = fill(slotted([]), {})
            if len(ids) <= budget:
                return FittedText(ids, {}, z)
        return FittedText(None, {}, PrivilegedContext())

    def _without_long_middle(self, text: str | None) -> str | None:
        """Untrusted text that is short enough to tokenise."""
        half = _CHARACTERS_PER_TOKEN * self.config.max_reprompt_len // 2
        if text is None or len(text) <= 2 * half:
            return text
        return text[:half] + _CUT + text[-half:]

    def _without_middle(self, ids: list[int], excess: int) -> list[int] | None:
        """Ids of untrusted text with `excess` fewer tokens; None where nothing remains beside the mark."""
        mark = self.encoder.encode_inside(_CUT)
        remaining = len(ids) - excess - len(mark)
        if remaining < 2:
            return None
        ending = remaining // 2
        return ids[: remaining - ending] + mark + ids[-ending:]

    def encode(self, prompt: Prompt, z: PrivilegedContext, tools: list[Any] | None = None) -> list[int]:
        """Token ids of one context, of any length. Without feedback and demonstration it is the student's prompt."""
        parts = self.encoder.encode_parts(z)
        slotted = self._slotted_prompt(prompt, tools, list(parts))
        return fill(slotted, parts)

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
        unexpanded = {}
        for i, prompt in enumerate(prompts):
            if images_of(prompt):
                prompt_tools = tools[i] if tools else None
                ids = self.encode(prompt, PrivilegedContext(), prompt_tools)
                unexpanded[tuple(ids)] = self.reader.encode(self.render(prompt, tools=prompt_tools or None))
        return unexpanded

    def forget_texts(self) -> None:
        """Render prompts anew from now on, since a chat template may write the date."""
        self._rendered.clear()

    def student_text(self, prompt: Prompt, tools: list[Any] | None = None) -> str:
        """The prompt as the student reads it, with the generation prompt."""
        return self._render(prompt, tools, [])

    def _slotted_prompt(self, prompt: Prompt, tools: list[Any] | None, parts: list[str]) -> SlottedIds:
        """Ids of the prompt with slots for parts of z."""
        text = self._render(prompt, tools, parts)
        bos = self.tokenizer.bos_token
        begins_with_bos = bos is not None and text.startswith(bos)
        adds_special = isinstance(prompt, str) or (self.reader is not None and not begins_with_bos)
        return self.encoder.slotted(text, adds_special=adds_special)

    def _render(self, prompt: Prompt, tools: list[Any] | None, parts: list[str]) -> str:
        """The prompt with slots for parts of z, rendered once for all samples that have them."""
        schemas = [tool if isinstance(tool, dict) else get_json_schema(tool) for tool in tools or ()] or None
        key = json.dumps([prompt, schemas, sorted(parts)], default=content_key)
        if key not in self._rendered:
            if len(self._rendered) >= MAX_CACHED:
                self._rendered.clear()
            self._rendered[key] = self._render_anew(prompt, schemas, parts)
        return self._rendered[key]

    def _render_anew(self, prompt: Prompt, tools: list[dict[str, Any]] | None, parts: list[str]) -> str:
        config = self.config
        slots = self.encoder.slots
        solution = ""
        if "demonstration" in parts:
            solution = config.solution_template.format(successful_previous_attempt=slots["demonstration"])
        feedback = ""
        if "feedback" in parts:
            feedback = config.feedback_template.format(feedback_raw=slots["feedback"])
        if isinstance(prompt, str):
            return f"{(solution + feedback).strip()}\n\n{prompt}" if parts else prompt
        if parts:
            turn = config.reprompt_template.format(prompt=self._prompt_place, solution=solution, feedback=feedback)
            prompt = with_user_text(prompt, turn, self._prompt_place)
        text = self.render(prompt, tools=tools)
        if self.reader is not None:
            if parts_of(prompt, "video"):
                raise ValueError(
                    "Distillation does not support prompts with videos. Use some of the frames as images."
                )
            text = self.reader.expand(text, images_of(prompt))
        if any(slots[part] not in text for part in parts):
            raise ValueError(
                "The chat template changes or drops the last user turn, where the teacher reads feedback; it renders "
                f"…{text[-100:]!r}. Use a `chat_template` that renders `message['content']` as it is."
            )
        return text
