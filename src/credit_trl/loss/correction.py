"""Importance ratios of the sampled tokens: against the policy of the rollout, and against the engine that sampled."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from credit_trl.config import CreditConfig


@dataclass(frozen=True)
class EngineTokens:
    """Log-probabilities that a vLLM engine reported of N sampled tokens, and TRL's importance correction of a token.

    The correction is `exp(log π_old − log π_engine)` within bounds.
    """

    logps: Float[Tensor, " N"]  # NaN where it reported none
    # `vllm_importance_sampling_mode`: ratios outside the bounds are truncated to them, or masked (0).
    mode: Literal["token_truncate", "token_mask"] = "token_truncate"
    clip_min: float | None = None  # the bounds; None for none
    clip_max: float | None = 3.0

    def __getitem__(self, rows: slice) -> EngineTokens:
        return replace(self, logps=self.logps[rows])

    @classmethod
    def joined(cls, parts: Sequence[EngineTokens]) -> EngineTokens:
        """The tokens of a micro-batch from those of its parts."""
        return replace(parts[0], logps=torch.cat([part.logps for part in parts]))

    def difference(self, logps: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
        """`logps` minus the engine's; 0 where it reported none."""
        return torch.nan_to_num(logps - self.logps, nan=0.0)

    def ratio(self, old_logps: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
        """Ratio of each token, from its log-probability under the policy that sampled it.

        It is 1 where the engine reported no log-probability.
        """
        ratio = self.difference(old_logps).exp()
        if self.mode == "token_truncate":
            return ratio.clamp(self.clip_min, self.clip_max)
        low = -math.inf if self.clip_min is None else self.clip_min
        high = math.inf if self.clip_max is None else self.clip_max
        return ratio.masked_fill((ratio < low) | (ratio > high), 0.0)


def corrects_for_engine(config: CreditConfig) -> bool:
    """Whether the loss forms the importance correction for vLLM from its own log-probabilities.

    One optimizer step then uses the whole generation batch, so that the policy of the step is that of the rollout. A
    ratio of whole completions is TRL's, which needs their log-probabilities before the loss.
    """
    is_wanted = config.use_vllm and config.vllm_importance_sampling_correction and config.distillation_weight == 1.0
    passes = config.steps_per_generation * config.num_iterations
    is_on_policy = config.gradient_accumulation_steps % passes == 0
    return is_wanted and is_on_policy and config.vllm_importance_sampling_mode.startswith("token")


def clipped_ratio(
    logps: Float[Tensor, " n"], old_logps: Float[Tensor, " n"] | None, clip: float | None
) -> Float[Tensor, " n"]:
    """Importance ratio π_θ / π_old of the sampled tokens, at most `clip`; ones where either is None."""
    if old_logps is None or clip is None:
        return torch.ones_like(logps)
    return (logps - old_logps).clamp(-20.0, 20.0).exp().clamp(max=clip)
