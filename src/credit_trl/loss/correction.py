"""Importance ratios of the sampled tokens: against the policy of the rollout, and against the engine that sampled."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from credit_trl.config import CreditConfig


@dataclass(frozen=True)
class EngineTokens:
    """Log-probabilities that a vLLM engine reported of N sampled tokens, and TRL's importance correction for it.

    The correction is `exp(log π_old − log π_engine)` within bounds.
    """

    logps: Float[Tensor, " N"]  # NaN where it reported none
    rows: Int[Tensor, " N"]  # completion of each token
    samples: int  # number of completions
    # `vllm_importance_sampling_mode`: one ratio a token or the product over a completion; ratios outside the bounds
    # are truncated to them, or masked (0).
    mode: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = "sequence_mask"
    clip_min: float | None = None  # the bounds; None for none
    clip_max: float | None = 3.0

    def __getitem__(self, rows: slice) -> EngineTokens:
        return replace(self, logps=self.logps[rows], rows=self.rows[rows])

    @classmethod
    def joined(cls, parts: Sequence[EngineTokens], rows: Int[Tensor, " N"], samples: int) -> EngineTokens:
        """The tokens of several micro-batches' parts; `rows` and `samples` are those of the whole."""
        return replace(parts[0], logps=torch.cat([part.logps for part in parts]), rows=rows, samples=samples)

    @property
    def per_sequence(self) -> bool:
        """Whether the tokens of a completion share one ratio."""
        return self.mode.startswith("sequence")

    def difference(self, logps: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
        """`logps` minus the engine's; 0 where it reported none."""
        return torch.nan_to_num(logps - self.logps, nan=0.0)

    def ratio(self, old_logps: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
        """Ratio of each token; 1 where the engine reported no log-probability.

        `old_logps` are those under the policy that sampled the tokens. A mode of the completion needs all its tokens.
        """
        difference = self.difference(old_logps)
        if self.per_sequence:
            difference = difference.new_zeros(self.samples).index_add_(0, self.rows, difference)
        ratio = difference.exp()
        if self.mode.endswith("truncate"):
            ratio = ratio.clamp(self.clip_min, self.clip_max)
        else:
            low = -math.inf if self.clip_min is None else self.clip_min
            high = math.inf if self.clip_max is None else self.clip_max
            ratio = ratio.masked_fill((ratio < low) | (ratio > high), 0.0)
        return ratio[self.rows] if self.per_sequence else ratio


def corrects_for_engine(config: CreditConfig) -> bool:
    """Whether the loss forms the importance correction for vLLM from its own log-probabilities.

    One optimizer step then uses the whole generation batch, so that the policy of the step is that of the rollout.
    """
    is_wanted = config.use_vllm and config.vllm_importance_sampling_correction and config.distillation_weight == 1.0
    return (
        is_wanted and config.gradient_accumulation_steps % (config.steps_per_generation * config.num_iterations) == 0
    )


def clipped_ratio(
    logps: Float[Tensor, " n"], old_logps: Float[Tensor, " n"] | None, clip: float | None
) -> Float[Tensor, " n"]:
    """Importance ratio π_θ / π_old of the sampled tokens, at most `clip`; ones where either is None."""
    if old_logps is None or clip is None:
        return torch.ones_like(logps)
    return (logps - old_logps).clamp(-20.0, 20.0).exp().clamp(max=clip)
