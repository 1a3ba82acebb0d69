"""A generation batch between verdict and contexts: what each sample can be shown, and which questions it meets.

Local lists have one entry a sample of this process, global ones one a sample of all processes, in the order of the
ranks: the same order that one process would have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
    rollouts: Rollouts, config: CreditConfig, decode: Callable[[list[list[int]]], list[str]]
) -> list[Evidence]:
    """z of each local sample. Every process must call it.

    Args:
        rollouts: the generation batch.
        config: which parts of z are used.
        decode: sampled ids → texts without special tokens.
    """
    demonstrations: list[str | None] = [None] * len(rollouts.prompts)
    if config.use_successful_as_teacher:
        chosen = choose_demonstrations(
            rollouts.rewards,
            rollouts.group_size,
            config.success_reward_threshold,
            exclude_self=config.dont_reprompt_on_self_success,
        )
        texts = gather_object([demonstration_text(t, config.teacher_context) for t in decode(rollouts.completion_ids)])
        demonstrations = [None if chosen[i] is None else texts[chosen[i]] for i in rollouts.indices]
    feedback = rollouts.feedback() if config.include_environment_feedback else [None] * len(demonstrations)
    if config.environment_feedback_only_without_solution:
        feedback = [f if d is None else None for f, d in zip(feedback, demonstrations, strict=True)]
    turns = rollouts.feedback_by_turn() if config.include_environment_feedback else [None] * len(demonstrations)
    if config.environment_feedback_only_without_solution:
        turns = [t if d is None else None for t, d in zip(turns, demonstrations, strict=True)]
    return [Evidence(d, f, t) for d, f, t in zip(demonstrations, feedback, turns, strict=True)]


def unread_feedback(rollouts: Rollouts, config: CreditConfig) -> tuple[bool, list[int]]:
    """Whether any process was given feedback that is switched off, and the turns of any that were spoken of in vain.

    Every process must call it.
    """
    is_switched_off = not config.include_environment_feedback and any(rollouts.feedback())
    switched_off, lost = zip(*gather_object([(is_switched_off, rollouts.lost_turns())]), strict=True)
    return any(switched_off), [turn for turns in lost for turn in turns]


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
    from_dataset = config.contrastive_source == "dataset"
    prompts: Sequence[Prompt] = gather_object(rollouts.asked() if from_dataset else rollouts.prompts)
    keys = _question_keys(prompts, 1 if from_dataset else rollouts.group_size)
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


def _question_keys(prompts: Sequence[Prompt], group_size: int) -> list[str]:
    """What tells questions apart, for the global batch: the rollouts of a row ask the same one, in whatever words an
    environment's `reset` put it for each.
    """
    firsts = [contrast.prompt_key(prompt) for prompt in prompts[::group_size]]
    return [firsts[i // group_size] for i in range(len(prompts))]


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
    keys = _question_keys(gather_object(rollouts.prompts), rollouts.group_size)
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
        if any(z.turns for z in evidence):
            raise ValueError(
                "`contrastive_swap='hint'` exchanges whole hints, and feedback on single turns has its place in one "
                "rollout only. Set `contrastive_swap='input'`, or return no `Verdict.turn_feedback`."
            )
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


def context_masks(built: Sequence[Contexts], device: torch.device) -> dict[str, Bool[Tensor, " B"]]:
    """Which samples have a teacher, and which of them a contrast."""
    return {
        "teacher_mask": torch.tensor([c.ids is not None for c in built], device=device),
        "contrast_mask": torch.tensor([len(c.ids or ()) > 1 for c in built], device=device),
    }


def pack_contexts(built: Sequence[Contexts], device: torch.device) -> dict[str, Int[Tensor, "B ..."]]:
    """Contexts as tensors that TRL can shuffle and split: ids (B, 1+C, P), lengths (B, 1+C), 0 where there is none.

    Where a context has tokens inside the completion, `context_columns` (B, 1+C, P) are beside them.
    """
    ids = _packed([c.ids for c in built])
    lengths = torch.zeros(ids.shape[:2], dtype=torch.long)
    for i, sample in enumerate(built):
        for k, context in enumerate(sample.ids or []):
            lengths[i, k] = len(context)
    packed = {"context_ids": ids, "context_lengths": lengths}
    if any(c.columns is not None for c in built):
        packed["context_columns"] = _packed(
            [c.columns or (c.ids and [[0] * len(row) for row in c.ids]) for c in built]
        )
    return {name: tensor.to(device) for name, tensor in packed.items()}


def unpack_contexts(batch: dict[str, Any]) -> tuple[list[list[list[int]] | None], list[list[list[int]] | None] | None]:
    """The inverse of `pack_contexts`, for one micro-batch: ids, and columns where there are any."""
    lengths = batch["context_lengths"].tolist()

    def rows(tensor: Tensor) -> list[list[list[int]] | None]:
        return [
            [row[:n] for row, n in zip(r, ns, strict=True) if n] or None
            for r, ns in zip(tensor.tolist(), lengths, strict=True)
        ]

    return rows(batch["context_ids"]), rows(batch["context_columns"]) if "context_columns" in batch else None


def _packed(samples: Sequence[list[list[int]] | None]) -> Int[Tensor, "B C P"]:
    count = max((len(rows) for rows in samples if rows is not None), default=1)
    longest = max((len(row) for rows in samples if rows is not None for row in rows), default=1)
    packed = torch.zeros(len(samples), count, longest, dtype=torch.long)
    for i, rows in enumerate(samples):
        for k, row in enumerate(rows or []):
            packed[i, k, : len(row)] = torch.tensor(row)
    return packed
