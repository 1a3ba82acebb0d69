"""Contexts of a generation batch: z and x'_k of every sample, as token ids."""

from __future__ import annotations

from collections.abc import Callable

from credit_trl.contexts.builder import ContextBuilder
from credit_trl.contexts.contrast import ContrastSource, draw_contrasts
from credit_trl.contexts.privileged import gather_privileged_contexts
from credit_trl.contexts.prompts import Render
from credit_trl.contexts.tokens import TokenContexts
from credit_trl.contexts.turns import TurnFormat, place_turns
from credit_trl.rollout.batch import GenerationBatch


def build_contexts(
    batch: GenerationBatch,
    builder: ContextBuilder,
    renderer: Callable[[int], Render],
    source: ContrastSource,
    decode: Callable[[list[list[int]]], list[str]],
) -> list[TokenContexts]:
    """Teacher and contrast contexts of the local samples. Every process must call it.

    Args:
        batch: the generation batch.
        builder: turns prompts and z into token ids; its configuration chooses z and the contrast.
        renderer: local sample to the renderer of its prompt.
        source: rows and random stream of the contrast prompts.
        decode: sampled ids to texts without special tokens.

    Raises:
        ValueError: turn feedback cannot be placed.
    """
    config = builder.config
    privileged = gather_privileged_contexts(batch, config, decode)
    draws = draw_contrasts(batch, config, source)
    contexts = [
        builder.build(prompt, others, z, renderer(i))
        for i, (prompt, others, z) in enumerate(zip(batch.prompts, draws, privileged, strict=True))
    ]
    return [_place(batch, i, own, builder, renderer) for i, own in enumerate(contexts)]


def _place(
    batch: GenerationBatch,
    sample: int,
    contexts: TokenContexts,
    builder: ContextBuilder,
    renderer: Callable[[int], Render],
) -> TokenContexts:
    """Contexts of one sample with its turn feedback, if it has any."""
    if contexts.teacher is None or not contexts.privileged.turns:
        return contexts
    form = TurnFormat() if isinstance(batch.prompts[sample], str) else TurnFormat.of(renderer(sample))
    return place_turns(contexts, batch.completion_ids[sample], batch.turn_starts[sample], builder, form)
