"""Contexts of a generation batch: z and x'_k of every sample, as token ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from credit_trl.config import CreditConfig
from credit_trl.contexts.builder import ContextBuilder
from credit_trl.contexts.contrast import ContrastSource, draw_contrasts, draw_privileged_contexts, draw_wrong_contexts
from credit_trl.contexts.privileged import PrivilegedContext, demonstration_text, gather_privileged_contexts
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
        ValueError: turn feedback cannot be placed, or is combined with a contrast that exchanges z.
    """
    config = builder.config
    if config.teacher_prompt == "student":
        draws = draw_contrasts(batch, config, source)
        return [
            builder.build_plain(prompt, others, renderer(i))
            for i, (prompt, others) in enumerate(zip(batch.prompts, draws, strict=True))
        ]
    privileged = gather_privileged_contexts(batch, config, decode)
    if config.teacher_hint == "foreign":
        drawn = draw_privileged_contexts(batch, privileged, 1, seed=config.seed, step=source.step + _FOREIGN_STREAM)
        privileged = [others[0] if others else PrivilegedContext() for others in drawn]
    if config.contrasts and (config.contrastive_swap == "hint" or config.contrastive_source == "wrong_feedback"):
        drawn = _draw_other_contexts(batch, privileged, config, source.step, decode)
        contexts = [
            builder.build_swapped(prompt, z, others, renderer(i))
            for i, (prompt, z, others) in enumerate(zip(batch.prompts, privileged, drawn, strict=True))
        ]
    else:
        draws = draw_contrasts(batch, config, source)
        contexts = [
            builder.build(prompt, others, z, renderer(i))
            for i, (prompt, others, z) in enumerate(zip(batch.prompts, draws, privileged, strict=True))
        ]
    return [_place(batch, i, own, builder, renderer) for i, own in enumerate(contexts)]


def _draw_other_contexts(
    batch: GenerationBatch,
    privileged: Sequence[PrivilegedContext],
    config: CreditConfig,
    step: int,
    decode: Callable[[list[list[int]]], list[str]],
) -> list[list[PrivilegedContext]]:
    """Privileged contexts of the contrasts that keep x: of other prompts, or of failed rollouts of the group."""
    if any(z.turns for z in privileged):
        is_swap = config.contrastive_swap == "hint"
        option, value, default = ("swap", "hint", "input") if is_swap else ("source", "wrong_feedback", "batch")
        raise ValueError(
            f"`contrastive_{option}={value!r}` exchanges whole privileged contexts, and feedback on single turns "
            f"belongs to one rollout. Set `contrastive_{option}={default!r}`, or return no `Verdict.turn_feedback`."
        )
    if config.contrastive_source == "wrong_feedback":
        texts = [demonstration_text(text, config.teacher_context) for text in decode(batch.completion_ids)]
        return draw_wrong_contexts(batch, privileged, texts, config, step)
    return draw_privileged_contexts(batch, privileged, config.contrastive_count, seed=config.seed, step=step)


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
