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
from dataclasses import replace

from credit_trl.contexts.builder import ContextBuilder
from credit_trl.contexts.privileged import PrivilegedContext
from credit_trl.contexts.prompts import Render
from credit_trl.contexts.tokens import TokenContexts


def read_turn_format(render: Render) -> tuple[str, str, str]:
    """Text of a chat template around a user message in the middle of a conversation.

    Returns:
        The text before the message's content, the text after it, and the one that opens the policy's next turn.

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
    return before, after, opened[len(closed) :]


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
        starts: first column of each turn; feedback on later turns is ignored.
        builder: encodes untrusted text.
        render: renders the conversation; None for plain text, which has nothing around the feedback.

    Raises:
        ValueError: a turn does not begin with the template's generation prompt, or see `read_turn_format`.
    """
    feedback = {turn: text for turn, text in sorted(contexts.privileged.turns.items()) if turn < len(starts)}
    before, after, generation_prompt = ("", "", "") if render is None else read_turn_format(render)
    opening = builder.tokenize(generation_prompt)
    share = builder.config.max_reprompt_len // max(len(feedback), 1)
    head, tail = builder.config.feedback_template.format(feedback_raw="\x02").strip().split("\x02")

    def encode(z: PrivilegedContext) -> list[int]:
        return builder.encode_pieces([(before + head, True), (z.feedback, False), (tail + after, True)])

    prompts = [contexts.teacher, *contexts.contrasts]
    inserted: list[int] = []
    columns: list[int] = []
    cut = contexts.cut
    for turn, text in feedback.items():
        message, fitted = builder.fit(encode, PrivilegedContext(feedback=text), share)
        message = message or []
        cut = cut or fitted.feedback != text
        if starts[turn] == 0:
            ends = [_opening_start(prompt, opening, turn) for prompt in prompts]
            prompts = [prompt[:end] + message + prompt[end:] for prompt, end in zip(prompts, ends, strict=True)]
        else:
            column = _opening_start(completion_ids[: starts[turn]], opening, turn)
            inserted += message
            columns += [column] * len(message)
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
