"""The contexts under which the reference reads a response: teacher `(x, z)` and contrasts `(x'_k, z)`.

z is a successful rollout of the same group, if there is one, and the environment's feedback. Both are text from an
untrusted source: whatever they contain, they cannot end a turn or open another. The prompt around them is tokenised as
it is for the student.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedTokenizerBase
from trl.data_utils import prepare_multimodal_messages

from credit_trl.config import CreditConfig

Prompt = str | list[dict[str, Any]]
Render = Callable[..., str]  # of a conversation; `add_generation_prompt=False` leaves out what opens the model's turn

_THINKING = re.compile(r"^(?:(?!</?think>).)*</think>|<think>.*?(?:</think>|\Z)", flags=re.DOTALL)
# Of the threshold: what fp32 sums of rewards may lack.
_REWARD_ROUNDING = 1e-6


@dataclass(frozen=True)
class Evidence:
    """z, what the teacher is shown of one rollout's outcome. At least one of the three makes a teacher.

    Args:
        demonstration: a successful rollout of the group.
        feedback: what the environment said of the whole rollout.
        turns: what it said of single turns, by the turn's number; None for nothing. See `turns.place_turns`.
    """

    demonstration: str | None = None
    feedback: str | None = None
    turns: Mapping[int, str] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        if self.turns is not None:  # JSON has no integer keys
            object.__setattr__(self, "turns", {int(turn): text for turn, text in self.turns.items()} or None)

    def __bool__(self) -> bool:
        return any(part is not None for part in (self.demonstration, self.feedback, self.turns))


def chat_renderer(
    processor: Any, is_multimodal: bool, tools: list[Any] | None, chat_template: str | None, options: dict[str, Any]
) -> Render:
    """Conversations → the chat template's text, as TRL renders a student's prompt up to tokenisation.

    Args:
        processor: the tokenizer, or the processor of a multimodal model.
        is_multimodal: messages are turned into lists of parts.
        tools: of the sample's environment, or None.
        chat_template: None for the tokenizer's own.
        options: `chat_template_kwargs`.
    """

    def render(messages: list[dict[str, Any]], *, add_generation_prompt: bool = True) -> str:
        return processor.apply_chat_template(
            prepare_multimodal_messages(messages) if is_multimodal else messages,
            tools=tools or None,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **options,
        )

    return render


def choose_demonstrations(
    rewards: Sequence[float], group_size: int, threshold: float, *, exclude_self: bool
) -> list[int | None]:
    """For each rollout, the first successful rollout of its group, or None.

    Args:
        rewards: of the global generation batch, groups contiguous; NaN never succeeds.
        group_size: rollouts a group.
        threshold: reward from which a rollout is successful. A reward that lacks a millionth of it is enough: rewards
            are weighted and summed in fp32, where 0.7 is a little less.
        exclude_self: a rollout is not its own demonstration.
    """
    lowest = threshold - _REWARD_ROUNDING * abs(threshold)
    chosen: list[int | None] = []
    for index in range(len(rewards)):
        start = index // group_size * group_size
        group = range(start, min(start + group_size, len(rewards)))
        successful = [i for i in group if rewards[i] >= lowest and not (exclude_self and i == index)]
        chosen.append(successful[0] if successful else None)
    return chosen


def demonstration_text(completion: str, teacher_context: str) -> str | None:
    """What of a successful completion is shown: its solution, its thinking, or both; None if that part is empty.

    Thinking is what stands in `<think>…</think>`, up to `</think>` where the generation prompt opened the block, and
    to the end where it was never closed.
    """
    if teacher_context == "think+solution":
        text = completion
    elif teacher_context == "solution":
        text = _THINKING.sub("", completion).strip() if "think>" in completion else completion
    else:
        text = "\n".join(re.sub(r"</?think>", "", part).strip() for part in _THINKING.findall(completion))
    return text if text.strip() else None


def user_text(prompt: Prompt) -> str:
    """The text of the last user turn; text parts of a structured turn are joined by a space, as SDPO does."""
    if isinstance(prompt, str):
        return prompt
    content = prompt[_last_user(prompt)].get("content", "")
    if isinstance(content, str):
        return content
    return " ".join(part.get("text", "") for part in content if part.get("type") == "text")


def without_question(prompt: Prompt) -> Prompt:
    """The prompt with nothing asked: its system messages and an empty user turn; an empty text for plain text."""
    if isinstance(prompt, str):
        return ""
    turn = prompt[_last_user(prompt)]
    return [*(m for m in prompt if m.get("role") == "system"), *_with_user_text([turn], "")]


def has_images(prompt: Prompt) -> bool:
    """Whether a conversational prompt carries an image part."""
    if isinstance(prompt, str):
        return False
    contents = (message.get("content") for message in prompt)
    return any(part.get("type") == "image" for content in contents if isinstance(content, list) for part in content)


@dataclass(frozen=True)
class Contexts:
    """One response's contexts.

    Args:
        ids: token ids of the teacher's prompt, then of C contrast prompts; None where there is no teacher.
        evidence: what of z is in them.
        cut: whether z was shortened to fit the budget.
        columns: for each token of each context, the column of the completion before which it stands; None where all
            stand before the first.
    """

    ids: list[list[int]] | None
    evidence: Evidence
    cut: bool = False
    columns: list[list[int]] | None = None


class ContextBuilder:
    """Turns `(prompt, evidence)` into token ids, safely and within a budget.

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

    def build(self, prompts: Sequence[Prompt], evidence: Evidence, render: Render) -> Contexts:
        """The contexts of one response: the teacher's for `prompts[0]`, contrasts for the others.

        All share the same z. If one is longer than `max_reprompt_len`, the feedback is cut in its middle for all of
        them, then dropped, then the same happens to the demonstration. Where nothing of z would be left beside another
        question, or nothing at all is in its context, there is no contrast, and z is fitted to the teacher's context
        alone.

        Args:
            prompts: x, x'_1, …, x'_C, conversational or plain text.
            evidence: z.
            render: a conversation → the text of the chat template up to the generation prompt, with the options that
                the student's prompts are rendered with. Unused for plain text.
        """
        whole = evidence
        while evidence:
            ids = [self.encode(prompt, evidence, render) for prompt in prompts]
            excess = max(map(len, ids)) - self.config.max_reprompt_len
            if not all(
                ids[1:]
            ):  # plain text without its question, with feedback on turns only: no token to begin from
                break
            if excess <= 0:
                return Contexts(ids, evidence, cut=evidence != whole)
            evidence = self._shorten(evidence, excess)
        if len(prompts) > 1 and whole:
            return self.build(prompts[:1], whole, render)
        return Contexts(None, evidence, cut=evidence != whole)

    def build_hint_contrasts(
        self, prompt: Prompt, evidence: Evidence, hints: Sequence[Evidence], render: Render
    ) -> Contexts:
        """The contexts of one response where contrasts exchange the hint: `(x, z)`, then `(x, z'_1)`, …, `(x, z'_C)`.

        Each z is fitted to the budget by itself. If one of the hints does not fit at all, there is no contrast.

        Args:
            prompt: x.
            evidence: z.
            hints: z'_1, …, z'_C, of other problems.
            render: as in `build`.
        """
        teacher = self.build([prompt], evidence, render)
        others = [self.build([prompt], hint, render) for hint in hints]
        if teacher.ids is None or any(other.ids is None for other in others):
            return teacher
        ids = [context for built in (teacher, *others) for context in built.ids]
        return Contexts(ids, teacher.evidence, cut=any(built.cut for built in (teacher, *others)))

    def encode(self, prompt: Prompt, evidence: Evidence, render: Render) -> list[int]:
        """Token ids of one context, of any length."""
        return self._encode_pieces(self._pieces(prompt, evidence, render), first=isinstance(prompt, str))

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

    def _pieces(self, prompt: Prompt, evidence: Evidence, render: Render) -> list[tuple[str, bool]]:
        """The context's text as (text, trusted) pieces; the untrusted ones are the demonstration and the feedback.

        The chat template sees marks in their place, so that it cannot be steered by them.
        """
        untrusted = {}
        for name in ("demonstration", "feedback"):
            if getattr(evidence, name) is not None:
                untrusted[f"\x02{secrets.token_hex(16)}\x03"] = _encodable(getattr(evidence, name))
        if not untrusted:  # turns only: the opening prompt is the student's
            return [(prompt if isinstance(prompt, str) else render(prompt), True)]
        marks = iter(untrusted)
        solution = feedback = ""
        if evidence.demonstration is not None:
            solution = self.config.solution_template.format(successful_previous_attempt=next(marks))
        if evidence.feedback is not None:
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

    def _shorten(self, evidence: Evidence, excess: int) -> Evidence:
        """Take `excess` tokens or more out of the feedback's middle, or drop it; then those of the demonstration."""
        if evidence.feedback is None and evidence.demonstration is None:
            return Evidence()  # the question alone is too long
        name = "feedback" if evidence.feedback is not None else "demonstration"
        return replace(evidence, **{name: self._cut_middle(getattr(evidence, name), excess)})

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


def _last_user(messages: list[dict[str, Any]]) -> int:
    for index in range(len(messages) - 1, -1, -1):
        if messages[index].get("role") == "user":
            return index
    raise ValueError(
        f"A prompt needs a user turn for the teacher's context; its roles are {[m.get('role') for m in messages]}."
    )


def _with_user_text(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    index = _last_user(messages)
    content: Any = text
    if isinstance(messages[index].get("content"), list):
        content = [{"type": "text", "text": text}]
    return [*messages[:index], {**messages[index], "content": content}, *messages[index + 1 :]]
