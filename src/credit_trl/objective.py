"""The paper's objective: one pure function per equation.

Symbols (natural logs, of a token or bucket `v` at position `t`):

    f_t(v)   = log π_ref(v | x, y_<t, z)        teacher with privileged context z       `teacher_logps`
    g_k,t(v) = log π_ref(v | x'_k, y_<t, z)     teacher under contrast prompt x'_k      `contrast_logps`
    Ĝ_t(v)   = (1/C) Σ_k g_k,t(v)               input-generic baseline                  `generic_logps`
    p_t(v)   = π_θ(v | x, y_<t)                 student                                 `student_logps`

Not in the paper are the contrasts of `docs/contrast.md`: the form `"guide"`, the baseline `"log_mean"` and the gate;
and the functions below `credit_rewards`, which use the credit beside a verifier's reward, each from the paper that it
cites.

The last dimension is the vocabulary, or the buckets of a truncated support: K tokens and, with a tail bucket, one
bucket for the rest. Leading dimensions are free. The first dimension of `contrast_logps` is C.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

# Upper bound on the log-probability of the support, so that `log(1 - Σp)` stays finite.
_MAX_LOG_MASS = -1e-7

Form = Literal["subtract", "guide"]
Baseline = Literal["mean_log", "log_mean"]


@dataclass(frozen=True)
class ContrastRule:
    """Form of the contrast and the positions where it applies.

    Args:
        form: `"subtract"`, the paper's `f − λ Ĝ`, or `"guide"`, `f + λ (f − Ĝ)`.
        gate: total variation between teacher and contrast that a position must exceed; 0 contrasts every position.
    """

    form: Form = "subtract"
    gate: float = 0.0


def self_distillation_reward(
    teacher_logps: Float[Tensor, "*t v"], student_logps: Float[Tensor, "*t v"]
) -> Float[Tensor, "*t v"]:
    """r_t(v) = f_t(v) − log p_t(v), Eq. 2. At the sampled token it is ΔV_t, Eq. 3."""
    return teacher_logps - student_logps


def input_generic(contrast_logps: Float[Tensor, "c *t v"], baseline: Baseline = "mean_log") -> Float[Tensor, "*t v"]:
    """Ĝ_t(v) = (1/C) Σ_k g_k,t(v): the sample estimate of G_t in Eq. 6, a mean of logs over dim 0.

    `"log_mean"` is `log (1/C) Σ_k exp g_k,t(v)`, the estimate of the marginal in pCMI (§3.4); it is not below the mean
    of logs.
    """
    if baseline == "log_mean":
        return contrast_logps.logsumexp(dim=0) - contrast_logps.new_tensor(len(contrast_logps)).log()
    return contrast_logps.mean(dim=0)


def input_specific(
    teacher_logps: Float[Tensor, "*t v"], contrast_logps: Float[Tensor, "c *t v"], baseline: Baseline = "mean_log"
) -> Float[Tensor, "*t v"]:
    """Ŝ_t(v) = f_t(v) − Ĝ_t(v), Eq. 6 with the estimate of §3.4 (Proposition 3)."""
    return teacher_logps - input_generic(contrast_logps, baseline)


def credit_target(
    teacher_logps: Float[Tensor, "*t v"],
    generic_logps: Float[Tensor, "*t v"],
    contrastive_coef: float | Float[Tensor, "*t"],
    form: Form = "subtract",
) -> Float[Tensor, "*t v"]:
    """a_t(v) = f_t(v) − λ Ĝ_t(v), the target of the student, not normalised.

    The form `"guide"` is `f + λ (f − Ĝ)`, which equals f where teacher and contrasts agree.

    Args:
        teacher_logps: f.
        generic_logps: Ĝ, of the same shape.
        contrastive_coef: λ, one number or one per position (0 where a sample has no contrast prompt).
        form: see `ContrastRule`.
    """
    if isinstance(contrastive_coef, Tensor):
        contrastive_coef = contrastive_coef.unsqueeze(-1)
    if form == "guide":
        return teacher_logps + contrastive_coef * (teacher_logps - generic_logps)
    return teacher_logps - contrastive_coef * generic_logps


def total_variation(teacher_logps: Float[Tensor, "*t v"], generic_logps: Float[Tensor, "*t v"]) -> Float[Tensor, "*t"]:
    """½ Σ_v |f̄(v) − ḡ(v)| of the two as distributions, in [0, 1]."""
    return (teacher_logps.softmax(-1) - generic_logps.softmax(-1)).abs().sum(-1) / 2


def credit_advantages(
    teacher_logps: Float[Tensor, "*t v"],
    contrast_logps: Float[Tensor, "c *t v"],
    student_logps: Float[Tensor, "*t v"],
    contrastive_coef: float | Float[Tensor, "*t"],
    form: Form = "subtract",
    baseline: Baseline = "mean_log",
) -> Float[Tensor, "*t v"]:
    """R_t(v) = r_t(v) − (λ/C) Σ_k g_k,t(v), Eq. 8. λ = 0 is the self-distillation reward of Eq. 2.

    With the form `"guide"` it is `r_t(v) + λ Ŝ_t(v)`.
    """
    generic = input_generic(contrast_logps, baseline)
    return credit_target(teacher_logps, generic, contrastive_coef, form) - student_logps


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
        One loss per position, in nats.
    """
    target_logps = target_logps.detach()
    if alpha == 1.0:
        return (student_logps.exp() * (student_logps - target_logps)).sum(-1)
    target_logps = renormalize(target_logps)
    if alpha == 0.0:
        return (target_logps.exp() * (target_logps - student_logps)).sum(-1)
    log_alpha = student_logps.new_tensor(alpha).log()
    log_rest = student_logps.new_tensor(1.0 - alpha).log()
    mixture = torch.logaddexp(student_logps + log_rest, target_logps + log_alpha)
    to_student = (student_logps.exp() * (student_logps - mixture)).sum(-1)
    to_target = (target_logps.exp() * (target_logps - mixture)).sum(-1)
    return (1.0 - alpha) * to_student + alpha * to_target


def add_tail_bucket(
    logps: Float[Tensor, "*t k"], log_outside: Float[Tensor, "*t"] | None = None
) -> Float[Tensor, "*t k+1"]:
    """Append `log(1 − Σ_k p_k)`, the probability outside the support, so that the buckets sum to one.

    Args:
        logps: log-probabilities of distinct tokens.
        log_outside: the same value summed over the tokens outside, where available. It is more precise: with 1e-6
            outside the support, the difference from 1 keeps one digit in fp32.
    """
    if log_outside is None:
        log_mass = torch.logsumexp(logps, dim=-1).clamp(max=_MAX_LOG_MASS)
        log_outside = torch.log(-torch.expm1(log_mass))
    floor = math.log(-math.expm1(_MAX_LOG_MASS))
    return torch.cat([logps, log_outside.clamp(min=floor).unsqueeze(-1)], dim=-1)


def renormalize(logps: Float[Tensor, "*t k"]) -> Float[Tensor, "*t k"]:
    """Log-probabilities conditional on the support: `log_softmax` over the last dimension."""
    return torch.log_softmax(logps, dim=-1)


def trust_region(
    base_logps: Float[Tensor, "*t v"], average_logps: Float[Tensor, "*t v"], weight: float | Float[Tensor, "*t"]
) -> Float[Tensor, "*t v"]:
    """log softmax((1 − w) log π_base + w log π_avg): SDPO's trust-region teacher (arXiv:2601.20802).

    Args:
        base_logps: log π_base, of the initial policy.
        average_logps: log π_avg, of its average.
        weight: w in [0, 1], one number or one per position; 1 is the average.
    """
    if isinstance(weight, Tensor):
        weight = weight.unsqueeze(-1)
    return renormalize((1.0 - weight) * base_logps + weight * average_logps)


def credit_rewards(
    policy_logps: Float[Tensor, "*b"],
    reference_logps: Float[Tensor, "*b"],
    contrast_policy_logps: Float[Tensor, "c ..."],
    contrast_reference_logps: Float[Tensor, "c ..."] | None = None,
    *,
    contrastive_coef: float | Float[Tensor, "*b"],
    beta: float = 1.0,
    form: Form = "subtract",
    baseline: Baseline = "mean_log",
) -> Float[Tensor, "*b"]:
    r"""ρ(x, y) − λ ρ̂(y) with ρ = β log π_θ(y | x) / π_ref(y | x), and ρ̂ its mean over contrast prompts x'_k.

    DPO's implicit reward (Rafailov et al., 2023) and PRIME's token reward (Cui et al., 2025) are such log-ratios. The
    function applies to whole responses or to single tokens; with `"mean_log"` the rewards of the tokens sum to that of
    the response.

    - λ = 0 is ρ. With `"subtract"` and λ = 1 the reward is 0 where x'_k = x.
    - Where π_θ(y | x) is π_ref(y | x, z) for some z, as for the two passes of one joint distribution, it is
      β (pmi(y; z | x) − λ E[pmi(y; z | x')]), the full-ratio reward of Appendix D: `lab.analysis.pmi.contrastive_pmi`.
    - Where π_θ is DPO's optimum for a reward s(x, y) + g(y), the difference of two responses contains the generic part
      g with weight 1 − λ; with `"guide"` with weight 1, and the part that depends on x with weight 1 + λ.

    Differentiable in every argument.

    Args:
        policy_logps: log π_θ(y | x), per token or summed over a response.
        reference_logps: log π_ref(y | x).
        contrast_policy_logps: (C, …), log π_θ(y | x'_k) of the same y.
        contrast_reference_logps: (C, …), log π_ref(y | x'_k). None contrasts the numerator only, as the paper does for
            self-distillation (Eq. 8, `credit_advantages`: the teacher is the policy, the student the reference).
        contrastive_coef: λ ≥ 0.
        beta: DPO's and PRIME's β.
        form: `"subtract"`, or `"guide"`: ρ + λ (ρ − ρ̂).
        baseline: see `input_generic`; applied to numerator and denominator separately.

    Returns:
        One reward for each of `policy_logps`, in nats times β.
    """
    generic = input_generic(contrast_policy_logps, baseline)
    if contrast_reference_logps is None:
        return beta * (_target(policy_logps, generic, contrastive_coef, form) - reference_logps)
    ratio = policy_logps - reference_logps
    return beta * _target(ratio, generic - input_generic(contrast_reference_logps, baseline), contrastive_coef, form)


def _target(
    values: Float[Tensor, "*b"], generic: Float[Tensor, "*b"], coef: float | Float[Tensor, "*b"], form: Form
) -> Float[Tensor, "*b"]:
    """`credit_target` of scalars, each with its own λ."""
    return credit_target(values.unsqueeze(-1), generic.unsqueeze(-1), coef, form).squeeze(-1)


# ---------------------------------------------------------------------- the credit beside a verifier's reward


def ratio_weights(
    credit: Float[Tensor, "b t"], advantages: Float[Tensor, " b"], clip: float, temperature: float = 1.0
) -> Float[Tensor, "b t"]:
    """w_t = clip(exp(sign(A) c_t / τ), 1 − ε, 1 + ε): RLSD (Yang et al., 2026, arXiv:2604.03128).

    With c = ΔV and τ = 1 it is the paper's `(P_T / P_S)^sign(A)` with `epsilon_w` = ε. It is 1 where A is 0.

    Args:
        credit: c, ΔV_t or S_t at the sampled tokens, nats.
        advantages: A, GRPO's advantage of each sample.
        clip: ε in (0, 1].
        temperature: τ.
    """
    signed = advantages.sign().unsqueeze(-1) * credit / temperature
    return signed.exp().clamp(1.0 - clip, 1.0 + clip)


def residual_weights(
    credit: Float[Tensor, "b t"], advantages: Float[Tensor, " b"], clip: float, temperature: float = 1.0
) -> Float[Tensor, "b t"]:
    """w_t = max(1 + ε tanh(c_t / τ) / A, 0): RLCSD (Pan et al., 2026, arXiv:2606.11709).

    `A w_t` is the paper's `A + ρ_t` with the bounded residual `ρ_t = ε tanh(c_t / τ)`, cut where it would change the
    sign of A; ε is the product of its β and λ. The paper's c is Ŝ with the baseline `"log_mean"` over wrong contexts.
    It is 1 where |A| < 1e-3, which rounding leaves where all rewards of a group are equal. The dead zone of ρ and the
    separate averages of its two sets of tokens are not included.

    Args:
        credit: see `ratio_weights`, as `advantages` and `temperature`.
        advantages: A.
        clip: ε in (0, 1], the bound of the residual.
        temperature: τ.
    """
    advantages = advantages.unsqueeze(-1)
    is_zero = advantages.abs() < 1e-3
    weights = 1.0 + clip * (credit / temperature).tanh() / advantages.masked_fill(is_zero, 1.0)
    return weights.clamp(min=0.0).masked_fill(is_zero, 1.0)


def normalize_weights(weights: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"]) -> Float[Tensor, "b t"]:
    """Weights divided by their mean over the masked tokens of each sample, so that this mean is 1.

    Samples without a positive weight keep theirs.
    """
    counts = mask.sum(-1, keepdim=True)
    mean = (weights * mask).sum(-1, keepdim=True) / counts.clamp(min=1)
    return weights / mean.where(mean > 0, torch.ones_like(mean))


def modulated_advantages(
    advantages: Float[Tensor, " b"], weights: Float[Tensor, "b t"], share: float = 1.0
) -> Float[Tensor, "b t"]:
    """A_t = A (1 + s (w_t − 1)): RLSD's `A ((1 − λ) + λ w_t)` with s = λ. Where w_t = 1 it is A, bit for bit.

    Args:
        advantages: A.
        weights: w.
        share: s in [0, 1].
    """
    return advantages.unsqueeze(-1) * (1.0 + share * (weights - 1.0))


def routed(is_successful: Bool[Tensor, " b"], has_teacher: Bool[Tensor, " b"]) -> Bool[Tensor, " b"]:
    """z = (1 − c) m, the samples that distillation takes over from GRPO: SRPO (Li et al., 2026, arXiv:2604.02288).

    Args:
        is_successful: c.
        has_teacher: m; a failure without a teacher stays with GRPO.
    """
    return ~is_successful & has_teacher


def entropy_weights(teacher_entropy: Float[Tensor, "*t"], temperature: float = 1.0) -> Float[Tensor, "*t"]:
    """exp(−H_t / τ), SRPO's weight of a distilled token before its division by the mean; β = 1/τ.

    Args:
        teacher_entropy: H, nats.
        temperature: τ.
    """
    return (-teacher_entropy / temperature).exp()
