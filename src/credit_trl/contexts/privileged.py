"""Privileged context z: a demonstration and feedback for each sample."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from accelerate.utils import gather_object

from credit_trl.config import CreditConfig
from credit_trl.rollout.batch import GenerationBatch

_THINKING = re.compile(r"^(?:(?!</?think>).)*</think>|<think>.*?(?:</think>|\Z)", flags=re.DOTALL)

# Of the threshold: what fp32 sums of rewards may lack.
_REWARD_ROUNDING = 1e-6


@dataclass(frozen=True)
class PrivilegedContext:
    """z, what the teacher is shown of one rollout's outcome. At least one of the three makes a teacher.

    Args:
        demonstration: a successful rollout of the group.
        feedback: what the environment said of the whole rollout.
        turns: what it said of single turns, by the turn's number; None for nothing. See `turns.place_turns`.
    """

    demonstration: str | None = None
    feedback: str | None = None
    turns: Mapping[int, str] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        if self.turns is not None:  # JSON has no integer keys
            object.__setattr__(self, "turns", {int(turn): text for turn, text in self.turns.items()} or None)

    def __bool__(self) -> bool:
        return any(part is not None for part in (self.demonstration, self.feedback, self.turns))


def choose_demonstrations(
    rewards: Sequence[float], group_size: int, threshold: float, *, exclude_self: bool
) -> list[int | None]:
    """For each rollout, the first successful rollout of its group, or None.

    Args:
        rewards: of the global generation batch, groups contiguous; NaN never succeeds.
        group_size: rollouts a group.
        threshold: reward from which a rollout is successful. A reward that lacks a millionth of it is enough: rewards
            are weighted and summed in fp32, where 0.7 is a little less.
        exclude_self: a rollout is not its own demonstration.
    """
    lowest = threshold - _REWARD_ROUNDING * abs(threshold)
    chosen: list[int | None] = []
    for index in range(len(rewards)):
        start = index // group_size * group_size
        group = range(start, min(start + group_size, len(rewards)))
        successful = [i for i in group if rewards[i] >= lowest and not (exclude_self and i == index)]
        chosen.append(successful[0] if successful else None)
    return chosen


def demonstration_text(completion: str, teacher_context: str) -> str | None:
    """What of a successful completion is shown: its solution, its thinking, or both; None if that part is empty.

    Thinking is what stands in `<think>…</think>`, up to `</think>` where the generation prompt opened the block, and
    to the end where it was never closed.
    """
    if teacher_context == "think+solution":
        text = completion
    elif teacher_context == "solution":
        text = _THINKING.sub("", completion).strip() if "think>" in completion else completion
    else:
        text = "\n".join(re.sub(r"</?think>", "", part).strip() for part in _THINKING.findall(completion))
    return text if text.strip() else None


def gather_privileged_contexts(
    rollouts: GenerationBatch, config: CreditConfig, decode: Callable[[list[list[int]]], list[str]]
) -> list[PrivilegedContext]:
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
    return [PrivilegedContext(d, f, t) for d, f, t in zip(demonstrations, feedback, turns, strict=True)]


def unread_feedback(rollouts: GenerationBatch, config: CreditConfig) -> tuple[bool, list[int]]:
    """Whether any process was given feedback that is switched off, and the turns of any that were spoken of in vain.

    Every process must call it.
    """
    is_switched_off = not config.include_environment_feedback and any(rollouts.feedback())
    switched_off, lost = zip(*gather_object([(is_switched_off, rollouts.lost_turns())]), strict=True)
    return any(switched_off), [turn for turns in lost for turn in turns]
