"""Privileged context z: a demonstration and feedback for each sample."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from accelerate.utils import gather_object
from transformers import PreTrainedTokenizerBase

from credit_trl.config import CreditConfig
from credit_trl.rollout.batch import GenerationBatch, is_successful

_THINKING = re.compile(r"^(?:(?!</?think>).)*</think>|<think>.*?(?:</think>|\Z)", flags=re.DOTALL)


@dataclass(frozen=True)
class PrivilegedContext:
    """z of one sample. A sample has a teacher where at least one is set."""

    demonstration: str | None = None  # text of a successful rollout of the group
    feedback: str | None = None  # on the whole rollout
    turns: Mapping[int, str] | None = field(default=None, hash=False)  # feedback by turn index, see `place_turns`

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
        rewards: rewards of the global generation batch, groups contiguous; NaN is never successful.
        group_size: rollouts of a group.
        threshold: lowest reward of a successful rollout, see `is_successful`.
        exclude_self: whether a rollout may not be its own demonstration.
    """
    is_success = is_successful(rewards, threshold)
    chosen: list[int | None] = []
    for index in range(len(rewards)):
        start = index // group_size * group_size
        group = range(start, min(start + group_size, len(rewards)))
        chosen.append(next((i for i in group if is_success[i] and not (exclude_self and i == index)), None))
    return chosen


def demonstration_text(completion: str, teacher_context: str) -> str | None:
    """The part of a successful completion that the teacher reads; None if that part is empty.

    Thinking is the text inside `<think>…</think>`: from the start where the generation prompt opened the block, and to
    the end where the block is not closed.

    Args:
        completion: decoded completion.
        teacher_context: `"solution"`, `"think"` or `"think+solution"`.
    """
    if teacher_context == "think+solution":
        text = completion
    elif teacher_context == "solution":
        text = _THINKING.sub("", completion).strip() if "think>" in completion else completion
    else:
        text = "\n".join(re.sub(r"</?think>", "", part).strip() for part in _THINKING.findall(completion))
    return text if text.strip() else None


def decode_completions(tokenizer: PreTrainedTokenizerBase, ids: Sequence[Sequence[int]]) -> list[str]:
    """Texts without special tokens, with the tags of thinking also where a tokenizer declares them special."""
    added = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    special = added | set(tokenizer.all_special_ids)
    tags = special & set(tokenizer.convert_tokens_to_ids(["<think>", "</think>"])) - {tokenizer.unk_token_id}
    if not tags:
        return tokenizer.batch_decode(ids, skip_special_tokens=True)
    return tokenizer.batch_decode([[i for i in row if i in tags or i not in special] for row in ids])


def gather_privileged_contexts(
    batch: GenerationBatch, config: CreditConfig, decode: Callable[[list[list[int]]], list[str]]
) -> list[PrivilegedContext]:
    """z of each local sample, by the options that choose its parts. Every process must call it.

    `decode` maps sampled ids to texts, see `decode_completions`.
    """
    size = len(batch.prompts)
    demonstrations = (
        _gather_demonstrations(batch, config, decode) if config.use_successful_as_teacher else [None] * size
    )
    feedback, turns = batch.feedback, batch.feedback_by_turn
    contexts = []
    for demonstration, text, by_turn in zip(demonstrations, feedback, turns, strict=True):
        is_used = config.include_environment_feedback and not (
            config.environment_feedback_only_without_solution and demonstration is not None
        )
        contexts.append(PrivilegedContext(demonstration, *((text, by_turn) if is_used else (None, None))))
    return contexts


def _gather_demonstrations(
    batch: GenerationBatch, config: CreditConfig, decode: Callable[[list[list[int]]], list[str]]
) -> list[str | None]:
    chosen = choose_demonstrations(
        batch.rewards,
        batch.group_size,
        config.success_reward_threshold,
        exclude_self=config.dont_reprompt_on_self_success,
    )
    texts = gather_object([demonstration_text(t, config.teacher_context) for t in decode(batch.completion_ids)])
    return [None if chosen[i] is None else texts[chosen[i]] for i in batch.indices]


def ignored_feedback(batch: GenerationBatch, config: CreditConfig) -> tuple[bool, list[int]]:
    """Whether any process has feedback that `include_environment_feedback` ignores, and `missing_turns` of all.

    Every process must call it.
    """
    is_ignored = not config.include_environment_feedback and any(batch.feedback)
    ignored, missing = zip(*gather_object([(is_ignored, batch.missing_turns)]), strict=True)
    return any(ignored), [turn for turns in missing for turn in turns]
