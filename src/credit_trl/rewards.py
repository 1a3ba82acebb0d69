"""The input contrast for other rewards that are a policy's log-ratio to a reference.

DPO's implicit reward `β log π_θ(y | x) / π_ref(y | x)` (Rafailov et al., 2023) and PRIME's token reward, the same
ratio at one token (Cui et al., 2025), pay for what would be as good an answer to any question, as self-distillation
does. The correction is the same: what they pay under other questions x'_k is taken off.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from credit_trl.objective import Baseline, Form, credit_target, input_generic


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
    r"""ρ(x, y) − λ ρ̂(y) with ρ = β log π_θ(y | x) / π_ref(y | x), and ρ̂ its mean over other questions x'_k.

    Of whole responses or of single tokens: with `"mean_log"` the rewards of the tokens sum to that of the response.

    - λ = 0 is the plain reward. With `"subtract"` and λ = 1 a contrast under the question itself leaves nothing.
    - Where π_θ(y | x) is π_ref(y | x, z) for some z, as for the two passes of one joint distribution, it is
      β (pmi(y; z | x) − λ E[pmi(y; z | x')]), the full-ratio reward of Appendix D: `analysis.pmi.contrastive_pmi`.
    - Where π_θ is DPO's optimum for a reward s(x, y) + g(y), the generic part g enters the difference of two responses
      (1 − λ) times; with `"guide"`, once for every λ, beside (1 + λ) times what depends on the question.

    Differentiable in every argument.

    Args:
        policy_logps: log π_θ(y | x), of tokens or summed over responses.
        reference_logps: log π_ref(y | x).
        contrast_policy_logps: log π_θ(y | x'_k) of the same y, C in front.
        contrast_reference_logps: log π_ref(y | x'_k). None leaves the denominator as it is: the paper's own choice for
            self-distillation (Eq. 8, `objective.credit_advantages`), with the teacher as the policy and the student
            as the reference. The reward then also pays for being unlikely under other questions.
        contrastive_coef: λ ≥ 0.
        beta: DPO's and PRIME's β.
        form: `"subtract"`, or `"guide"`: ρ + λ (ρ − ρ̂).
        baseline: the mean of the contrasts' logs, or the log of their mean, in numerator and denominator each.

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
    """`credit_target` with one λ for each value, where it has one for each position of a vocabulary."""
    return credit_target(values.unsqueeze(-1), generic.unsqueeze(-1), coef, form).squeeze(-1)
