"""Placement of feedback on single turns in the teacher's contexts.

A turn is a run of the policy's own tokens; tool and environment output stands between turns. Feedback on turn k is a
user message right before the turn. The teacher therefore scores turn k with the feedback, and earlier turns without:

    student   x            turn 0   tool   turn 1
    teacher   (x, z) [z_0] turn 0   tool   [z_1] turn 1
    contrast  (x', z) [z_0] turn 0  tool   [z_1] turn 1

Token ids of such a message belong to the prompt, and `TokenContexts.insert_at` holds the column of the completion
before which each of them stands (0 for the prompt itself). The scoring pass merges the two; completion columns do not
change.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

from credit_trl.contexts.builder import ContextBuilder
from credit_trl.contexts.prompts import Render
from credit_trl.contexts.tokens import TokenContexts


@dataclass(frozen=True)
class TurnFormat:
    """Text that a chat template puts around a user message in the middle of a conversation; none for plain text."""

    before: str = ""  # text before the message's content
    after: str = ""  # text after it
    generation_prompt: str = ""  # text that opens a turn of the policy


def read_turn_format(render: Render) -> TurnFormat:
    """Read the format from a chat template.

    Raises:
        ValueError: the template rewrites earlier messages when a user message is appended.
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
            "The chat template does not append a user message to the conversation before it, so feedback on single "
            "turns cannot be placed. Return it as `Verdict.feedback`, which the opening prompt shows, or use a chat "
            "template whose turns end the same way in every position."
        )
    before, after = added[len(ended) :].split(message)
    return TurnFormat(before, after, opened[len(closed) :])


def place_turns(
    contexts: TokenContexts,
    completion_ids: Sequence[int],
    starts: Sequence[int],
    builder: ContextBuilder,
    form: TurnFormat,
) -> TokenContexts:
    """Contexts of one completion with its turn feedback before each turn.

    All messages together get `max_reprompt_len` tokens in equal shares; a longer message loses its middle.

    Args:
        contexts: contexts with the opening prompt only; `privileged.turns` holds the feedback.
        completion_ids: sampled ids.
        starts: first column of each turn; feedback on later turns is ignored.
        builder: encodes untrusted text.
        form: format of the conversation; the default adds nothing around the feedback (plain text).

    Raises:
        ValueError: a turn does not begin with the template's generation prompt.
    """
    feedback = {turn: text for turn, text in sorted(contexts.privileged.turns.items()) if turn < len(starts)}
    opening = builder.tokenize(form.generation_prompt)
    share = builder.config.max_reprompt_len // max(len(feedback), 1)
    prompts = [contexts.teacher, *contexts.contrasts]
    inserted: list[int] = []
    columns: list[int] = []
    cut = contexts.cut
    for turn, text in feedback.items():
        message, was_cut = builder.encode_turn(text, form.before, form.after, share)
        column = starts[turn] - len(opening)
        if starts[turn] == 0:
            prompts = [_insert_before_opening(prompt, opening, message) for prompt in prompts]
        else:
            _check_opening(completion_ids[max(column, 0) : starts[turn]], opening, turn)
            inserted += message
            columns += [column] * len(message)
        cut = cut or was_cut
    teacher, *contrasts = (prompt + inserted for prompt in prompts)
    insert_at = [[0] * len(prompt) + columns for prompt in prompts]
    return replace(contexts, teacher=teacher, contrasts=contrasts, insert_at=insert_at, cut=cut)


def _insert_before_opening(prompt: list[int], opening: list[int], message: list[int]) -> list[int]:
    end = len(prompt) - len(opening)
    _check_opening(prompt[max(end, 0) :], opening, 0)
    return prompt[:end] + message + prompt[end:]


def _check_opening(found: Sequence[int], opening: list[int], turn: int) -> None:
    if list(found) != opening:
        raise ValueError(
            f"Turn {turn} does not begin with the chat template's generation prompt, so its feedback cannot be "
            "placed. A `rollout_func` must open each turn as the template does. Otherwise return the feedback as "
            "`Verdict.feedback`, which the opening prompt shows."
        )
