"""SRPO (Li et al., 2026, arXiv:2604.02288): successes by GRPO, failures with a teacher by distillation.

A distilled token has the weight exp(−H_t / τ) over its mean, with the entropy H of the teacher:

    trl credit --task quickstart --model_name_or_path quickstart --distillation_weight 0.5 --contrastive_coef 0 \
        --token_weight examples.family.srpo:route
"""

from __future__ import annotations

from torch import Tensor

from credit_trl.loss import TokenCredit

TEMPERATURE = 1.0  # τ, nats; the paper's 1 / β
THRESHOLD = 1.0  # reward of a success, `success_reward_threshold`


def route(credit: TokenCredit) -> dict[str, Tensor]:
    """Weights of both losses: a token that the teacher scored belongs to one of them."""
    is_failure = (~(credit.rewards >= THRESHOLD))[:, None] & credit.mask
    weights = (-credit.entropy / TEMPERATURE).exp()
    mean = credit.mean(weights, is_failure)
    distilled = (weights / mean.clamp(min=1e-9)).masked_fill(~is_failure, 0.0)
    return {"distillation": distilled, "grpo": (~is_failure).to(weights.dtype)}
