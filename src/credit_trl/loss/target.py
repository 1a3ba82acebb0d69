"""Target of each token from f and Ĝ, and the divergence of the student from it with its gradient."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from credit_trl import objective
from credit_trl.loss.scores import Scores, SupportConfig
from credit_trl.objective import Form


def support_target(
    scores: Scores, contrastive_coef: Float[Tensor, " n"], form: Form, support: SupportConfig
) -> tuple[Float[Tensor, "n B"], Float[Tensor, " n"], Float[Tensor, " n"]]:
    """The target a over the buckets of a support, not normalised.

    With `"renormalize"` f is conditional on the support, as Ĝ is.

    Returns:
        a; a at the sampled token; and `KL(softmax(a) ‖ f)` over the same buckets, nats.
    """
    teacher = scores.teacher_logps
    if support.renormalizes:
        teacher = objective.renormalize(teacher)
    target = objective.credit_target(teacher, scores.generic_logps, contrastive_coef, form)
    token_teacher = scores.teacher_token_logps.unsqueeze(-1)
    token_generic = scores.generic_token_logps.unsqueeze(-1)
    token_target = objective.credit_target(token_teacher, token_generic, contrastive_coef, form).squeeze(-1)
    normalized = objective.renormalize(target)
    kl = torch.linalg.vecdot(normalized.exp(), normalized - objective.renormalize(teacher))
    return target, token_target, kl


def support_divergence(
    values: Float[Tensor, "n K"],
    log_outside: Float[Tensor, " n"] | None,
    target: Float[Tensor, "n B"],
    alpha: float,
    support: SupportConfig,
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"], Float[Tensor, "n K"], Float[Tensor, " n"] | None]:
    """ℓ, `KL(p ‖ softmax(a))`, dℓ/d values and dℓ/d log_outside, by the equations of `objective`.

    Args:
        values: log-probabilities of the student on the support; logits where the support is renormalised.
        log_outside: log of the student's probability outside the support, where that is a bucket.
        target: a, not normalised.
        alpha: see `objective.distillation_loss`.
    """
    target = target.to(values.dtype)
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (values, log_outside) if x is not None]
        values = leaves[0]
        if support.kind == "sampled":
            advantages = (target - values).detach()
            token_loss = -(advantages * values).sum(dim=-1)
            kl = -advantages.squeeze(-1)
        else:
            normalized = objective.renormalize(target)
            if support.renormalizes:
                student_logps = objective.renormalize(values)
                target = normalized
            else:
                student_logps = objective.add_tail_bucket(*leaves) if support.has_tail else values
            token_loss = objective.distillation_loss(student_logps, target, alpha)
            kl = objective.distillation_loss(student_logps.detach(), normalized, alpha=1.0)
        grads = torch.autograd.grad(token_loss.sum(), leaves)
    return token_loss.detach(), kl, grads[0], grads[1] if support.has_tail else None
