"""Feedback on single turns of a rollout: which turns there are, and where the teacher reads what was said of them.

A turn is a run of the model's own tokens; tools and environments speak between the turns. Feedback on turn k is a user
message of its own, right before the turn, so that the teacher that scores the turn has read it and the turns before it
were scored without:

    student   x            turn 0   tool   turn 1
    teacher   (x, z) [z_0] turn 0   tool   [z_1] turn 1
    contrast  (x', z) [z_0] turn 0  tool   [z_1] turn 1

In ids, a context with such messages is its tokens and, for each of them, the column of the completion before which it
stands: 0 for the prompt. Scoring puts the two together, and the columns of the completion keep their names."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from credit_trl.contexts.builder import ContextBuilder
from credit_trl.contexts.prompts import Render
from credit_trl.contexts.tokens import TokenContexts
from credit_trl.rollout.batch import GenerationBatch


@dataclass(frozen=True)
class TurnFormat:
    """How a chat template writes a user message in the middle of a conversation.

    Args:
        before, after: the text around the message's content.
        generation_prompt: the text that opens a turn of the model.
    """

    before: str = ""
    after: str = ""
    generation_prompt: str = ""

    @classmethod
    def of(cls, render: Render) -> TurnFormat:
        """Read it off a template.

        Raises:
            ValueError: the template does not add a user message to what stands before it, but writes all anew.
        """
        answer, message = (f"\x02{secrets.token_hex(16)}\x03" for _ in range(2))
        dialogue = [{"role": "user", "content": "x"}, {"role": "assistant", "content": answer}]
        asked = [*dialogue, {"role": "user", "content": message}]
        ended = render(dialogue, add_generation_prompt=False).split(answer)[-1]
        closed = render(asked, add_generation_prompt=False)
        opened = render(asked)
        added = closed.split(answer)[-1]
        if not (added.startswith(ended) and added.count(message) == 1 and opened.startswith(closed)):
            raise ValueError(
                "The chat template does not append a user message to the conversation before it, so feedback on "
                "single turns cannot be placed. Return it as `Verdict.feedback`, which the opening prompt shows, or "
                "give the tokenizer a template whose turns end the same wherever they stand."
            )
        before, after = added[len(ended) :].split(message)
        return cls(before, after, opened[len(closed) :])


def place_turns(
    built: Sequence[TokenContexts],
    rollouts: GenerationBatch,
    builder: ContextBuilder,
    renderer: Callable[[int], Render],
) -> list[TokenContexts]:
    """Contexts with the feedback on each turn before the turn, in the teacher's and every contrast's.

    Args:
        built: of the local samples, with the opening prompt only; `privileged.turns` is what was said.
        rollouts: the generation batch.
        builder: encodes text from an untrusted source.
        renderer: local sample → how its prompt was rendered.

    Raises:
        ValueError: a turn does not begin with the template's generation prompt, or the template is not fit for it.
    """
    placed = []
    for i, contexts in enumerate(built):
        if contexts.ids is not None and contexts.privileged.turns:
            form = TurnFormat() if isinstance(rollouts.prompts[i], str) else TurnFormat.of(renderer(i))
            contexts = place(contexts, rollouts.completion_ids[i], rollouts.turn_starts[i], builder, form)
        placed.append(contexts)
    return placed


def place(
    built: TokenContexts,
    completion_ids: Sequence[int],
    starts: Sequence[int],
    builder: ContextBuilder,
    form: TurnFormat,
) -> TokenContexts:
    """The same for one response.

    All messages together have `max_reprompt_len` tokens, in equal shares; one that is longer loses its middle.

    Args:
        built: its contexts.
        completion_ids: the response.
        starts: its turns' first columns; feedback on turns beyond the last is left out.
        builder: encodes text from an untrusted source.
        form: of the conversation; for plain text, without turns of its own, nothing but the feedback is added.
    """
    feedback = {turn: text for turn, text in sorted(built.privileged.turns.items()) if turn < len(starts)}
    opening = builder.encode_text(form.generation_prompt)
    share = builder.config.max_reprompt_len // max(len(feedback), 1)
    prompts, inserted, columns, cut = built.ids, [], [], built.cut
    for turn, text in feedback.items():
        message, was_cut = builder.encode_turn(text, form.before, form.after, share)
        column = starts[turn] - len(opening)
        if starts[turn] == 0:
            prompts = [_before_opening(prompt, opening, message) for prompt in prompts]
        else:
            _check_opening(completion_ids[max(column, 0) : starts[turn]], opening, turn)
            inserted += message
            columns += [column] * len(message)
        cut = cut or was_cut
    ids = [prompt + inserted for prompt in prompts]
    return replace(built, ids=ids, columns=[[0] * len(prompt) + columns for prompt in prompts], cut=cut)


def _before_opening(prompt: list[int], opening: list[int], message: list[int]) -> list[int]:
    end = len(prompt) - len(opening)
    _check_opening(prompt[max(end, 0) :], opening, 0)
    return prompt[:end] + message + prompt[end:]


def _check_opening(found: Sequence[int], opening: list[int], turn: int) -> None:
    if list(found) != opening:
        raise ValueError(
            f"Turn {turn} does not begin with the chat template's generation prompt, so there is no place for "
            "feedback on it. A `rollout_func` has to open each turn as the template does; `Verdict.feedback`, which "
            "the opening prompt shows, needs no such place."
        )
