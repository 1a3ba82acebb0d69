"""One generation batch with its rewards and feedback."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from jaxtyping import Bool, Float
from torch import Tensor

from credit_trl.contexts.prompts import Prompt
from credit_trl.rollout.verdict import join_feedback


@dataclass
class GenerationBatch:
    """What the verifiers saw, and said.

    Args:
        rows: local dataset rows.
        prompts: local prompts, as an environment may have completed them.
        completion_ids: local sampled ids.
        rewards: global, weighted sums over the reward functions; NaN where none applied.
        verdict_feedback: local.
        first: global index of the first local sample.
        turn_feedback: local, what the verdict said of single turns, by turn.
        turn_starts: local, the first columns of each completion's turns.
        group_size: rollouts of a row; groups are contiguous in the global batch.
    """

    rows: list[dict[str, Any]]
    prompts: list[Prompt]
    completion_ids: list[list[int]]
    rewards: list[float]
    verdict_feedback: list[str | None]
    first: int
    turn_feedback: list[dict[int, str]] = field(default_factory=list)
    turn_starts: list[list[int]] = field(default_factory=list)
    group_size: int = 1

    @property
    def indices(self) -> range:
        """Global indices of the local samples."""
        return range(self.first, self.first + len(self.prompts))

    def asked(self) -> list[Prompt]:
        """Local: the prompts as the data have them, before an environment completed them."""
        return [row.get("prompt", prompt) for row, prompt in zip(self.rows, self.prompts, strict=True)]

    def feedback(self) -> list[str | None]:
        """Local: the column `privileged_context`, then what the verdict said."""
        static = [row.get("privileged_context") for row in self.rows]
        return [join_feedback(parts) for parts in zip(static, self.verdict_feedback, strict=True)]

    def feedback_by_turn(self) -> list[dict[int, str] | None]:
        """Local: what was said of turns that the rollout has; None for nothing."""
        if not self.turn_starts:
            return [None] * len(self.prompts)
        pairs = zip(self.turn_feedback, self.turn_starts, strict=True)
        return [{turn: text for turn, text in said.items() if turn < len(own)} or None for said, own in pairs]

    def lost_turns(self) -> list[int]:
        """Local: turns that were spoken of and that their rollouts do not have. One without any is left out anyway."""
        pairs = zip(self.turn_feedback, self.turn_starts, strict=True)
        return [turn for said, own in pairs if own for turn in said if turn >= len(own)]


def total_rewards(rewards_per_func: Float[Tensor, "n f"], weights: Float[Tensor, " f"]) -> list[float]:
    """Weighted sums over reward functions that apply; NaN where none does."""
    rewards = (rewards_per_func * weights.to(rewards_per_func.device)).nansum(dim=1)
    rewards[rewards_per_func.isnan().all(dim=1)] = torch.nan
    return rewards.tolist()


def mask_skipped_rewards(rewards_per_func: Tensor, is_skipped: list[bool], accelerator: Accelerator) -> float:
    """Take the rewards of skipped rollouts out of a generation batch. Every process must call it.

    Args:
        rewards_per_func: (global rollouts, functions), changed in place: NaN is TRL's word for no reward.
        is_skipped: of the local rollouts.
        accelerator: the trainer's.

    Returns:
        The share of skipped rollouts, over all processes.
    """
    skipped = accelerator.gather(torch.tensor(is_skipped, device=rewards_per_func.device))
    rewards_per_func[skipped] = torch.nan
    return skipped.float().mean().item()


def mask_skipped_tokens(output: dict[str, Any], is_skipped: list[bool], accelerator: Accelerator) -> None:
    """Take the tokens of skipped rollouts out of a generation batch. Every process must call it.

    Args:
        output: TRL's, changed in place.
        is_skipped: of the local rollouts.
        accelerator: the trainer's.
    """
    kept = ~torch.tensor(is_skipped, device=output["completion_mask"].device)
    output["completion_mask"] = output["completion_mask"] * kept[:, None]
    mask = output["completion_mask"] * output["tool_mask"] if "tool_mask" in output else output["completion_mask"]
    output["num_items_in_batch"] = accelerator.gather(mask.sum()).sum()


def loss_mask(batch: dict[str, Any]) -> Bool[Tensor, "B T"]:
    """The model's own completion tokens: no padding, no tool's words."""
    mask = batch["completion_mask"].bool()
    return mask & batch["tool_mask"].bool() if "tool_mask" in batch else mask
