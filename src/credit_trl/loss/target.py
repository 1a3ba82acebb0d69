"""The target of each token, from f and Ĝ: on a support, or in place over the vocabulary."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from credit_trl import objective
from credit_trl.loss.scores import Scores, Support, Tail, renormalizes
from credit_trl.objective import ContrastRule


@dataclass
class Target:
    """What the student is pulled towards at n positions.

    Args:
        logps: (n, B) or (n, V), a, not normalised.
        contrastive_coef: (n,), λ as it entered: 0 where there is no contrast or the gate is shut.
        token_logps: (n,), a at the sampled token.
        kl_to_teacher: (n,), `KL(softmax(a) ‖ f)` over the same buckets, nats.
    """

    logps: Float[Tensor, "n b"]
    contrastive_coef: Float[Tensor, " n"]
    token_logps: Float[Tensor, " n"]
    kl_to_teacher: Float[Tensor, " n"]


def support_target(
    scores: Scores,
    token_ids: Int[Tensor, "n 1"],
    contrastive_coef: Float[Tensor, " n"],
    rule: ContrastRule,
    *,
    support: Support,
    tail: Tail,
) -> Target:
    """The target over the buckets of a support.

    With `"renormalize"` f is taken within the support, as Ĝ is. The gate looks at the buckets (a sampled token and
    all the rest are two). Plausibility is a matter of single tokens: the tail bucket, and a sampled token that lies
    in it, keep `a = f` where a mask is set, as if no token of the tail were plausible.
    """
    teacher, generic = scores.teacher_logps, scores.generic_logps
    if renormalizes(support, tail):
        teacher = objective.renormalize(teacher)
    if rule.gate > 0.0:
        both = (objective.add_tail_bucket(x) if support == "sampled" else x for x in (teacher, generic))
        contrastive_coef = contrastive_coef * (objective.total_variation(*both) > rule.gate)
    contrasted, token_coef = None, contrastive_coef
    if rule.plausibility > 0.0:
        contrasted, at_token = _plausible(teacher, scores.support_ids, token_ids, rule.plausibility)
        token_coef = contrastive_coef * at_token
    target = objective.credit_target(teacher, generic, contrastive_coef, rule.form, contrasted)
    token_logps = _at_token(scores.teacher_token_logps, scores.generic_token_logps, token_coef, rule)
    return Target(target, contrastive_coef, token_logps, _divergence(target, teacher))


def vocabulary_target(
    teacher_logps: Float[Tensor, "n V"],
    generic_logps: Float[Tensor, "n V"],
    token_ids: Int[Tensor, "n 1"],
    contrastive_coef: Float[Tensor, " n"],
    rule: ContrastRule,
    scratch: Float[Tensor, "n V"],
) -> Target:
    """The target over the vocabulary, in the teacher's buffer; uses up the other two."""
    if rule.gate > 0.0:
        torch.sub(generic_logps, generic_logps.logsumexp(dim=-1, keepdim=True), out=scratch)
        shared = torch.minimum(scratch, teacher_logps, out=scratch).exp_().sum(dim=-1)
        contrastive_coef = contrastive_coef * (1.0 - shared > rule.gate)
    implausible = None
    if rule.plausibility > 0.0:
        implausible = objective.plausible_tokens(teacher_logps, rule.plausibility).logical_not_()
    is_guide = rule.form == "guide"
    shift = torch.sub(teacher_logps, generic_logps, out=generic_logps) if is_guide else generic_logps.neg_()
    if implausible is not None:
        shift.masked_fill_(implausible, 0.0)
    shift.mul_(contrastive_coef.unsqueeze(-1))
    target = teacher_logps.add_(shift)
    normalizer = target.logsumexp(dim=-1)
    q = torch.sub(target, normalizer.unsqueeze(-1), out=scratch).exp_()
    kl = torch.linalg.vecdot(q, shift) - normalizer  # f = a − shift is normalised
    return Target(target, contrastive_coef, target.gather(-1, token_ids).squeeze(-1), kl)


def _plausible(
    teacher_logps: Float[Tensor, "n B"], support_ids: Int[Tensor, "n K"], token_ids: Int[Tensor, "n 1"], share: float
) -> tuple[Bool[Tensor, "n B"], Bool[Tensor, " n"]]:
    """Which buckets the contrast touches, and whether it touches the sampled token."""
    size = support_ids.shape[-1]
    tokens = objective.plausible_tokens(teacher_logps[:, :size], share)
    nothing = tokens.new_zeros(len(tokens), teacher_logps.shape[-1] - size)
    return torch.cat([tokens, nothing], dim=-1), (tokens & (support_ids == token_ids)).any(dim=-1)


def _at_token(teacher: Tensor, generic: Tensor, coef: Tensor, rule: ContrastRule) -> Float[Tensor, " n"]:
    return objective.credit_target(teacher.unsqueeze(-1), generic.unsqueeze(-1), coef, rule.form).squeeze(-1)


def _divergence(target: Float[Tensor, "n B"], teacher_logps: Float[Tensor, "n B"]) -> Float[Tensor, " n"]:
    target, teacher_logps = objective.renormalize(target), objective.renormalize(teacher_logps)
    return torch.linalg.vecdot(target.exp(), target - teacher_logps)


def support_divergence(
    columns: Float[Tensor, "n K"],
    log_outside: Float[Tensor, " n"] | None,
    target: Float[Tensor, "n B"],
    *,
    alpha: float,
    support: Support,
    tail: Tail,
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"], Float[Tensor, "n K"], Float[Tensor, " n"] | None]:
    """ℓ, `KL(p ‖ softmax(a))`, dℓ/d columns and dℓ/d log_outside, by the equations of `objective`.

    Args:
        columns: the student's log-probabilities of the support; where the support is renormalised any logits do.
        log_outside: the log of its mass outside the support, where that is a bucket.
        target: a, not normalised.
    """
    target = target.to(columns.dtype)
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (columns, log_outside) if x is not None]
        columns = leaves[0]
        if support == "sampled":
            advantages = (target - columns).detach()
            token_loss, kl = -(advantages * columns).sum(dim=-1), -advantages.squeeze(-1)
        else:
            within = renormalizes(support, tail)
            student_logps = objective.renormalize(columns) if within else objective.add_tail_bucket(*leaves)
            normalized = objective.renormalize(target)
            token_loss = objective.distillation_loss(student_logps, normalized if within else target, alpha)
            kl = objective.distillation_loss(student_logps.detach(), normalized, alpha=1.0)
        grads = torch.autograd.grad(token_loss.sum(), leaves)
    return token_loss.detach(), kl, grads[0], grads[1] if len(grads) > 1 else None


def vocabulary_divergence(
    logps: Float[Tensor, "n V"], target: Float[Tensor, "n V"], alpha: float
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"], Float[Tensor, "n V"]]:
    """The same over the vocabulary, with dℓ/d logits in closed form; uses up both arguments.

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
