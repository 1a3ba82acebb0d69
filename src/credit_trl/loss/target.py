"""Target of each token from f and Ĝ, and the divergence of the student from it with its gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from credit_trl import objective
from credit_trl.loss.scores import Scores, SupportConfig
from credit_trl.objective import ContrastRule


@dataclass
class Target:
    """Target a at n positions.

    Args:
        logps: (n, B) or (n, V), a, not normalised.
        contrastive_coef: (n,), λ as applied: 0 where there is no contrast or the gate is closed.
        token_logps: (n,), a at the sampled token.
        kl_to_teacher: (n,), `KL(softmax(a) ‖ f)` over the same buckets, nats.
    """

    logps: Float[Tensor, "n b"]
    contrastive_coef: Float[Tensor, " n"]
    token_logps: Float[Tensor, " n"]
    kl_to_teacher: Float[Tensor, " n"]


def support_target(
    scores: Scores, contrastive_coef: Float[Tensor, " n"], rule: ContrastRule, support: SupportConfig
) -> Target:
    """The target over the buckets of a support.

    With `"renormalize"` f is conditional on the support, as Ĝ is. The gate compares the buckets; for `"sampled"` these
    are the sampled token and the rest.
    """
    teacher, generic = scores.teacher_logps, scores.generic_logps
    if support.renormalizes:
        teacher = objective.renormalize(teacher)
    if rule.gate > 0.0:
        both = (objective.add_tail_bucket(x) if support.kind == "sampled" else x for x in (teacher, generic))
        contrastive_coef = contrastive_coef * (objective.total_variation(*both) > rule.gate)
    target = objective.credit_target(teacher, generic, contrastive_coef, rule.form)
    token_scores = (scores.teacher_token_logps.unsqueeze(-1), scores.generic_token_logps.unsqueeze(-1))
    token_logps = objective.credit_target(*token_scores, contrastive_coef, rule.form).squeeze(-1)
    normalized = objective.renormalize(target)
    kl = torch.linalg.vecdot(normalized.exp(), normalized - objective.renormalize(teacher))
    return Target(target, contrastive_coef, token_logps, kl)


def vocabulary_target(
    teacher_logps: Float[Tensor, "n V"],
    generic_logps: Float[Tensor, "n V"],
    token_ids: Int[Tensor, "n 1"],
    contrastive_coef: Float[Tensor, " n"],
    rule: ContrastRule,
    scratch: Float[Tensor, "n V"],
) -> Target:
    """The target over the vocabulary, written to the buffer of `teacher_logps`; overwrites the other two buffers."""
    if rule.gate > 0.0:
        torch.sub(generic_logps, generic_logps.logsumexp(dim=-1, keepdim=True), out=scratch)
        shared = torch.minimum(scratch, teacher_logps, out=scratch).exp_().sum(dim=-1)
        contrastive_coef = contrastive_coef * (1.0 - shared > rule.gate)
    is_guide = rule.form == "guide"
    shift = torch.sub(teacher_logps, generic_logps, out=generic_logps) if is_guide else generic_logps.neg_()
    shift.mul_(contrastive_coef.unsqueeze(-1))
    target = teacher_logps.add_(shift)
    normalizer = target.logsumexp(dim=-1)
    q = torch.sub(target, normalizer.unsqueeze(-1), out=scratch).exp_()
    kl = torch.linalg.vecdot(q, shift) - normalizer  # f = a − shift is normalised
    return Target(target, contrastive_coef, target.gather(-1, token_ids).squeeze(-1), kl)


def support_divergence(
    columns: Float[Tensor, "n K"],
    log_outside: Float[Tensor, " n"] | None,
    target: Float[Tensor, "n B"],
    alpha: float,
    support: SupportConfig,
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"], Float[Tensor, "n K"], Float[Tensor, " n"] | None]:
    """ℓ, `KL(p ‖ softmax(a))`, dℓ/d columns and dℓ/d log_outside, by the equations of `objective`.

    Args:
        columns: log-probabilities of the student on the support; logits where the support is renormalised.
        log_outside: log of the student's probability outside the support, where that is a bucket.
        target: a, not normalised.
        alpha: see `objective.distillation_loss`.
    """
    target = target.to(columns.dtype)
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (columns, log_outside) if x is not None]
        columns = leaves[0]
        if support.kind == "sampled":
            advantages = (target - columns).detach()
            token_loss, kl = -(advantages * columns).sum(dim=-1), -advantages.squeeze(-1)
        else:
            student_logps = (
                objective.renormalize(columns) if support.renormalizes else objective.add_tail_bucket(*leaves)
            )
            normalized = objective.renormalize(target)
            token_loss = objective.distillation_loss(
                student_logps, normalized if support.renormalizes else target, alpha
            )
            kl = objective.distillation_loss(student_logps.detach(), normalized, alpha=1.0)
        grads = torch.autograd.grad(token_loss.sum(), leaves)
    return token_loss.detach(), kl, grads[0], grads[1] if len(grads) > 1 else None


def vocabulary_divergence(
    logps: Float[Tensor, "n V"], target: Float[Tensor, "n V"], alpha: float
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"], Float[Tensor, "n V"]]:
    """ℓ, `KL(p ‖ softmax(a))` and dℓ/d logits over the vocabulary, in closed form; overwrites both arguments.

    With p the student and q = softmax(a): α = 1 gives `p (log p − a − ℓ)`, α = 0 gives `p − q`, and between them
    `(1−α) p (log p/m − KL(p ‖ m))`.
    """
    normalizer = target.logsumexp(dim=-1)
    if alpha == 1.0:
        gap = torch.sub(logps, target, out=target)
        probs = logps.exp_()
        token_loss = torch.linalg.vecdot(probs, gap)
        return token_loss, token_loss + normalizer, gap.sub_(token_loss.unsqueeze(-1)).mul_(probs)
    target.sub_(normalizer.unsqueeze(-1))
    probs = logps.exp()
    kl = torch.linalg.vecdot(probs, logps) - torch.linalg.vecdot(probs, target)
    if alpha == 0.0:
        target_probs = target.exp()
        token_loss = torch.linalg.vecdot(target_probs, target.sub_(logps))
        return token_loss, kl, probs.sub_(target_probs)
    mixture = torch.logaddexp(logps + math.log1p(-alpha), target + math.log(alpha))
    to_target = torch.linalg.vecdot(target.exp(), target.sub_(mixture))
    gap = logps.sub_(mixture)
    to_student = torch.linalg.vecdot(probs, gap)
    grads = gap.sub_(to_student.unsqueeze(-1)).mul_(probs).mul_(1.0 - alpha)
    return (1.0 - alpha) * to_student + alpha * to_target, kl, grads
