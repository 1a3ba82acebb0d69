"""The contexts under which the teacher reads a response: teacher `(x, z)` and contrasts `(x'_k, z)`.

z is a successful rollout of the same group, if there is one, and the environment's feedback. Both are text from an
untrusted source: whatever they contain, they cannot end a turn or open another. The prompt around them is tokenised as
it is for the student."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from credit_trl.config import CreditConfig
from credit_trl.contexts.privileged import PrivilegedContext
from credit_trl.contexts.prompts import Prompt, Render, _with_user_text, user_text
from credit_trl.contexts.tokens import TokenContexts


class ContextBuilder:
    """Turns `(prompt, privileged)` into token ids, safely and within a budget.

    Args:
        tokenizer: the student's.
        config: templates and `max_reprompt_len`.
        eos_token_ids: further ids that end a turn, besides the tokenizer's special tokens.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, config: CreditConfig, eos_token_ids: Sequence[int] = ()
    ) -> None:
        self.tokenizer = tokenizer
        self.config = config
        special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._control_ids = frozenset(special | set(tokenizer.all_special_ids) | set(eos_token_ids))

    def build(self, prompts: Sequence[Prompt], privileged: PrivilegedContext, render: Render) -> TokenContexts:
        """The contexts of one response: the teacher's for `prompts[0]`, contrasts for the others.

        All share the same z. If one is longer than `max_reprompt_len`, the feedback is cut in its middle for all of
        them, then dropped, then the same happens to the demonstration. Where nothing of z would be left beside another
        question, or nothing at all is in its context, there is no contrast, and z is fitted to the teacher's context
        alone.

        Args:
            prompts: x, x'_1, …, x'_C, conversational or plain text.
            privileged: z.
            render: a conversation → the text of the chat template up to the generation prompt, with the options that
                the student's prompts are rendered with. Unused for plain text.
        """
        whole = privileged
        while privileged:
            ids = [self.encode(prompt, privileged, render) for prompt in prompts]
            excess = max(map(len, ids)) - self.config.max_reprompt_len
            if not all(
                ids[1:]
            ):  # plain text without its question, with feedback on turns only: no token to begin from
                break
            if excess <= 0:
                return TokenContexts(ids, privileged, cut=privileged != whole)
            privileged = self._shorten(privileged, excess)
        if len(prompts) > 1 and whole:
            return self.build(prompts[:1], whole, render)
        return TokenContexts(None, privileged, cut=privileged != whole)

    def build_hint_contrasts(
        self, prompt: Prompt, privileged: PrivilegedContext, hints: Sequence[PrivilegedContext], render: Render
    ) -> TokenContexts:
        """The contexts of one response where contrasts exchange the hint: `(x, z)`, then `(x, z'_1)`, …, `(x, z'_C)`.

        Each z is fitted to the budget by itself. If one of the hints does not fit at all, there is no contrast.

        Args:
            prompt: x.
            privileged: z.
            hints: z'_1, …, z'_C, of other problems.
            render: as in `build`.
        """
        teacher = self.build([prompt], privileged, render)
        others = [self.build([prompt], hint, render) for hint in hints]
        if teacher.ids is None or any(other.ids is None for other in others):
            return teacher
        ids = [context for built in (teacher, *others) for context in built.ids]
        return TokenContexts(ids, teacher.privileged, cut=any(built.cut for built in (teacher, *others)))

    def encode(self, prompt: Prompt, privileged: PrivilegedContext, render: Render) -> list[int]:
        """Token ids of one context, of any length."""
        return self._encode_pieces(self._pieces(prompt, privileged, render), first=isinstance(prompt, str))

    def encode_text(self, text: str) -> list[int]:
        """Token ids of a part of the chat template."""
        return self._tokenize(text, first=False)

    def encode_turn(self, feedback: str, before: str, after: str, budget: int) -> tuple[list[int], bool]:
        """Token ids of a message in the middle of a conversation, and whether it was cut to fit.

        Args:
            feedback: what the message says, worded by `feedback_template`; untrusted.
            before, after: the chat template's text around it.
            budget: the most tokens; over it the feedback loses its middle. No id at all where that is not enough.
        """
        text: str | None = _encodable(feedback)
        while text is not None:
            head, tail = self.config.feedback_template.format(feedback_raw="\x02").strip().split("\x02")
            pieces = [(before + head, True), (text, False), (tail + after, True)]
            ids = self._encode_pieces([piece for piece in pieces if piece[0]], first=False)
            if len(ids) <= budget:
                return ids, text != _encodable(feedback)
            text = self._cut_middle(text, len(ids) - budget)
        return [], True

    def _encode_pieces(self, pieces: list[tuple[str, bool]], *, first: bool) -> list[int]:
        ids = self._tokenize("".join(text for text, _ in pieces), first=first)
        expected = self._controls(self._tokenize(_scaffold(pieces), first=first))
        if self._controls(ids) == expected:
            return ids
        # Something in z reads as a control token. Encode it as plain text, apart from what surrounds it.
        ids = []
        for position, (text, trusted) in enumerate(pieces):
            ids += self._tokenize(text, first=first and position == 0) if trusted else self._tokenize_plain(text)
        if self._controls(ids) != expected:
            raise ValueError(
                "A demonstration or feedback still encodes to control tokens with `split_special_tokens=True`; the "
                f"tokenizer {type(self.tokenizer).__name__} cannot take untrusted text safely."
            )
        return ids

    def _pieces(self, prompt: Prompt, privileged: PrivilegedContext, render: Render) -> list[tuple[str, bool]]:
        """The context's text as (text, trusted) pieces; the untrusted ones are the demonstration and the feedback.

        The chat template sees marks in their place, so that it cannot be steered by them.
        """
        untrusted = {}
        for name in ("demonstration", "feedback"):
            if getattr(privileged, name) is not None:
                untrusted[f"\x02{secrets.token_hex(16)}\x03"] = _encodable(getattr(privileged, name))
        if not untrusted:  # turns only: the opening prompt is the student's
            return [(prompt if isinstance(prompt, str) else render(prompt), True)]
        marks = iter(untrusted)
        solution = feedback = ""
        if privileged.demonstration is not None:
            solution = self.config.solution_template.format(successful_previous_attempt=next(marks))
        if privileged.feedback is not None:
            feedback = self.config.feedback_template.format(feedback_raw=next(marks))
        turn = self.config.reprompt_template.format(prompt=user_text(prompt), solution=solution, feedback=feedback)
        text = turn if isinstance(prompt, str) else render(_with_user_text(prompt, turn))
        parts = re.split("(" + "|".join(map(re.escape, untrusted)) + ")", text)
        return [(untrusted.get(part, part), part not in untrusted) for part in parts if part]

    def _tokenize(self, text: str, *, first: bool) -> list[int]:
        """`first`: plain prompts get the tokenizer's own special tokens, as the student's do."""
        return self.tokenizer(text, add_special_tokens=first)["input_ids"]

    def _tokenize_plain(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]

    def _controls(self, ids: list[int]) -> list[int]:
        return [i for i in ids if i in self._control_ids]

    def _shorten(self, privileged: PrivilegedContext, excess: int) -> PrivilegedContext:
        """Take `excess` tokens or more out of the feedback's middle, or drop it; then those of the demonstration."""
        if privileged.feedback is None and privileged.demonstration is None:
            return PrivilegedContext()  # the question alone is too long
        name = "feedback" if privileged.feedback is not None else "demonstration"
        return replace(privileged, **{name: self._cut_middle(getattr(privileged, name), excess)})

    def _cut_middle(self, text: str, excess: int) -> str | None:
        ids = self._tokenize_plain(text)
        mark = "\n[… {} tokens cut …]\n"
        cut = excess + len(self._tokenize_plain(mark.format(10**6)))
        kept = len(ids) - cut
        if kept < 2:
            return None
        head, tail = ids[: kept - kept // 2], ids[len(ids) - kept // 2 :]
        shorter = self.tokenizer.decode(head) + mark.format(cut) + self.tokenizer.decode(tail)
        return shorter if len(self._tokenize_plain(shorter)) < len(ids) else None


def _encodable(text: str) -> str:
    """Without lone surrogates."""
    return text.encode("utf-8", "replace").decode()


def _scaffold(pieces: list[tuple[str, bool]]) -> str:
    """The context with each untrusted piece replaced by a letter: the control tokens in it are the template's own."""
    return "".join(text if trusted else "x" for text, trusted in pieces)
