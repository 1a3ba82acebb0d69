"""A task: a source of prompts with the verifier that grades responses to them."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from credit_trl.rollout.thinking import marks_in_use, set_marks
from credit_trl.rollout.verdict import (
    Verdict,
    as_verdicts,
    call_in_thread,
    join_feedback,
    parameters_of,
    remaining_seconds,
    takes,
)
from credit_trl.sandbox.in_process import InProcess
from credit_trl.sandbox.protocol import excerpt
from credit_trl.sandbox.user_code import copied

if TYPE_CHECKING:
    from datasets import Dataset

Rewards = list["Verdict | float | None"]
PROMPTS = Path(__file__).parent / "prompts"  # texts of the published protocols
BATCH_SECONDS = 900.0  # that grading a batch may take where the call has no earlier deadline
MAX_CHARACTERS = 200_000  # of a response that verifiers read


@dataclass(frozen=True)
class Task:
    """A source of prompts and the verifier of responses to them.

    Args:
        name: registry name, which `build` writes into the column `task`.
        build: `(split, path=None, **options) -> Dataset` with the columns `prompt` and, for `verify`, `answer`.
        verify: `(response, answer, *, truncated=False, **columns) -> Verdict`, for one response; `columns` are
            those of the row that it takes by name.
        reward: `(completions, answer, truncated=None, **columns) -> list[Verdict]`, for a batch.
    """

    name: str
    build: Callable[..., Dataset]
    verify: Callable[..., Verdict]
    reward: Callable[..., Rewards]

    @classmethod
    def from_dataset(
        cls,
        dataset: Dataset | Mapping[str, Dataset],
        reward_funcs: Callable[..., Any] | Sequence[Callable[..., Any]],
        name: str = "dataset",
        reward_weights: Sequence[float] | None = None,
    ) -> Task:
        """The task of a data set, or of data sets by split, with reward functions in TRL's form.

        The reward of a response is the weighted sum of the functions' rewards that are not `None`, and its feedback
        joins theirs. A single data set serves every split.
        """
        functions = [reward_funcs] if callable(reward_funcs) else list(reward_funcs)
        weights = reward_weights or [1.0] * len(functions)

        def build(split: str, path: Any = None, **options: Any) -> Dataset:
            if isinstance(dataset, Mapping) and split not in dataset:
                raise ValueError(f"Task {name!r} has no split {split!r}; use one of {', '.join(dataset)}.")
            return dataset[split] if isinstance(dataset, Mapping) else dataset

        def reward(completions: Sequence[Any], **columns: Any) -> Rewards:
            graded = [_graded(function, {"completions": completions, **columns}) for function in functions]
            return [_total(verdicts, weights) for verdicts in zip(*graded, strict=True)]

        def verify(response: str, answer: Any = None, *, truncated: bool = False, **columns: Any) -> Verdict:
            batch = {column: [value] for column, value in columns.items()}
            return reward([response], answer=[answer], truncated=[truncated], **batch)[0]

        return cls(name, build, verify, reward)


def response_text(completion: str | Sequence[Mapping[str, Any]]) -> str:
    """Text of a completion: the string itself, or the content of the last assistant message of a conversation.

    Structured content is reduced to its text parts. The text is empty where that message has none. Of a text longer
    than `MAX_CHARACTERS` the middle is replaced by a line that counts the dropped characters.
    """
    content: Any = completion
    if not isinstance(completion, str):
        turns = [turn for turn in completion if turn["role"] == "assistant"]
        content = (turns[-1].get("content") if turns else None) or ""
    if not isinstance(content, str):
        content = "".join(part.get("text") or "" for part in content if part.get("type", "text") == "text")
    return excerpt(content, MAX_CHARACTERS)


def batch_of(verify: Callable[..., Verdict], name: str = "reward") -> Callable[..., list[Verdict]]:
    """Batch form of a verifier, for TRL's `reward_funcs`.

    The returned function takes `completions` (texts, or conversations whose last assistant message is graded), the
    columns `answer` and those that `verify` takes by name, and `truncated` (a flag per completion, or `None`). Its
    `__name__` is `name`, which TRL logs.
    """
    names = {*parameters_of(verify)} - {"response", "answer", "truncated"}
    takes_flag = takes(verify, "truncated")

    def reward(
        completions: Sequence[Any], answer: Sequence[Any], truncated: Sequence[bool] | None = None, **columns: Any
    ) -> list[Verdict]:
        flags = [False] * len(completions) if truncated is None else truncated
        options = [{"truncated": bool(flag)} if takes_flag else {} for flag in flags]
        for name in names & columns.keys():
            for row_options, value in zip(options, columns[name], strict=True):
                row_options[name] = value
        verdicts = []
        for completion, gold, row_options in zip(completions, answer, options, strict=True):
            verdict = verify(response_text(completion), gold, **row_options)
            if not isinstance(verdict, Verdict | float | int):
                raise TypeError(
                    f"`verify` of the task returned {verdict!r:.60}. Return a `Verdict(reward, feedback)`."
                )
            verdicts.append(verdict)
        return verdicts

    return renamed(reward, name)


def in_process(function: Callable[..., Any]) -> InProcess:
    """Run a reward function in a process that is killed one second after `verifier_timeout`; see `InProcess`."""
    return InProcess(function, remaining_seconds, lambda: functools.partial(set_marks, marks_in_use()))


def renamed(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """`function`, which may be a coroutine function, under another `__name__`."""
    wrapper = functools.update_wrapper(functools.partial(function), function)
    wrapper.__name__ = name
    return wrapper


def call_reward(reward: Callable[..., Any], **arguments: Any) -> Rewards:
    """Call a reward function; a coroutine runs in another thread, since a notebook's thread has a running loop."""
    graded = reward(**arguments)
    if not inspect.iscoroutine(graded):
        return graded
    return call_in_thread("asynchronous verifier", lambda: asyncio.run(graded)).result()


def _graded(function: Callable[..., Any], arguments: Mapping[str, Any]) -> list[Verdict]:
    """Verdicts of a reward function, which gets the arguments that it takes."""
    accepted = {name: value for name, value in arguments.items() if takes(function, name)}
    name = getattr(function, "__name__", type(function).__name__)
    return as_verdicts(name, call_reward(function, **copied(accepted)), arguments)


def _total(verdicts: Sequence[Verdict], weights: Sequence[float]) -> Verdict:
    total = None
    metrics: dict[str, float] = {}
    for verdict, weight in zip(verdicts, weights, strict=True):
        metrics |= verdict.metrics
        if verdict.reward is not None:
            total = (total or 0.0) + verdict.reward * weight
    return Verdict(total, join_feedback([verdict.feedback for verdict in verdicts]), metrics)
