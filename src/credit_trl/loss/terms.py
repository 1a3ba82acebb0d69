"""Values that travel with the loss: its configuration, the tokens that carry it, and its terms."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from credit_trl.loss.scores import SupportConfig
from credit_trl.objective import Form


@dataclass(frozen=True)
class LossConfig:
    """How the loss of a token is formed."""

    support: SupportConfig = field(default_factory=SupportConfig)
    form: Form = "subtract"  # see `objective.credit_target`
    # In [0, 1], see `objective.distillation_loss`; `"sampled"` takes 1 only, its loss is `−sg[R_t] log π_θ(y_t)`.
    alpha: float = 1.0
    # Upper bound on the detached ratio `exp(log π_θ − old)` that multiplies the loss of a token; None for no ratio.
    is_clip: float | None = None
    # TRL's correction of a token for the vLLM engine, `exp(log π_θ − log π_engine)`: ratios outside the bounds, of
    # which None is no bound, are truncated to them, or masked (0).
    engine_mode: Literal["token_truncate", "token_mask"] = "token_truncate"
    engine_bounds: tuple[float | None, float | None] = (None, 3.0)


@dataclass(frozen=True)
class LossTokens:
    """N sampled tokens that carry loss, indexable by chunk."""

    ids: Int[Tensor, " N"]
    # Of each token's loss, without gradient; a token of weight 0 contributes nothing, whatever its scores.
    weights: Float[Tensor, " N"]
    contrastive_coef: Float[Tensor, " N"]  # λ; 0 where the sample has no contrast
    # Log-probabilities at rollout time, NaN where an engine reported none; None when on-policy.
    old_logps: Float[Tensor, " N"] | None = None
    # What the vLLM engine reported, NaN where nothing, if the policy that sampled is the present one; None for no
    # correction.
    engine_logps: Float[Tensor, " N"] | None = None

    def __getitem__(self, rows: slice) -> LossTokens:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return LossTokens(**{name: None if x is None else x[rows] for name, x in values.items()})

    def ratio(self, logps: Float[Tensor, " N"], config: LossConfig) -> Float[Tensor, " N"]:
        """Factor of each token's loss: importance ratio and correction for the engine, from log π_θ."""
        ratio = torch.ones_like(logps)
        if self.old_logps is not None and config.is_clip is not None:
            ratio = engine_difference(logps, self.old_logps).clamp(-20.0, 20.0).exp().clamp(max=config.is_clip)
        if self.engine_logps is None:
            return ratio
        correction = engine_difference(logps, self.engine_logps).exp()
        low = config.engine_bounds[0] or 0.0
        high = math.inf if config.engine_bounds[1] is None else config.engine_bounds[1]
        if config.engine_mode == "token_truncate":
            return ratio * correction.clamp(low, high)
        return ratio * correction.masked_fill((correction < low) | (correction > high), 0.0)


def engine_difference(logps: Float[Tensor, " N"], engine_logps: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
    """Log-probabilities minus those that a vLLM engine reported; 0 where it reported none."""
    return torch.nan_to_num(logps - engine_logps, nan=0.0)


@dataclass
class CreditLoss:
    """The loss and per-token values for logging; all but `loss` are detached.

    Logarithms, entropies and divergences are in nats. With `"renormalize"` some values are conditional on the support,
    see `credit_trl.loss`.
    """

    loss: Float[Tensor, ""]  # Σ_n weight_n · ratio_n · ℓ_n, differentiable once
    token_loss: Float[Tensor, " N"]  # ℓ_n, without weight and ratio
    token_logps: Float[Tensor, " N"]  # log π_θ of the sampled token
    entropy: Float[Tensor, " N"]  # of the student
    kl_to_target: Float[Tensor, " N"]  # KL(p ‖ softmax(a)) over the buckets; for "sampled" −R_t, an estimate
    kl_to_teacher: Float[Tensor, " N"]  # KL(softmax(a) ‖ f) over the buckets; 0 for "sampled"
    student_mass: Float[Tensor, " N"]  # probability of the support; NaN where the normaliser is not computed
    teacher_mass: Float[Tensor, " N"]  # the same under the teacher
    teacher_token_logps: Float[Tensor, " N"]  # f at the sampled token
    generic_token_logps: Float[Tensor, " N"]  # Ĝ at the sampled token
    teacher_entropy: Float[Tensor, " N"]
    advantages: Float[Tensor, " N"]  # R_t at the sampled token
    ratio: Float[Tensor, " N"]  # importance ratio, with the engine's correction; ones where there is none
    policy_logps: Float[Tensor, " N"]  # log π_θ over the whole vocabulary; NaN where the normaliser is not computed


@dataclass(frozen=True)
class MicroBatchLoss:
    """Loss of one micro-batch."""

    terms: CreditLoss  # over the N tokens that carry loss
    contrasted: Bool[Tensor, " N"]  # True where the sample has a contrast
    # Part of the teacher's fidelity: Σ_i w_i mean_t ΔV_t of sample i, with the weights of
    # `training.metrics.teacher_success_weights`; NaN where no group is mixed.
    fidelity: Float[Tensor, ""]
    aux_loss: Float[Tensor, ""] | None  # load-balancing loss of a mixture of experts
    read: int  # tokens of the student's forward pass, with padding
    valid: int  # the same without padding
    engine_logps: Float[Tensor, " N"] | None  # what the engine reported, where the loss uses it
