"""Scoring phase: the teacher's scores of a whole generation batch, without gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor, nn

from credit_trl.contexts.tokens import CompletionBatch, TokenContexts
from credit_trl.loss.head import Kernels, LMHead, lm_head, matmul_dtype
from credit_trl.loss.scores import Scores, SupportConfig, TeacherStates, score_tokens
from credit_trl.teacher.causal_lm import head_input
from credit_trl.teacher.models import Teacher
from credit_trl.teacher.passes import PassConfig, token_states


@dataclass(frozen=True)
class ScoringConfig:
    """How completions are scored.

    Args:
        temperature: rollout temperature; logits are divided by it.
        passes: size and layout of the forward passes.
        kernels: implementation of the passes over rows of logits, see `LMHead`.
        chunk_size: tokens per logits chunk; None picks from free memory.
        vocabulary: V of the policy; rows of the teacher's head beyond it are padding.
    """

    support: SupportConfig = field(default_factory=SupportConfig)
    temperature: float = 1.0
    passes: PassConfig = field(default_factory=PassConfig)
    kernels: Kernels = "torch"
    chunk_size: int | None = None
    vocabulary: int | None = None


def score_completions(
    teacher: Teacher, contexts: Sequence[TokenContexts], batch: CompletionBatch, config: ScoringConfig
) -> dict[str, Tensor]:
    """Score a generation batch with a support that does not depend on the student.

    Returns the fields of `Scores`, each (B, T, …), zero at positions that are not scored.
    """
    scores: dict[str, Tensor] = {}
    with teacher.active() as model:
        head = _teacher_head(teacher, model, config, batch)
        for name, dtype, depth in stored_layout(config.support, head.weight.dtype):
            scores[name] = torch.zeros(*batch.ids.shape, *depth, dtype=dtype, device=batch.ids.device)
        for states in token_states(teacher, model, contexts, batch, config.passes):
            at = (states.rows, states.columns)
            of_passes = TeacherStates(states.teacher, states.contrasts, head)
            part = score_tokens(of_passes, batch.ids[at], config.support, config.chunk_size)
            for name, values in scores.items():
                values[at] = getattr(part, name).to(values.dtype)
    return scores


def stored_scores(inputs: dict[str, Tensor], pick: Callable[[Tensor], Tensor]) -> Scores:
    """The scores of N tokens, from what `score_completions` returned; `pick` takes them from (B, T, …)."""
    picked = {f.name: pick(inputs[f.name]) for f in fields(Scores)}
    picked["support_ids"] = picked["support_ids"].long()
    return Scores(**picked)


def stored_layout(support: SupportConfig, dtype: torch.dtype) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    """Name, dtype and trailing shape of every stored score. Ids take 4 bytes.

    `dtype` is that of the teacher's head; scores are stored in fp32 at least.
    """
    dtype = torch.promote_types(dtype, torch.float32)
    buckets = support.size + support.has_tail
    return [
        ("support_ids", torch.int32, (support.size,)),
        ("teacher_logps", dtype, (buckets,)),
        ("generic_logps", dtype, (buckets,)),
        ("teacher_token_logps", dtype, ()),
        ("generic_token_logps", dtype, ()),
        ("teacher_entropy", dtype, ()),
    ]


def _teacher_head(teacher: Teacher, model: nn.Module, config: ScoringConfig, batch: CompletionBatch) -> LMHead:
    """The teacher's head, gathered once, in the dtype of its products, on the device of the batch."""
    unwrapped, device = teacher.unwrapped(model), batch.ids.device
    head = lm_head(unwrapped, config.temperature, config.kernels)
    with teacher.autocast():
        hidden = head_input(unwrapped, torch.empty(0, dtype=head.weight.dtype, device=device))
    head = head.gathered(matmul_dtype(hidden)).detached().on(device)
    return head if config.vocabulary is None else head.first(config.vocabulary)
