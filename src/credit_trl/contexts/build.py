"""Contexts of a generation batch: z and x'_k of every sample, as token ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from credit_trl.config import CreditConfig
from credit_trl.contexts.builder import ContextBuilder
from credit_trl.contexts.contrast import ContrastSource, draw_contrasts, draw_privileged_contexts
from credit_trl.contexts.privileged import PrivilegedContext, gather_privileged_contexts
from credit_trl.contexts.prompts import Render
from credit_trl.contexts.tokens import TokenContexts
from credit_trl.contexts.turns import TurnFormat, place_turns
from credit_trl.rollout.batch import GenerationBatch

# Random streams of `teacher_hint="foreign"` start beyond those of the contrast prompts.
_FOREIGN_STREAM = 2**32


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
        ValueError: turn feedback cannot be placed, or is combined with `contrastive_swap="hint"`.
    """
    config = builder.config
    privileged = gather_privileged_contexts(batch, config, decode)
    if config.teacher_hint == "foreign":
        drawn = draw_privileged_contexts(batch, privileged, 1, seed=config.seed, step=source.step + _FOREIGN_STREAM)
        privileged = [others[0] if others else PrivilegedContext() for others in drawn]
    if config.contrastive_swap == "hint" and config.contrasts:
        contexts = _swap_privileged(batch, privileged, builder, renderer, source.step)
    else:
        draws = draw_contrasts(batch, config, source)
        contexts = [
            builder.build(prompt, others, z, renderer(i))
            for i, (prompt, others, z) in enumerate(zip(batch.prompts, draws, privileged, strict=True))
        ]
    return [_place(batch, i, own, builder, renderer) for i, own in enumerate(contexts)]


def _swap_privileged(
    batch: GenerationBatch,
    privileged: Sequence[PrivilegedContext],
    builder: ContextBuilder,
    renderer: Callable[[int], Render],
    step: int,
) -> list[TokenContexts]:
    """Contexts whose contrasts keep x and exchange z (`contrastive_swap="hint"`)."""
    config: CreditConfig = builder.config
    if any(z.turns for z in privileged):
        raise ValueError(
            "`contrastive_swap='hint'` exchanges whole privileged contexts, and feedback on single turns belongs to "
            "one rollout. Set `contrastive_swap='input'`, or return no `Verdict.turn_feedback`."
        )
    drawn = draw_privileged_contexts(batch, privileged, config.contrastive_count, seed=config.seed, step=step)
    return [
        builder.build_swapped(prompt, z, others, renderer(i))
        for i, (prompt, z, others) in enumerate(zip(batch.prompts, privileged, drawn, strict=True))
    ]


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
