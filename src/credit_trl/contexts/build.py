"""Teacher and contrast contexts of a generation batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from credit_trl.config import CreditConfig
from credit_trl.contexts.builder import ContextBuilder
from credit_trl.contexts.contrast import _FOREIGN_STREAM, draw_contrasts, draw_hints
from credit_trl.contexts.privileged import PrivilegedContext
from credit_trl.contexts.prompts import Render
from credit_trl.contexts.tokens import TokenContexts
from credit_trl.rollout.batch import GenerationBatch


def build_contexts(
    rollouts: GenerationBatch,
    privileged: Sequence[PrivilegedContext],
    config: CreditConfig,
    builder: ContextBuilder,
    renderer: Callable[[int], Render],
    dataset: Any,
    step: int,
) -> list[TokenContexts]:
    """Teacher and contrast contexts of the local samples. Every process must call it.

    Args:
        rollouts: the generation batch.
        privileged: z of each local sample.
        config: whose hint the teacher sees, and what the contrast exchanges.
        builder: turns prompts and z into token ids.
        renderer: local sample → how its prompt was rendered.
        dataset, step: as in `draw_contrasts`.
    """
    if config.teacher_hint == "foreign":
        drawn = draw_hints(rollouts, privileged, 1, seed=config.seed, step=step + _FOREIGN_STREAM)
        privileged = [hints[0] if hints else PrivilegedContext() for hints in drawn]
    if config.contrastive_swap == "hint" and config.contrasts:
        if any(z.turns for z in privileged):
            raise ValueError(
                "`contrastive_swap='hint'` exchanges whole hints, and feedback on single turns has its place in one "
                "rollout only. Set `contrastive_swap='input'`, or return no `Verdict.turn_feedback`."
            )
        hints = draw_hints(rollouts, privileged, config.contrastive_count, seed=config.seed, step=step)
        return [
            builder.build_hint_contrasts(prompt, z, others, renderer(i))
            for i, (prompt, z, others) in enumerate(zip(rollouts.prompts, privileged, hints, strict=True))
        ]
    draws = draw_contrasts(rollouts, config, dataset, step)
    return [
        builder.build([prompt, *others], z, renderer(i))
        for i, (prompt, others, z) in enumerate(zip(rollouts.prompts, draws, privileged, strict=True))
    ]
