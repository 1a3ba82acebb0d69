"""Feedback on single turns of a completion, each as a user message right before its turn."""

from collections.abc import Sequence
from dataclasses import replace

from credit_trl.contexts.builder import ContextBuilder
from credit_trl.contexts.encode import SlottedIds
from credit_trl.contexts.prompts import Render
from credit_trl.contexts.tokens import PrivilegedContext, TokenContexts


def place_turns(
    contexts: TokenContexts,
    completion_ids: Sequence[int],
    starts: Sequence[int],
    builder: ContextBuilder,
    render: Render | None,
) -> TokenContexts:
    """Contexts of one completion with its feedback on single turns.

    A turn is a run of the policy's own tokens; tool and environment output stands between turns. The teacher scores
    turn k with the feedback on it, and earlier turns without:

        student   x            turn 0   tool   turn 1
        teacher   (x, z) [z_0] turn 0   tool   [z_1] turn 1
        contrast  (x', z) [z_0] turn 0  tool   [z_1] turn 1

    Ids of a message belong to the prompt, and `TokenContexts.insert_at` tells the scoring pass where they stand. All
    messages together get `max_reprompt_len` tokens in equal shares; a longer message loses its middle, and is dropped
    where that is not enough.

    Args:
        contexts: contexts with the opening prompt only; `privileged.turns` holds the feedback.
        starts: first column of each turn.
        render: renders the conversation; None for plain text.

    Raises:
        ValueError: a turn does not begin with the template's generation prompt, or see `turn_message`.
    """
    slotted_message, opening = turn_message(builder, render)
    feedback = sorted(contexts.privileged.turns.items())
    budget = builder.config.max_reprompt_len // len(feedback)
    prompts = [contexts.teacher, *contexts.contrasts]
    inserted: list[int] = []
    insert_columns: list[int] = []
    cut = contexts.cut
    for turn, text in feedback:
        message = builder.fit(lambda _: slotted_message, PrivilegedContext(feedback=text), budget)
        cut = cut or message.privileged.feedback != text
        if message.ids is None:
            continue
        if starts[turn] == 0:
            prompts = [_before_opening(prompt, message.ids, opening, turn) for prompt in prompts]
        else:
            column = _opening_start(completion_ids[: starts[turn]], opening, turn)
            inserted += message.ids
            insert_columns += [column] * len(message.ids)
    sequences = []
    insert_at = []
    for prompt in prompts:
        sequences.append(prompt + inserted)
        insert_at.append([0] * len(prompt) + insert_columns)
    teacher, *contrasts = sequences
    return replace(contexts, teacher=teacher, contrasts=contrasts, insert_at=insert_at, cut=cut)


def turn_message(builder: ContextBuilder, render: Render | None) -> tuple[SlottedIds, list[int]]:
    """The message with a slot for feedback in the middle of a conversation, and the generation prompt after it.

    Raises:
        ValueError: the template rewrites earlier messages when a user message is appended.
    """
    encoder = builder.encoder
    text = builder.config.feedback_template.format(feedback_raw=encoder.slots["feedback"]).strip()
    if render is None:  # plain text has nothing around the feedback
        return encoder.slotted(text), []
    answer = encoder.slots["demonstration"]
    dialogue = [{"role": "user", "content": "x"}, {"role": "assistant", "content": answer}]
    continued = [*dialogue, {"role": "user", "content": text}]
    dialogue_end = render(dialogue, add_generation_prompt=False).split(answer)[-1]
    rendered = render(continued, add_generation_prompt=False)
    opened = render(continued)
    continued_end = rendered.split(answer)[-1]
    is_appended = continued_end.startswith(dialogue_end) and continued_end.count(text) == 1
    if not (is_appended and opened.startswith(rendered)):
        raise ValueError(
            "The chat template does not append a user message to the conversation before it, where feedback on a turn "
            "would stand. Return it as `Verdict.feedback`, or use a template whose turns end alike in every position."
        )
    message = continued_end.removeprefix(dialogue_end)
    generation_prompt = opened.removeprefix(rendered)
    return encoder.slotted(message), encoder.encode(generation_prompt)


def _before_opening(prompt: list[int], message: list[int], opening: list[int], turn: int) -> list[int]:
    """A prompt with a message before the generation prompt that ends it."""
    start = _opening_start(prompt, opening, turn)
    return prompt[:start] + message + prompt[start:]


def _opening_start(ids: Sequence[int], opening: list[int], turn: int) -> int:
    """Index at which the generation prompt starts that ends the ids before a turn."""
    start = len(ids) - len(opening)
    if start < 0 or list(ids[start:]) != opening:
        raise ValueError(
            f"Turn {turn} does not begin with the chat template's generation prompt, where its feedback would stand. "
            "Let the `rollout_func` open each turn as the template does, or return `Verdict.feedback`."
        )
    return start
