"""The paper's objective: one pure function per equation.

Symbols (natural logs, of a token or bucket `v` at position `t`):

    f_t(v)   = log π_ref(v | x, y_<t, z)        teacher with privileged context z       `teacher_logps`
    g_k,t(v) = log π_ref(v | x'_k, y_<t, z)     teacher under contrast prompt x'_k      `contrast_logps`
    Ĝ_t(v)   = (1/C) Σ_k g_k,t(v)               input-generic baseline                  `generic_logps`
    p_t(v)   = π_θ(v | x, y_<t)                 student                                 `student_logps`

Not in the paper is the form `"guide"` (`docs/options.md`).

The last dimension is the vocabulary, or the buckets of a truncated support: K tokens and, with a tail bucket, one
bucket for the rest. Leading dimensions are free. The first dimension of `contrast_logps` is C.
"""

from collections.abc import Iterable
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

# Upper bound on the log-probability of the support, so that `log(1 - Σp)` stays finite.
_MAX_LOG_MASS = -1e-7
# Replaces −∞, the logit of a forbidden token: its exp is 0, and differences and products with 0 stay finite.
IMPOSSIBLE = -1e15
# Log-probabilities up to here, or their mean over contrasts, are of forbidden tokens.
FORBIDDEN = -1e13

Form = Literal["subtract", "guide"]


def self_distillation_reward(
    teacher_logps: Float[Tensor, "*t v"], student_logps: Float[Tensor, "*t v"]
) -> Float[Tensor, "*t v"]:
    """r_t(v) = f_t(v) − log p_t(v), Eq. 2. At the sampled token it is ΔV_t, Eq. 3."""
    return teacher_logps - student_logps


def input_generic(contrast_logps: Float[Tensor, "c *t v"]) -> Float[Tensor, "*t v"]:
    """Ĝ_t(v) = (1/C) Σ_k g_k,t(v): the sample estimate of G_t in Eq. 6, a mean of logs over dim 0."""
    return contrast_logps.mean(dim=0)


def streamed_input_generic(contrast_logps: Iterable[Float[Tensor, "*t v"]], count: int) -> Float[Tensor, "*t v"]:
    """`input_generic` of C contrasts, `count`, that are computed one at a time: no (C, …) tensor exists."""
    generic = 0.0
    for logps in contrast_logps:
        generic = generic + logps / count
    return generic


def input_specific(
    teacher_logps: Float[Tensor, "*t v"], contrast_logps: Float[Tensor, "c *t v"]
) -> Float[Tensor, "*t v"]:
    """Ŝ_t(v) = f_t(v) − Ĝ_t(v), Eq. 6 with the estimate of §3.4 (Proposition 3)."""
    return specific_part(teacher_logps, input_generic(contrast_logps))


def specific_part(teacher_logps: Float[Tensor, "*t v"], generic_logps: Float[Tensor, "*t v"]) -> Float[Tensor, "*t v"]:
    """Ŝ_t(v) = f_t(v) − Ĝ_t(v) of a given Ĝ."""
    return teacher_logps - generic_logps


def credit_target(
    teacher_logps: Float[Tensor, "*t v"],
    generic_logps: Float[Tensor, "*t v"],
    contrastive_coef: float | Float[Tensor, "*t"],
    form: Form = "subtract",
) -> Float[Tensor, "*t v"]:
    """a_t(v) = f_t(v) − λ Ĝ_t(v), the target of the student, not normalised.

    λ is one number, or one per position (0 where a sample has no contrast prompt). The form `"guide"` is
    `f + λ (f − Ĝ)`, which equals f where teacher and contrasts agree. The target of a token that the teacher or a
    contrast forbids is `IMPOSSIBLE`.
    """
    is_forbidden = torch.minimum(teacher_logps, generic_logps) <= FORBIDDEN
    if isinstance(contrastive_coef, Tensor):
        contrastive_coef = contrastive_coef.unsqueeze(-1)
    if form == "guide":
        target = teacher_logps + contrastive_coef * (teacher_logps - generic_logps)
    else:
        target = teacher_logps - contrastive_coef * generic_logps
    return target.masked_fill(is_forbidden, IMPOSSIBLE)


def credit_advantages(
    teacher_logps: Float[Tensor, "*t v"],
    contrast_logps: Float[Tensor, "c *t v"],
    student_logps: Float[Tensor, "*t v"],
    contrastive_coef: float | Float[Tensor, "*t"],
    form: Form = "subtract",
) -> Float[Tensor, "*t v"]:
    """R_t(v) = r_t(v) − (λ/C) Σ_k g_k,t(v), Eq. 8. λ = 0 is the self-distillation reward of Eq. 2.

    With the form `"guide"` it is `r_t(v) + λ Ŝ_t(v)`.
    """
    target = credit_target(teacher_logps, input_generic(contrast_logps), contrastive_coef, form)
    return advantage(target, student_logps)


def advantage(target_logps: Float[Tensor, "*t v"], student_logps: Float[Tensor, "*t v"]) -> Float[Tensor, "*t v"]:
    """R_t(v) = a_t(v) − log p_t(v), of a given target, see `credit_target`."""
    return target_logps - student_logps


def distillation_loss(
    student_logps: Float[Tensor, "*t v"], target_logps: Float[Tensor, "*t v"], alpha: float
) -> Float[Tensor, "*t"]:
    """Divergence between student and target at each position, differentiable in `student_logps`.

    Args:
        student_logps: log p, normalised over the last dimension.
        target_logps: a, see `credit_target`; not necessarily normalised, without gradient.
        alpha: 1 is the reverse KL `Σ_v p (log p − a)`, whose gradient on a complete support is
            `−Σ_v ∇p_t(v) · sg[R_t(v)]`, line 8 of Algorithm 1 (the normaliser of `a` is constant);
            0 is the forward KL `KL(q ‖ p)`; between them `(1−α) KL(p ‖ m) + α KL(q ‖ m)` with `m = (1−α) p + α q`.
            There `q = softmax(a)`.

    Returns:
        One loss per position, in nats. Tokens of probability 0 contribute 0, as p log p does; the loss is infinite
        where a token has none in the second distribution of a KL divergence alone.
    """
    target_logps = target_logps.detach()
    if alpha == 1.0:
        return _mean(student_logps, student_logps - target_logps)
    target_logps = renormalize(target_logps)
    if alpha == 0.0:
        return _mean(target_logps, target_logps - student_logps)
    student_logps = student_logps.clamp(min=IMPOSSIBLE)  # `logaddexp` of two −∞ has no gradient
    log_alpha = student_logps.new_tensor(alpha).log()
    log_rest = student_logps.new_tensor(1.0 - alpha).log()
    mixture = torch.logaddexp(student_logps + log_rest, target_logps + log_alpha)
    to_student = _mean(student_logps, student_logps - mixture)
    to_target = _mean(target_logps, target_logps - mixture)
    return (1.0 - alpha) * to_student + alpha * to_target


def _mean(logps: Float[Tensor, "*t v"], values: Float[Tensor, "*t v"]) -> Float[Tensor, "*t"]:
    """Σ_v p(v) x(v), without tokens of probability 0; x is a difference of log-probabilities, and may be infinite."""
    probabilities = logps.exp()
    values = values.masked_fill(values >= -FORBIDDEN, torch.inf).masked_fill(probabilities == 0.0, 0.0)
    return (probabilities * values).sum(-1)


def add_tail_bucket(
    logps: Float[Tensor, "*t k"], log_outside: Float[Tensor, "*t"] | None = None
) -> Float[Tensor, "*t k+1"]:
    """Append `log(1 − Σ_k p_k)`, the probability outside the support, so that the buckets sum to one.

    Args:
        logps: log-probabilities of distinct tokens.
        log_outside: the same value summed over the tokens outside, where available. It is exact for any value; the
            difference from 1 keeps one digit in fp32 with 1e-6 outside, and is at least 1e-7.
    """
    if log_outside is None:
        log_mass = torch.logsumexp(logps, dim=-1).clamp(max=_MAX_LOG_MASS)
        log_outside = torch.log(-torch.expm1(log_mass))
    return torch.cat([logps, log_outside.unsqueeze(-1)], dim=-1)


def renormalize(logps: Float[Tensor, "*t k"]) -> Float[Tensor, "*t k"]:
    """Log-probabilities conditional on the support: `log_softmax` over the last dimension."""
    return torch.log_softmax(logps, dim=-1)
