"""RLCSD (Pan et al., 2026, arXiv:2606.11709): GRPO whose tokens are moved by right against wrong context.

The advantage of a token is A + ε tanh(S_t / τ), cut where that would change the sign of A. The contrast is a failed
rollout of the group in place of z, see `wrong_feedback`. With C > 1 the paper averages the probabilities of the
wrong contexts, and Ĝ averages their logarithms. The paper's dead zone of small residuals is not included:

    trl credit --task quickstart --model_name_or_path quickstart --distillation_weight 0 \
        --contrastive_source examples.family.wrong_feedback:wrong_feedback \
        --token_weight examples.family.rlcsd:residual_weight
"""

from __future__ import annotations

from torch import Tensor

from credit_trl.loss import TokenCredit

BOUND = 0.1  # ε
TEMPERATURE = 0.03  # τ, nats


def residual_weight(credit: TokenCredit) -> dict[str, Tensor]:
    """Weights max(1 + ε tanh(S_t / τ) / A, 0) of GRPO's loss."""
    advantages = credit.advantages[:, None]
    is_zero = advantages.abs() < 1e-3  # what rounding leaves where all rewards of a group are equal
    residual = BOUND * (credit.specific / TEMPERATURE).tanh()
    weights = 1.0 + residual / advantages.masked_fill(is_zero, 1.0)
    return {"grpo": weights.clamp(min=0.0).masked_fill(is_zero, 1.0)}
