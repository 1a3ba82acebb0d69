"""Graded samples of an evaluation: by the task's verifier, with a finite reward each."""

import functools
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from transformers import TrainerState

from credit_trl.contexts.prompts import row_prompt
from credit_trl.evaluation.generation import Response
from credit_trl.rollout.thinking import use_marks
from credit_trl.rollout.verdict import FAILED, Verdict, VerifierPolicy, as_verdicts, takes
from credit_trl.sandbox.user_code import undisturbed
from credit_trl.tasks.task import Task, call_reward
from credit_trl.training.checks import check_column_names

logger = logging.getLogger(__name__)

# Metric of a verdict without a reward that a second call may decide: the machine was too slow.
UNDECIDED = "undecided"

DatasetRow = Mapping[str, Any]
Unit = tuple[DatasetRow, int]  # a row and the number of the sample


@dataclass(frozen=True)
class Sample:
    """One graded completion."""

    prompt: str  # id
    sample: int  # number of the sample, in [0, k)
    text: str
    length: int  # tokens, end of turn included
    truncated: bool  # whether it reached the length limit
    reward: float
    feedback: str | None
    metrics: dict[str, float]  # of the verdict, those that are finite


class VerifierFailed(RuntimeError):
    """The verifier failed, and the policy is not to raise its error."""


def grade(
    task: Task, batch: Sequence[Unit], responses: Sequence[Response], policy: VerifierPolicy | None
) -> list[Sample]:
    """Grade a batch. Undecided samples are graded a second time, without the others; then they count as 0.

    Raises:
        ValueError: the verifier does not apply to a row, or returns a reward that is not finite.
        VerifierFailed: the verifier failed or timed out, and `policy` has `on_error="skip"`.
    """
    rows = [row for row, _ in batch]
    verdicts = task_verdicts(task, rows, responses, policy)
    again = [i for i, verdict in enumerate(verdicts) if _is_undecided(verdict)]
    if again:
        undecided = 0
        second = task_verdicts(task, [rows[i] for i in again], [responses[i] for i in again], policy)
        for i, verdict in zip(again, second, strict=True):
            undecided += _is_undecided(verdict)
            verdicts[i] = replace(verdict, reward=0.0) if _is_undecided(verdict) else verdict
        if undecided:
            logger.warning(f"{task.name} could not decide {undecided} samples in two calls; they count as 0.")
    samples = []
    for (row, number), response, verdict in zip(batch, responses, verdicts, strict=True):
        samples.append(_sample(row["id"], number, response, verdict))
    return samples


def task_verdicts(
    task: Task, rows: Sequence[DatasetRow], responses: Sequence[Response], policy: VerifierPolicy | None = None
) -> list[Verdict]:
    """Verdicts of one call of `task.reward`: completions in TRL's form, the rows' columns, and `truncated`.

    Raises:
        ValueError: a column has the name of another argument.
        VerifierFailed: the verifier failed or timed out, and `policy` has `on_error="skip"`.
    """
    check_column_names(f"The data of task {task.name!r}", rows[0])
    is_text = isinstance(rows[0]["prompt"], str)
    completions: list[Any] = []
    for response in responses:
        message = response.message or {"role": "assistant", "content": response.text}
        completions.append(response.text if is_text else [message])
    arguments = {"completions": completions, "prompts": list(map(row_prompt, rows))}
    for name in rows[0].keys() - {"prompt"}:
        arguments[name] = [row.get(name) for row in rows]
    arguments["truncated"] = list(map(attrgetter("truncated"), responses))
    trainer_arguments = {
        "completion_ids": list(map(attrgetter("ids"), responses)),
        "trainer_state": TrainerState(),
        "log_extra": _ignore,
        "log_metric": _ignore,
    }
    for name, value in trainer_arguments.items():
        if takes(task.reward, name):
            arguments[name] = value
    with use_marks(responses[0].marks), undisturbed([0], logger.warning):
        reward = functools.partial(call_reward, task.reward)
        verdicts = (policy or VerifierPolicy()).call(task.name, reward, arguments)
    if verdicts is FAILED:
        raise VerifierFailed(f"The verifier of {task.name!r} failed, so its samples have no reward.")
    return as_verdicts(task.name, verdicts, arguments)


def _ignore(*args: Any, **kwargs: Any) -> None:
    """Log nothing: an evaluation has no log of the verifier."""


def _is_undecided(verdict: Verdict) -> bool:
    return verdict.reward is None and bool(verdict.metrics.get(UNDECIDED))


def _sample(prompt: str, number: int, response: Response, verdict: Verdict) -> Sample:
    if not math.isfinite(verdict):
        raise ValueError(f"The verifier returned no finite reward for prompt {prompt!r}. For avg@k return a number.")
    return Sample(
        prompt=prompt,
        sample=number,
        text=_encodable(response.text),
        length=response.length,
        truncated=response.truncated,
        reward=float(verdict),
        feedback=None if verdict.feedback is None else _encodable(verdict.feedback),
        metrics={name: float(value) for name, value in verdict.metrics.items() if math.isfinite(value)},
    )


def _encodable(text: str) -> str:
    """Replace unpaired surrogates, which UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode("utf-8")
