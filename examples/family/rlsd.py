"""RLSD (Yang et al., 2026, arXiv:2604.03128): GRPO whose tokens are weighted by the ratio of teacher to policy.

The advantage of a token is A (1 − λ + λ w_t) with w_t = clip(exp(sign(A) ΔV_t), 1 − ε, 1 + ε). The loss is GRPO's:

    trl credit --task quickstart --model_name_or_path quickstart --distillation_weight 0 --contrastive_coef 0 \
        --token_weight examples.family.rlsd:ratio_weight
"""

from __future__ import annotations

from torch import Tensor

from credit_trl.loss import TokenCredit

SHARE = 0.5  # λ
CLIP = 0.2  # ε


def ratio_weight(credit: TokenCredit) -> dict[str, Tensor]:
    """Weights 1 − λ + λ w_t of GRPO's loss."""
    sign = credit.advantages.sign()[:, None]
    ratio = (sign * credit.delta_v).exp().clamp(1.0 - CLIP, 1.0 + CLIP)
    return {"grpo": 1.0 + SHARE * (ratio - 1.0)}
