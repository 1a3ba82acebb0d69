"""Protocol of a task: a dataset builder, a verifier, and the batch form of the verifier."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from credit_trl.rollout.verdict import Verdict
from credit_trl.tasks.completions import response_text

if TYPE_CHECKING:
    from datasets import Dataset

Rewards = list["Verdict | float | None"]


@dataclass(frozen=True)
class Task:
    """A source of prompts and the verifier of responses to them.

    Args:
        name: registry name, which `build` writes into the column `task`.
        build: `(split, path=None, **options) -> Dataset` with the columns `prompt` (messages), `answer`, `task`, `id`.
        verify: `(response, answer, *, truncated=False, **options) -> Verdict`, for one response.
        reward: `(completions, answer, truncated=None, **columns) -> list[Verdict]`, for a batch.
    """

    name: str
    build: Callable[..., Dataset]
    verify: Callable[..., Verdict]
    reward: Callable[..., Rewards]


@dataclass(frozen=True)
class TaskOption:
    """Meaning of the text after the colon of a task's name. A module declares it as `OPTION`.

    Args:
        keyword: keyword argument of `build` that receives the text.
        values: allowed texts; empty where the task checks them itself.
        verify: whether the verifier receives the argument too.
    """

    keyword: str
    values: tuple[str, ...] = ()
    verify: bool = False

    def check(self, value: str, task: str) -> None:
        """Raise a `ValueError` for a value that is not allowed."""
        if value not in self.values:
            raise ValueError(f"{task} has no {self.keyword} {value!r}; use one of {', '.join(self.values)}.")


def parse_choice(answer: str | Mapping[str, str], example: Mapping[str, str], letters: str, task: str) -> Any:
    """Gold answer, from JSON text or a mapping: texts under the keys of `example`, and a letter as `option`."""
    try:
        gold = json.loads(answer) if isinstance(answer, str) else answer
        if all(isinstance(gold[key], str) for key in example) and gold["option"] in tuple(letters):
            return gold
    except (ValueError, KeyError, TypeError):
        pass
    raise ValueError(
        f"Not an answer of {task}: {answer!r}. Answers of `{task}.build` look like {json.dumps(example)}."
    )


def batch_of(verify: Callable[..., Verdict], name: str = "reward") -> Callable[..., list[Verdict]]:
    """Batch form of a verifier, for TRL's `reward_funcs`.

    The returned function takes `completions` (texts, or conversations whose last assistant message is graded), the
    column `answer`, and `truncated` (a flag per completion, or `None`). Its `__name__` is `name`, which TRL logs.
    """

    def reward(
        completions: Sequence[Any], answer: Sequence[Any], truncated: Sequence[bool] | None = None, **columns: Any
    ) -> list[Verdict]:
        flags = [False] * len(completions) if truncated is None else truncated
        return [
            verify(response_text(completion), gold, truncated=bool(flag))
            for completion, gold, flag in zip(completions, answer, flags, strict=True)
        ]

    reward.__name__ = name
    return reward
