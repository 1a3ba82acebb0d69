"""Targets of arms before training: a frozen teacher draws the student to softmax(a), from which one can sample.

A group has several z, so a is the mean over its teacher's and its contrast prompts. Where z states the answer, a
target succeeds by copying it. A *gated* target is the policy wherever the teacher's next token depends on which z it
reads: the total variation between its distributions with z of the group and of another prompt exceeds `GATE`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from credit_trl import objective
from credit_trl.contexts.tokens import TokenContexts
from credit_trl.lab.analysis.checkpoints import Checkpoint
from credit_trl.lab.analysis.vocabulary_logps import CreditFormula, vocabulary_logps
from credit_trl.objective import Form
from credit_trl.teacher.models import Teacher

GATE = 0.2  # total variation above which a gated target is the policy
_LOG_WEIGHTS = (-12.0, 6.0)  # bounds on the log of an importance weight


@dataclass(frozen=True)
class Arm:
    """A way to train: the target with λ and a form, or GRPO, which has none."""

    name: str
    contrastive_coef: float | None  # None for GRPO
    form: Form = "subtract"
    gated: bool = False  # whether its target is gated

    def options(self) -> dict[str, Any]:
        """Options of `CreditConfig`."""
        if self.contrastive_coef is None:
            return {"distillation_weight": 0.0}
        return {"contrastive_coef": self.contrastive_coef, "contrastive_form": self.form}


@dataclass(frozen=True)
class GroupPrompts:
    """Token ids of what is read in place of x: x, x with z of another prompt, (x, z), (x'_k, z), and further ones."""

    ids: list[list[int]]  # in this order
    teacher: int  # number of (x, z)
    contrasts: int  # number of (x'_k, z)

    def of(self, arm: Arm) -> list[int]:
        """Indices of the prompts that the target of an arm is computed from."""
        end = 2 + self.teacher + (self.contrasts if arm.contrastive_coef else 0)
        return [0, *range(1 if arm.gated else 2, end)]


def target_logps(
    logps: Float[Tensor, "P *n V"], prompts: GroupPrompts, arm: Arm, formula: CreditFormula
) -> Float[Tensor, "*n V"]:
    """Log-probabilities of an arm's target from those of the group's prompts.

    Support and tail are those of `formula`. Tokens outside the support share the tail as under the policy; the loss
    with a renormalised support leaves the policy's probability of the support as it is.
    """
    policy = logps[0]
    end = 2 + prompts.teacher
    teacher = logps[2:end].mean(0).log_softmax(-1)
    buckets = logps[2 : end + prompts.contrasts]
    support = None
    if formula.topk is not None and formula.topk < logps.shape[-1]:
        support = teacher.topk(formula.topk, dim=-1).indices
        ids = support.expand(len(buckets), *support.shape)
        outside = buckets.scatter(-1, ids, -torch.inf).logsumexp(-1)
        buckets = buckets.gather(-1, ids)
        has_tail = formula.tail == "bucket"
        buckets = objective.add_tail_bucket(buckets, outside) if has_tail else objective.renormalize(buckets)
    f = buckets[: prompts.teacher].mean(0)
    g = buckets[prompts.teacher :]
    target = f
    if len(g):
        target = objective.credit_target(f, objective.input_generic(g), arm.contrastive_coef, arm.form)
    if support is not None:
        outside = policy.scatter(-1, support, -torch.inf)
        if has_tail:
            outside = outside.log_softmax(-1) + target[..., -1:]
            target = target[..., :-1]
        else:
            target = target.log_softmax(-1) + policy.gather(-1, support).logsumexp(-1, keepdim=True)
        target = outside.scatter(-1, support, target)
    target = target.log_softmax(-1)
    if not arm.gated:
        return target
    leak = 0.5 * (teacher.exp() - logps[1].exp()).abs().sum(-1, keepdim=True)
    return torch.where(leak > GATE, policy, target)


def importance_weights(
    checkpoint: Checkpoint,
    prompts: GroupPrompts,
    token_ids: Sequence[int],
    arms: Sequence[Arm],
    formula: CreditFormula,
) -> list[float]:
    """Target over policy, of one response of the policy, for each arm."""
    logs = np.zeros(len(arms))
    contexts = TokenContexts(prompts.ids[0], prompts.ids[1 : 2 + prompts.teacher + prompts.contrasts])
    passes = vocabulary_logps([(checkpoint.student, contexts)], token_ids, temperature=formula.temperature)
    for rows, (logps,) in passes:
        sampled = torch.tensor(token_ids[rows], device=logps.device)[:, None]
        for i, arm in enumerate(arms):
            ratio = target_logps(logps, prompts, arm, formula) - logps[0]
            logs[i] += ratio.gather(-1, sampled).sum().item()
    return np.exp(logs.clip(*_LOG_WEIGHTS)).tolist()


@torch.no_grad()
def decode(
    checkpoint: Checkpoint,
    prompts: GroupPrompts,
    sources: Sequence[Arm | int],
    formula: CreditFormula,
    uniforms: Sequence[float],
) -> list[list[int]]:
    """Token ids of one answer from each source: an arm's target, or the model after the prompt of an index.

    All sources use the same uniform random numbers, one a token, so their answers differ where they do.
    """
    ends = checkpoint.end_ids()
    prompts_of_source = []
    for source in sources:
        prompts_of_source.append([source] if isinstance(source, int) else prompts.of(source))
    reader = _Reader(checkpoint.student, prompts.ids, prompts_of_source, ends[0])
    completions: list[list[int]] = [[] for _ in sources]
    tokens = None
    for uniform in uniforms:
        logps = (reader.read(tokens) / formula.temperature).log_softmax(-1)
        chosen = []
        for i, source in enumerate(sources):
            is_prompt = isinstance(source, int)
            chosen.append(logps[source, i] if is_prompt else target_logps(logps[:, i], prompts, source, formula))
        cumulative = torch.stack(chosen).double().exp().cumsum(-1)
        tokens = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)[:, 0]
        tokens = tokens.clamp(max=cumulative.shape[-1] - 1)
        unfinished = [ids for ids in completions if not ids or ids[-1] not in ends]
        for ids, token in zip(completions, tokens.tolist(), strict=True):
            if ids in unfinished:
                ids.append(token)
        if not unfinished:
            break
    return completions


class _Reader:
    """Keys and values of prompts, copied for each source that reads them, which continues with its own answer."""

    def __init__(
        self, model: Teacher, prompts: Sequence[list[int]], prompts_of_source: Sequence[list[int]], padding: int
    ) -> None:
        self.model = model
        pairs = []
        for source, indices in enumerate(prompts_of_source):
            pairs += [(prompt, source) for prompt in indices]
        self.pairs = torch.tensor(pairs, device=model.device).T  # prompt and source of each row
        self.shape = (len(prompts), len(prompts_of_source))
        rows = [torch.tensor(ids, device=model.device) for ids in prompts]
        self.ids = pad_sequence(rows, batch_first=True, padding_value=padding, padding_side="left")
        self.mask = pad_sequence(list(map(torch.ones_like, rows)), batch_first=True, padding_side="left")
        self.cache: Any = None

    def read(self, tokens: Int[Tensor, " J"] | None) -> Float[Tensor, "P J V"]:
        """Logits of the next token after `tokens`, the latest of each source; None reads the prompts.

        They are 0 where a source does not read the prompt.
        """
        positions = (self.mask.cumsum(-1) - 1).clamp(min=0)
        if tokens is not None:
            self.ids = tokens[self.pairs[1]][:, None]
            self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.mask), 1)], dim=-1)
            positions = positions[:, -1:] + 1
        inputs = {"input_ids": self.ids, "attention_mask": self.mask, "position_ids": positions}
        with self.model.active() as active, self.model.autocast():
            output = active(**inputs, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        logits = output.logits[:, -1].float()
        if tokens is None:
            self.cache = output.past_key_values
            self.cache.batch_select_indices(self.pairs[0])
            self.mask = self.mask[self.pairs[0]]
            logits = logits[self.pairs[0]]
        placed = logits.new_zeros(*self.shape, logits.shape[-1])
        placed[self.pairs[0], self.pairs[1]] = logits
        return placed
