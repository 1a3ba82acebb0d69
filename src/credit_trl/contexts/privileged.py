"""Privileged context z: a demonstration and feedback for each sample."""

from __future__ import annotations

from collections.abc import Mapping
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
    solution = answer if answer == completion else answer.strip()
    text = {"solution": solution, "think": thinking, "think+solution": completion}[teacher_context]
    return text if text.strip() else None
