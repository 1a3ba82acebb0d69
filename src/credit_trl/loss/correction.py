"""Importance ratios of the sampled tokens: against the policy of the rollout, and against the engine that sampled."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from credit_trl.config import CreditConfig

CorrectionMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


@dataclass(frozen=True)
class EngineCorrection:
    """TRL's importance correction for a vLLM engine, `exp(log π_old − log π_engine)` within bounds.

    Args:
        mode: `vllm_importance_sampling_mode`: one ratio a token or the product over a completion; ratios outside the
            bounds are truncated to them, or masked (0).
    """

    mode: CorrectionMode = "sequence_mask"
    clip_min: float | None = None
    clip_max: float | None = 3.0

    @property
    def per_sequence(self) -> bool:
        """Whether the tokens of a completion share one ratio."""
        return self.mode.startswith("sequence")

    def ratio(self, old_logps: Float[Tensor, " N"], engine: EngineTokens) -> Float[Tensor, " N"]:
        """Ratio of each token; 1 where the engine reported no log-probability.

        `old_logps` are those under the policy that sampled the tokens. A mode of the completion needs all its tokens.
        """
        difference = engine.difference(old_logps)
        if self.per_sequence:
            difference = difference.new_zeros(engine.samples).index_add_(0, engine.rows, difference)
        ratio = difference.exp()
        if self.mode.endswith("truncate"):
            ratio = ratio.clamp(self.clip_min, self.clip_max)
        else:
            low = -math.inf if self.clip_min is None else self.clip_min
            high = math.inf if self.clip_max is None else self.clip_max
            ratio = ratio.masked_fill((ratio < low) | (ratio > high), 0.0)
        return ratio[engine.rows] if self.per_sequence else ratio


@dataclass(frozen=True)
class EngineTokens:
    """Log-probabilities that the engine reported of N sampled tokens.

    Args:
        logps: (N,), NaN where it reported none.
        rows: (N,), completion of each token.
    """

    logps: Float[Tensor, " N"]
    rows: Int[Tensor, " N"]
    samples: int

    def __getitem__(self, rows: slice) -> EngineTokens:
        return EngineTokens(self.logps[rows], self.rows[rows], self.samples)

    def difference(self, logps: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
        """`logps` minus the engine's; 0 where it reported none."""
        return torch.nan_to_num(logps - self.logps, nan=0.0)


def engine_correction(config: CreditConfig) -> EngineCorrection | None:
    """The importance correction for vLLM, where the loss can form it from its own log-probabilities.

    One optimizer step then uses the whole generation batch, so that the policy of the step is that of the rollout.
    """
    is_wanted = config.use_vllm and config.vllm_importance_sampling_correction and config.distillation_weight == 1.0
    is_aligned = config.gradient_accumulation_steps % (config.steps_per_generation * config.num_iterations) == 0
    if not (is_wanted and is_aligned):
        return None
    return EngineCorrection(
        config.vllm_importance_sampling_mode,
        config.vllm_importance_sampling_clip_min,
        config.vllm_importance_sampling_clip_max,
    )


def clipped_ratio(
    logps: Float[Tensor, " n"], old_logps: Float[Tensor, " n"] | None, clip: float | None
) -> Float[Tensor, " n"]:
    """Importance ratio π_θ / π_old of the sampled tokens, at most `clip`; ones where either is None."""
    if old_logps is None or clip is None:
        return torch.ones_like(logps)
    return (logps - old_logps).clamp(-20.0, 20.0).exp().clamp(max=clip)
