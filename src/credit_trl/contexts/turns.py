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

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from credit_trl.contexts.builder import ContextBuilder, SlottedText
from credit_trl.contexts.privileged import PrivilegedContext
from credit_trl.contexts.prompts import Render
from credit_trl.contexts.tokens import TokenContexts


def turn_message(builder: ContextBuilder, render: Render | None) -> tuple[SlottedText, list[int]]:
    """The message with feedback in the middle of a conversation, and ids of the generation prompt that follows it.

    Raises:
        ValueError: the template rewrites earlier messages when a user message is appended.
    """
    text = builder.config.feedback_template.format(feedback_raw=builder.slots["feedback"]).strip()
    if render is None:  # plain text has nothing around the feedback
        return builder.slotted(text), []
    answer = builder.slots["demonstration"]
    dialogue = [{"role": "user", "content": "x"}, {"role": "assistant", "content": answer}]
    asked = [*dialogue, {"role": "user", "content": text}]
    ended = render(dialogue, add_generation_prompt=False).split(answer)[-1]
    closed = render(asked, add_generation_prompt=False)
    opened = render(asked)
    added = closed.split(answer)[-1]
    if not (added.startswith(ended) and added.count(text) == 1 and opened.startswith(closed)):
        raise ValueError(
            "The chat template does not append a user message to the conversation before it, so feedback on single "
            "turns cannot be placed. Return it as `Verdict.feedback`, which the opening prompt shows, or use a chat "
            "template whose turns end the same way in every position."
        )
    return builder.slotted(added[len(ended) :]), builder.tokenize(opened[len(closed) :])


def place_turns(
    contexts: TokenContexts,
    completion_ids: Sequence[int],
    starts: Sequence[int],
    builder: ContextBuilder,
    render: Render | None,
) -> TokenContexts:
    """Contexts of one completion with its turn feedback before each turn.

    All messages together get `max_reprompt_len` tokens in equal shares; a longer message loses its middle, and
    is dropped where that is not enough.

    Args:
        contexts: contexts with the opening prompt only; `privileged.turns` holds the feedback.
        completion_ids: sampled ids.
        starts: first column of each turn.
        builder: encodes untrusted text.
        render: renders the conversation; None for plain text.

    Raises:
        ValueError: a turn does not begin with the template's generation prompt, or see `turn_message`.
    """
    message, opening = turn_message(builder, render)
    feedback = sorted(contexts.privileged.turns.items())
    prompts = [contexts.teacher, *contexts.contrasts]
    inserted: list[int] = []
    columns: list[int] = []
    cut = contexts.cut
    for turn, text in feedback:
        share = builder.config.max_reprompt_len // len(feedback)
        ids, fitted = builder.fit(partial(builder.fill, message), PrivilegedContext(feedback=text), share)
        cut = cut or fitted.feedback != text
        if ids is None:
            continue
        if starts[turn] == 0:
            ends = [_opening_start(prompt, opening, turn) for prompt in prompts]
            prompts = [prompt[:end] + ids + prompt[end:] for prompt, end in zip(prompts, ends, strict=True)]
        else:
            inserted += ids
            columns += [_opening_start(completion_ids[: starts[turn]], opening, turn)] * len(ids)
    teacher, *contrasts = (prompt + inserted for prompt in prompts)
    insert_at = [[0] * len(prompt) + columns for prompt in prompts]
    return replace(contexts, teacher=teacher, contrasts=contrasts, insert_at=insert_at, cut=cut)


def _opening_start(ids: Sequence[int], opening: list[int], turn: int) -> int:
    """Index at which the generation prompt starts that ends the ids before a turn."""
    start = len(ids) - len(opening)
    if start < 0 or list(ids[start:]) != opening:
        raise ValueError(
            f"Turn {turn} does not begin with the chat template's generation prompt, so its feedback cannot be "
            "placed. A `rollout_func` must open each turn as the template does. Otherwise return the feedback as "
            "`Verdict.feedback`, which the opening prompt shows."
        )
    return start
