"""Scoring phase: the teacher's scores of a whole generation batch, without gradient.

Supports that depend on the live student are scored inside the optimizer step instead: `gather_states` then returns the
hidden states of the teacher for one micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor, nn

from credit_trl.contexts.tokens import CompletionBatch, TokenContexts
from credit_trl.loss.head import Kernels, LMHead, lm_head, matmul_dtype
from credit_trl.loss.scores import Scores, SupportConfig, TeacherStates, score_tokens
from credit_trl.loss.trust_region import TrustRegion, joint_head, weighted_states
from credit_trl.objective import Baseline
from credit_trl.teacher.causal_lm import head_input
from credit_trl.teacher.models import Teacher
from credit_trl.teacher.passes import PassConfig, token_states


@dataclass(frozen=True)
class ScoringConfig:
    """How completions are scored.

    Args:
        temperature: rollout temperature; logits are divided by it.
        baseline: average over the contrasts, see `objective.input_generic`.
        passes: size and layout of the forward passes.
        kernels: implementation of the passes over rows of logits, see `LMHead`.
        chunk_size: tokens per logits chunk; None picks from free memory.
        vocabulary: V of the policy; rows of the teacher's head beyond it are padding.
    """

    support: SupportConfig = field(default_factory=SupportConfig)
    temperature: float = 1.0
    baseline: Baseline = "mean_log"
    passes: PassConfig = field(default_factory=PassConfig)
    kernels: Kernels = "torch"
    chunk_size: int | None = None
    vocabulary: int | None = None
    region: TrustRegion | None = None


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
            hidden, contrasts = (weighted_states(h, head, config.region) for h in (states.teacher, states.contrasts))
            of_passes = TeacherStates(hidden, contrasts, head, config.baseline)
            part = score_tokens(of_passes, batch.ids[at], config.support, config.chunk_size)
            for name, values in scores.items():
                values[at] = getattr(part, name).to(values.dtype)
    return scores


def gather_states(
    teacher: Teacher, contexts: Sequence[TokenContexts], batch: CompletionBatch, config: ScoringConfig
) -> TeacherStates:
    """Hidden states of the teacher for the N tokens of `batch.loss_mask`, in row-major order, without scoring them."""
    mask = batch.loss_mask
    order = torch.full(mask.shape, -1, dtype=torch.long, device=mask.device)
    order[mask] = torch.arange(int(mask.sum()), device=mask.device)
    count = max((len(c.contrasts) for c in contexts if c.teacher is not None), default=0)
    with teacher.active() as model:
        head = _teacher_head(teacher, model, config, batch)
        hidden = head.weight.new_zeros(1 + count, int(mask.sum()), head.weight.shape[1])
        for states in token_states(teacher, model, contexts, batch, config.passes):
            hidden = hidden.to(states.teacher.dtype)
            tokens = order[states.rows, states.columns]
            hidden[0, tokens] = states.teacher
            hidden[1 : 1 + len(states.contrasts), tokens] = states.contrasts
    hidden = weighted_states(hidden, head, config.region)
    return TeacherStates(hidden[0], hidden[1:], head, config.baseline)


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
    heads, device = [], batch.ids.device
    for part in teacher.parts(model):
        unwrapped = teacher.unwrapped(part)
        head = lm_head(unwrapped, config.temperature, config.kernels)
        with teacher.autocast():
            hidden = head_input(unwrapped, torch.empty(0, dtype=head.weight.dtype, device=device))
        head = head.gathered(matmul_dtype(hidden)).detached().on(device)
        heads.append(head if config.vocabulary is None else head.first(config.vocabulary))
    return joint_head(heads)
