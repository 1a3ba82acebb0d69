"""Privileged context z as text, prompts of the teacher as token ids, and completions beside them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from jaxtyping import Bool, Int
from torch import Tensor

from credit_trl.contexts.images import PromptImages
from credit_trl.rollout.thinking import ThinkingMarks, split_thinking


@dataclass(frozen=True)
class PrivilegedContext:
    """z of one sample. A sample has a teacher where at least one is set."""

    demonstration: str | None = None  # text of a successful rollout of the group
    feedback: str | None = None  # on the whole rollout
    turns: Mapping[int, str] | None = field(default=None, hash=False)  # feedback by turn index, not empty

    def __bool__(self) -> bool:
        return any(part is not None for part in (self.demonstration, self.feedback, self.turns))


def demonstration_text(
    completion: str, teacher_context: str, marks: ThinkingMarks | None = None, *, opened: bool | None = None
) -> str | None:
    """The part of a decoded completion that the teacher reads: the answer, the thinking or both.

    None if that part is empty, or if the thinking is not closed. For `marks` and `opened` see `split_thinking`.
    """
    thinking, answer = split_thinking(completion, marks, opened=opened)
    if answer is None:
        return None
    solution = answer if answer == completion else answer.strip()
    text = {"solution": solution, "think": thinking, "think+solution": completion}[teacher_context]
    if not text.strip():
        return None
    return text


@dataclass(frozen=True)
class TokenContexts:
    """Token ids of the prompts under which the teacher reads one completion.

    Feedback on single turns lies inside the completion. `insert_at` then has a list for the teacher's prompt and one
    for each contrast prompt, with an entry for each of its tokens: the column of the completion before which the token
    stands, in ascending order; 0 for tokens before the completion.
    """

    teacher: list[int] | None  # the prompt (x, z); None where the sample has no teacher
    contrasts: list[list[int]] = field(default_factory=list)  # the contrast prompts (x'_k, z), C of them; C may be 0
    insert_at: list[list[int]] | None = None  # None where every prompt precedes the completion
    images: list[PromptImages | None] = field(default_factory=list)  # of each prompt, or None
    privileged: PrivilegedContext = field(default_factory=PrivilegedContext)  # z, as far as it fits the budget
    cut: bool = False  # whether z was shortened to fit the budget
    feedback_dropped: bool = False  # whether z had feedback and nothing of it fits the budget

    def sequences(self) -> Iterator[tuple[list[int], list[int] | None]]:
        """Yield (ids, columns of `insert_at`) of the teacher's prompt and of each contrast prompt, if any."""
        if self.teacher is not None:
            prompts = [self.teacher, *self.contrasts]
            yield from zip(prompts, self.insert_at or [None] * len(prompts), strict=True)


@dataclass(frozen=True)
class CompletionBatch:
    """Completions to score, right-padded."""

    ids: Int[Tensor, "B T"]  # int64, the sampled ids
    mask: Int[Tensor, "B T"]  # 1 on tokens of the completion, tool output included: the teacher reads them
    loss_mask: Bool[Tensor, "B T"]  # True on tokens that are scored
