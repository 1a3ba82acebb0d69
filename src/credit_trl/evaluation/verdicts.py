"""Answers of an evaluation, graded by their task: every one gets a number, or the evaluation says why not."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from credit_trl.evaluation.engines import Response
from credit_trl.evaluation.samples import Sample
from credit_trl.rollout.verdict import Verdict, VerifierPolicy
from credit_trl.tasks.registry import Task, call_reward

logger = logging.getLogger(__name__)

# The metric of a verdict without reward that another try may decide: the machine was too slow, not the answer.
UNDECIDED = "undecided"

# A row of the data and the number of the sample.
Unit = tuple[Mapping[str, Any], int]


class VerifierFailed(RuntimeError):
    """The verifier failed, and what it was given is not to end the run."""


def grade(
    task: Task,
    batch: Sequence[Unit],
    responses: Sequence[Response],
    read_answer: Callable[[str], str | None] | None,
    policy: VerifierPolicy,
) -> list[Sample]:
    """A batch's samples. What the verifier leaves undecided it is asked once more, alone; then it counts as 0.

    Raises:
        ValueError: the verifier does not apply to a row, or gives a reward that is no finite number.
        VerifierFailed: it failed or was too late, and `policy` is not to raise.
    """
    verdicts = _verdicts(task, batch, responses, policy)
    if again := [i for i, verdict in enumerate(verdicts) if _is_undecided(verdict)]:
        second = _verdicts(task, [batch[i] for i in again], [responses[i] for i in again], policy)
        for i, verdict in zip(again, second, strict=True):
            verdicts[i] = dataclasses.replace(verdict, reward=0.0) if _is_undecided(verdict) else verdict
        if left := sum(map(_is_undecided, second)):
            logger.warning(
                f"{task.name} could not decide {left} answers in two tries; they count as 0 (`{UNDECIDED}`)."
            )
    return [
        _graded(row, number, response, verdict, read_answer)
        for (row, number), response, verdict in zip(batch, responses, verdicts, strict=True)
    ]


def _is_undecided(verdict: Verdict) -> bool:
    return verdict.reward is None and bool(verdict.metrics.get(UNDECIDED))


def _verdicts(
    task: Task, batch: Sequence[Unit], responses: Sequence[Response], policy: VerifierPolicy
) -> list[Verdict]:
    columns = {name: [row.get(name) for row, _ in batch] for name in batch[0][0] if name != "prompt"}
    conversational = not isinstance(batch[0][0]["prompt"], str)
    texts = [response.text for response in responses]
    arguments = {
        "completions": [[{"role": "assistant", "content": t}] for t in texts] if conversational else texts,
        "prompts": [row["prompt"] for row, _ in batch],
        **{**columns, "truncated": [response.truncated for response in responses]},
    }
    verdicts = policy.call(task.name, lambda **given: call_reward(task.reward, **given), arguments)
    if verdicts is None:
        raise VerifierFailed(f"The verifier of {task.name!r} failed, so these answers have no score.")
    return [v if isinstance(v, Verdict) else Verdict(v) for v in verdicts]


def _graded(
    row: Mapping[str, Any],
    number: int,
    response: Response,
    verdict: Verdict,
    read_answer: Callable[[str], str | None] | None,
) -> Sample:
    if not math.isfinite(verdict):
        raise ValueError(f"The verifier gave no reward to prompt {row['id']!r}; avg@k needs one for every sample.")
    return Sample(
        prompt=row["id"],
        sample=number,
        text=_encodable(response.text),
        length=response.length,
        truncated=response.truncated,
        reward=float(verdict),
        feedback=None if verdict.feedback is None else _encodable(verdict.feedback),
        metrics={name: float(value) for name, value in verdict.metrics.items() if math.isfinite(value)},
        answer=read_answer(response.text) if read_answer else None,
    )


def _encodable(text: str) -> str:
    """Half a surrogate pair is no character, and no file takes it."""
    return text.encode("utf-8", "replace").decode("utf-8")
