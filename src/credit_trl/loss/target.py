"""Target of each token from f and Ĝ, and the divergence of the student from it with its gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from credit_trl import objective
from credit_trl.loss.scores import Scores, SupportConfig
from credit_trl.objective import Form


@dataclass
class Target:
    """Target a at n positions.

    Args:
        logps: (n, B) or (n, V), a, not normalised.
        contrastive_coef: (n,), λ as applied: 0 where there is no contrast.
        token_logps: (n,), a at the sampled token.
        kl_to_teacher: (n,), `KL(softmax(a) ‖ f)` over the same buckets, nats.
    """

    logps: Float[Tensor, "n b"]
    contrastive_coef: Float[Tensor, " n"]
    token_logps: Float[Tensor, " n"]
    kl_to_teacher: Float[Tensor, " n"]


def support_target(
    scores: Scores, contrastive_coef: Float[Tensor, " n"], form: Form, support: SupportConfig
) -> Target:
    """The target over the buckets of a support.

    With `"renormalize"` f is conditional on the support, as Ĝ is.
    """
    teacher, generic = scores.teacher_logps, scores.generic_logps
    if support.renormalizes:
        teacher = objective.renormalize(teacher)
    target = objective.credit_target(teacher, generic, contrastive_coef, form)
    token_scores = (scores.teacher_token_logps.unsqueeze(-1), scores.generic_token_logps.unsqueeze(-1))
    token_logps = objective.credit_target(*token_scores, contrastive_coef, form).squeeze(-1)
    normalized = objective.renormalize(target)
    kl = torch.linalg.vecdot(normalized.exp(), normalized - objective.renormalize(teacher))
    return Target(target, contrastive_coef, token_logps, kl)


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
