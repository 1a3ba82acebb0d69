"""Privileged context z: a demonstration and feedback for each sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from credit_trl.rollout.thinking import COMMON_MARKS, ThinkingMarks, split_thinking


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


def choose_demonstrations(can_show: Sequence[bool], group_size: int, *, exclude_self: bool) -> list[int | None]:
    """For each rollout, the first rollout of its group that can be shown, or None.

    Args:
        can_show: for every rollout of the global generation batch, whether it is successful and has an answer; groups
            are contiguous.
        group_size: rollouts of a group.
        exclude_self: whether a rollout may not be its own demonstration.
    """
    chosen: list[int | None] = []
    for index in range(len(can_show)):
        start = index // group_size * group_size
        group = range(start, min(start + group_size, len(can_show)))
        chosen.append(next((i for i in group if can_show[i] and not (exclude_self and i == index)), None))
    return chosen


def demonstration_text(
    completion: str, teacher_context: str, marks: ThinkingMarks = COMMON_MARKS, *, opened: bool | None = None
) -> str | None:
    """The part of a successful completion that the teacher reads; None if that part is empty.

    A completion whose thinking is not closed has none.

    Args:
        completion: decoded completion.
        teacher_context: `"solution"` (the answer), `"think"` or `"think+solution"`.
        marks: see `split_thinking`, as `opened`.
    """
    thinking, answer = split_thinking(completion, marks, opened=opened)
    if answer is None:
        return None
    if teacher_context == "solution":
        text = answer if answer == completion else answer.strip()
    else:
        text = thinking if teacher_context == "think" else completion
    return text if text.strip() else None
