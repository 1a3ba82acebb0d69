"""The loss of each token and its gradient, from log-probabilities that are at hand."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from credit_trl import objective
from credit_trl.kernels.scores import Support, Tail, renormalizes


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
