"""A generation batch between verdict and contexts: what each sample can be shown, and which questions it meets.

Local lists have one entry a sample of this process, global ones one a sample of all processes, in the order of the
ranks: the same order that one process would have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from datasets import Dataset
from jaxtyping import Bool, Float, Int
from torch import Tensor

from credit_trl import contrast
from credit_trl.config import CreditConfig
from credit_trl.contexts import (
    ContextBuilder,
    Contexts,
    Evidence,
    Prompt,
    Render,
    choose_demonstrations,
    demonstration_text,
    user_text,
    without_question,
)
from credit_trl.verdict import join_feedback

# Another problem's hint for the teacher is drawn from random streams beyond those of the contrasts.
_FOREIGN_STREAM = 2**32


@dataclass
class Rollouts:
    """What the verifiers saw, and said.

    Args:
        rows: local dataset rows.
        prompts: local prompts, as an environment may have completed them.
        completion_ids: local sampled ids.
        rewards: global, weighted sums over the reward functions; NaN where none applied.
        verdict_feedback: local.
        first: global index of the first local sample.
    """

    rows: list[dict[str, Any]]
    prompts: list[Prompt]
    completion_ids: list[list[int]]
    rewards: list[float]
    verdict_feedback: list[str | None]
    first: int

    @property
    def indices(self) -> range:
        """Global indices of the local samples."""
        return range(self.first, self.first + len(self.prompts))

    def feedback(self) -> list[str | None]:
        """Local: the column `privileged_context`, then what the verdict said."""
        static = [row.get("privileged_context") for row in self.rows]
        return [join_feedback(parts) for parts in zip(static, self.verdict_feedback, strict=True)]


def total_rewards(rewards_per_func: Float[Tensor, "n f"], weights: Float[Tensor, " f"]) -> list[float]:
    """Weighted sums over reward functions that apply; NaN where none does."""
    rewards = (rewards_per_func * weights.to(rewards_per_func.device)).nansum(dim=1)
    rewards[rewards_per_func.isnan().all(dim=1)] = torch.nan
    return rewards.tolist()


def withhold_rewards(rewards_per_func: Tensor, is_skipped: list[bool], accelerator: Accelerator) -> float:
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


def leave_out(output: dict[str, Any], is_skipped: list[bool], accelerator: Accelerator) -> None:
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


def gather_evidence(
    rollouts: Rollouts, config: CreditConfig, group_size: int, decode: Callable[[list[list[int]]], list[str]]
) -> list[Evidence]:
    """z of each local sample. Every process must call it.

    Args:
        rollouts: the generation batch.
        config: which parts of z are used.
        group_size: rollouts a prompt.
        decode: sampled ids → texts without special tokens.
    """
    demonstrations: list[str | None] = [None] * len(rollouts.prompts)
    if config.use_successful_as_teacher:
        chosen = choose_demonstrations(
            rollouts.rewards,
            group_size,
            config.success_reward_threshold,
            exclude_self=config.dont_reprompt_on_self_success,
        )
        texts = gather_object([demonstration_text(t, config.teacher_context) for t in decode(rollouts.completion_ids)])
        demonstrations = [None if chosen[i] is None else texts[chosen[i]] for i in rollouts.indices]
    feedback = rollouts.feedback() if config.include_environment_feedback else [None] * len(demonstrations)
    if config.environment_feedback_only_without_solution:
        feedback = [f if d is None else None for f, d in zip(feedback, demonstrations, strict=True)]
    return [Evidence(d, f) for d, f in zip(demonstrations, feedback, strict=True)]


def draw_contrasts(rollouts: Rollouts, config: CreditConfig, dataset: Any, step: int) -> list[list[Prompt]]:
    """The other questions x'_k of each local sample; empty lists where there are none. Every process must call it.

    Args:
        rollouts: the generation batch.
        config: C, λ, the source and the seed.
        dataset: the rows to draw from with `contrastive_source="dataset"`.
        step: which generation batch this is.
    """
    if not config.contrasts:
        return [[] for _ in rollouts.prompts]
    if config.contrastive_source == "none":
        return [[without_question(prompt)] for prompt in rollouts.prompts]
    prompts: Sequence[Prompt] = gather_object(rollouts.prompts)
    keys = [contrast.prompt_key(prompt) for prompt in prompts]
    options = {"samples": rollouts.indices, "count": config.contrastive_count, "seed": config.seed, "step": step}
    if config.contrastive_source == "batch":
        draws = contrast.draw_from_batch(keys, **options)
    elif config.contrastive_source == "hard":
        draws = contrast.draw_nearest(keys, [user_text(prompt) for prompt in prompts], **options)
    elif config.contrastive_source == "same_task":
        draws = contrast.draw_within_groups(keys, gather_object([row["task"] for row in rollouts.rows]), **options)
    else:
        prompts = dataset["prompt"] if isinstance(dataset, Dataset) else []
        draws = contrast.draw_from_dataset(prompts, keys, **options)
    return [[prompts[i] for i in drawn] for drawn in draws]


def draw_hints(
    rollouts: Rollouts, evidence: Sequence[Evidence], count: int, *, seed: int, step: int
) -> list[list[Evidence]]:
    """What other problems' rollouts were shown, `count` of them for each local sample; empty lists where nothing was.

    Every process must call it.

    Args:
        rollouts: the generation batch.
        evidence: z of each local sample.
        count: hints a sample.
        seed, step: as in `contrast.draw_from_batch`.
    """
    keys = [contrast.prompt_key(prompt) for prompt in gather_object(rollouts.prompts)]
    hints: list[Evidence] = gather_object(list(evidence))
    shown = [bool(hint) for hint in hints]
    draws = contrast.draw_from_batch(keys, rollouts.indices, count, seed=seed, step=step, eligible=shown)
    return [[hints[i] for i in drawn] for drawn in draws]


def build_contexts(
    rollouts: Rollouts,
    evidence: Sequence[Evidence],
    config: CreditConfig,
    builder: ContextBuilder,
    renderer: Callable[[int], Render],
    dataset: Any,
    step: int,
) -> list[Contexts]:
    """Teacher and contrast contexts of the local samples. Every process must call it.

    Args:
        rollouts: the generation batch.
        evidence: z of each local sample.
        config: whose hint the teacher sees, and what the contrast exchanges.
        builder: turns prompts and z into token ids.
        renderer: local sample → how its prompt was rendered.
        dataset, step: as in `draw_contrasts`.
    """
    if config.teacher_hint == "foreign":
        drawn = draw_hints(rollouts, evidence, 1, seed=config.seed, step=step + _FOREIGN_STREAM)
        evidence = [hints[0] if hints else Evidence() for hints in drawn]
    if config.contrastive_swap == "hint" and config.contrasts:
        hints = draw_hints(rollouts, evidence, config.contrastive_count, seed=config.seed, step=step)
        return [
            builder.build_hint_contrasts(prompt, z, others, renderer(i))
            for i, (prompt, z, others) in enumerate(zip(rollouts.prompts, evidence, hints, strict=True))
        ]
    draws = draw_contrasts(rollouts, config, dataset, step)
    return [
        builder.build([prompt, *others], z, renderer(i))
        for i, (prompt, others, z) in enumerate(zip(rollouts.prompts, draws, evidence, strict=True))
    ]


def loss_mask(batch: dict[str, Any]) -> Bool[Tensor, "B T"]:
    """The model's own completion tokens: no padding, no tool's words."""
    mask = batch["completion_mask"].bool()
    return mask & batch["tool_mask"].bool() if "tool_mask" in batch else mask


def token_weights(
    batch: dict[str, Any],
    loss_type: str,
    *,
    accumulation: float,
    max_completion_length: int,
    num_processes: int,
    steps_per_generation: int,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "B T"]:
    """What each token's loss counts, by GRPO's reduction of the same `loss_type`, for one micro-batch.

    Tokens of samples without a teacher stay in the divisors, as in SDPO's code.

    Args:
        batch: a micro-batch of TRL's, with `num_items_in_batch` and perhaps `importance_sampling_ratio`.
        accumulation: micro-batches an optimizer step, 1 in evaluation.
        max_completion_length: the divisor of Dr. GRPO.
        num_processes: over which gradients are averaged.
        steps_per_generation: micro-batches a generation batch, 1 in evaluation.
        dtype: of the result.
    """
    mask = loss_mask(batch).to(dtype)
    size = mask.shape[0]
    if loss_type in ("grpo", "sapo"):
        weights = mask / mask.sum(-1, keepdim=True).clamp(min=1.0) / size / accumulation
    elif loss_type == "bnpo":
        weights = mask / mask.sum().clamp(min=1.0) / accumulation
    elif loss_type == "dr_grpo":
        weights = mask / (size * max_completion_length) / accumulation
    elif loss_type == "luspo":
        weights = mask / size / accumulation
    elif loss_type in ("dapo", "cispo", "vespo"):
        tokens = batch["num_items_in_batch"].clamp(min=1.0) / num_processes
        weights = mask / (tokens * accumulation / steps_per_generation)
    else:
        raise ValueError(f"Unknown `loss_type` {loss_type!r}.")
    return weights * batch["importance_sampling_ratio"] if "importance_sampling_ratio" in batch else weights


def pack_contexts(contexts: list[list[list[int]] | None], device: torch.device) -> dict[str, Int[Tensor, "B ..."]]:
    """Contexts as tensors that TRL can shuffle and split: ids (B, 1+C, P), lengths (B, 1+C), 0 where there is none."""
    count = max((len(c) for c in contexts if c is not None), default=1)
    longest = max((len(ids) for c in contexts if c is not None for ids in c), default=1)
    ids = torch.zeros(len(contexts), count, longest, dtype=torch.long)
    lengths = torch.zeros(len(contexts), count, dtype=torch.long)
    for i, sample in enumerate(contexts):
        for k, context in enumerate(sample or []):
            ids[i, k, : len(context)] = torch.tensor(context)
            lengths[i, k] = len(context)
    return {"context_ids": ids.to(device), "context_lengths": lengths.to(device)}


def unpack_contexts(batch: dict[str, Any]) -> list[list[list[int]] | None]:
    """The inverse of `pack_contexts`, for one micro-batch."""
    ids, lengths = batch["context_ids"].tolist(), batch["context_lengths"].tolist()
    contexts = [[row[:n] for row, n in zip(r, ns, strict=True) if n] for r, ns in zip(ids, lengths, strict=True)]
    return [context or None for context in contexts]
