"""One generation batch with its rewards and feedback.

Local lists have one entry for each sample of this process, global lists one for each sample of all processes, in the
order of the ranks. That order does not depend on the number of processes.
"""

import hashlib
import json
import math
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import torch
from accelerate import Accelerator
from jaxtyping import Bool, Float
from torch import Tensor

from credit_trl.rollout.verdict import join_feedback

Prompt = str | list[dict[str, Any]]

# `GenerationBatch.index` of evaluation batches starts beyond that of training batches.
EVALUATION_INDEX = 2**31

# Relative tolerance of the success threshold.
_REWARD_ROUNDING = 1e-6


def prompt_key(prompt: Prompt) -> str:
    """Key that two prompts share where their content is the same, whatever the order of a message's keys."""
    return prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, default=content_key)


def content_key(value: Any) -> str:
    """Key of an image by its content, which must not change afterwards; of another value by its text."""
    if hasattr(value, "credit_key"):  # every context of a rollout asks for it
        return value.credit_key
    if isinstance(value, np.ndarray | Tensor):
        array = np.asarray(value)
        content = (array.dtype.str, array.shape, array.tobytes())
    elif hasattr(value, "getpalette"):  # of Pillow
        content = (value.mode, value.size, value.getpalette(), value.tobytes())
    else:
        return str(value)
    key = hashlib.blake2b(pickle.dumps(content), digest_size=16).hexdigest()
    if hasattr(value, "getpalette"):
        value.credit_key = key
    return key


@dataclass(frozen=True)
class GenerationBatch:
    """Prompts, completions, rewards and feedback of one generation batch."""

    rows: list[dict[str, Any]]  # local dataset rows
    prompts: list[Prompt]  # local, as an environment may have completed them
    completion_ids: list[list[int]]  # local sampled ids
    rewards: list[float]  # global, weighted sums over the reward functions; NaN where none applied
    verdict_feedback: list[str | None]  # local, `Verdict.feedback` of the reward functions, joined
    first: int  # global index of the first local sample
    turn_feedback: list[dict[int, str]] = field(default_factory=list)  # local, `Verdict.turn_feedback` by turn index
    # Local, the first column of each turn of the completion; empty until `with_turns`.
    turn_starts: list[list[int]] = field(default_factory=list)
    # Local turn indices with feedback that no turn has; of completions without any turn, none.
    missing_turns: list[int] = field(default_factory=list)
    group_size: int = 1  # rollouts of a row; groups are contiguous in the global batch
    # Ordinal of the generation batch in the data stream, which keys the draws of contrasts. The n-th batch of an
    # evaluation has `EVALUATION_INDEX + n`, n from 1.
    index: int = 0
    # What `contrastive_source="dataset"` draws from: a `Dataset` or a mapping with the column `prompt`; None, or a
    # stream, has no rows to draw.
    dataset: Any = None
    # Local, the tools that the chat template lists for each sample; empty where no sample has any.
    tools: list[list[Any] | None] = field(default_factory=list)

    def with_turns(self, mask: Bool[Tensor, "B T"]) -> Self:
        """The batch with the turns of its completions, and without feedback on turns that they lack.

        `mask` is that of `loss_mask`.
        """
        starts = [turn_starts(row) for row in mask.tolist()]
        feedback = []
        missing = []
        for texts, sample_starts in zip(self.turn_feedback, starts, strict=True):
            turns = range(len(sample_starts))
            feedback.append({turn: text for turn, text in texts.items() if turn in turns})
            if sample_starts:
                missing += [turn for turn in texts if turn not in turns]
        return replace(self, turn_feedback=feedback, turn_starts=starts, missing_turns=missing)

    @property
    def indices(self) -> range:
        """Global indices of the local samples."""
        return range(self.first, self.first + len(self.prompts))

    @property
    def is_flat(self) -> bool:
        """Whether the rollouts of every group have one reward."""
        groups = np.reshape(self.rewards, (-1, self.group_size))
        return bool((groups == groups[:, :1]).all())

    @property
    def feedback(self) -> list[str | None]:
        """Local feedback: the column `privileged_context`, then the verdicts' feedback."""
        texts = []
        for row, verdict_feedback in zip(self.rows, self.verdict_feedback, strict=True):
            texts.append(join_feedback([row.get("privileged_context"), verdict_feedback]))
        return texts


def turn_starts(mask: Sequence[bool]) -> list[int]:
    """The columns of a completion at which the model's turns start; `mask` is True on the model's own tokens."""
    starts = []
    was_sampled = False
    for column, is_sampled in enumerate(mask):
        if is_sampled and not was_sampled:
            starts.append(column)
        was_sampled = is_sampled
    return starts


def is_graded(rewards: Sequence[float]) -> bool:
    """Whether rewards do not tell right from wrong by 0 and 1: one is above 1, or fewer than a quarter are binary.

    Those below 0 count as 0, as no threshold of 1 takes them for a success; NaN does not count.
    """
    values = np.asarray(rewards, float)
    values = values[~np.isnan(values)]
    is_binary = (values <= 0.0) | (np.abs(values - 1.0) <= _REWARD_ROUNDING)
    has_more = (values > 1.0 + _REWARD_ROUNDING).any()
    return bool(has_more or 4 * is_binary.sum() < len(values))


def is_successful(rewards: Sequence[float], threshold: float | None) -> list[bool]:
    """Whether each reward reaches the threshold, less a relative 1e-6: rewards are weighted and summed in fp32.

    NaN is never successful. Without a threshold it is 1 for rewards of 0 and 1, and none of graded ones is successful.
    """
    if threshold is None:
        threshold = math.inf if is_graded(rewards) else 1.0
    if threshold != math.inf:
        threshold -= _REWARD_ROUNDING * abs(threshold)
    return [reward >= threshold for reward in rewards]


def total_rewards(rewards_per_func: Float[Tensor, "n f"], weights: Float[Tensor, " f"]) -> list[float]:
    """Weighted sums over the reward functions that apply; NaN where none does."""
    rewards = (rewards_per_func * weights.to(rewards_per_func.device)).nansum(dim=1)
    rewards[rewards_per_func.isnan().all(dim=1)] = torch.nan
    return rewards.tolist()


def mask_skipped_rewards(rewards_per_func: Tensor, is_skipped: bool, accelerator: Accelerator) -> float:
    """Set the rewards (global rollouts, functions) of skipped processes to NaN, TRL's value for none, in place.

    Returns the share of skipped rollouts over all processes. Every process must call it.
    """
    count = len(rewards_per_func) // accelerator.num_processes
    skipped = accelerator.gather(torch.full((count,), is_skipped, device=rewards_per_func.device))
    rewards_per_func[skipped] = torch.nan
    return skipped.float().mean().item()


def mask_skipped_tokens(output: dict[str, Any], is_skipped: bool, accelerator: Accelerator) -> None:
    """Mask the tokens of a skipped process, in place, so that no loss counts them. Every process must call it."""
    output["completion_mask"] = output["completion_mask"] * (not is_skipped)
    output["num_items_in_batch"] = accelerator.gather(loss_mask(output).sum()).sum()


def loss_mask(batch: dict[str, Any]) -> Bool[Tensor, "B T"]:
    """True on the policy's own completion tokens: neither padding nor tool output."""
    mask = batch["completion_mask"].bool()
    return mask & batch["tool_mask"].bool() if "tool_mask" in batch else mask
