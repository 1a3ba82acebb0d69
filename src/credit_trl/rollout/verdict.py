"""Verdicts: what an environment says of a rollout, `(x, y) -> (reward, z)`.

A reward function may return a list of `Verdict`s instead of floats. One grading per rollout then yields both the
scalar reward that GRPO uses and the feedback z that the self-teacher reads."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from credit_trl.rollout.deadline import given_up_after


@dataclass(frozen=True)
class Verdict:
    """One rollout's grading.

    Args:
        reward: the scalar reward, or `None` where this verifier does not apply to the row (TRL's convention: the
            reward is left out of the group's statistics).
        feedback: what the environment says of the answer, z in the paper; `None` or an empty string for nothing.
            It is data, not instructions: special-token strings in it are encoded as plain text.
        metrics: further numbers to log, averaged over the rollouts that carry them (`{"pass_fraction": 0.5}`).
        turn_feedback: what it says of single turns of a rollout with tools or environments, by the number of the turn
            from 0. A turn is one answer of the model, with the calls that it makes.

    Raises:
        TypeError: `reward` is not a number, `feedback` is not text, `metrics` are not numbers by name, or
            `turn_feedback` is not text by number.
    """

    reward: float | None
    feedback: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    turn_feedback: Mapping[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.reward is not None and not hasattr(self.reward, "__float__"):
            raise TypeError(f"Verdict.reward must be a number or None, got {type(self.reward).__name__}.")
        if self.feedback is not None and not isinstance(self.feedback, str):
            raise TypeError(
                f"Verdict.feedback must be text or None, got {type(self.feedback).__name__}. Turn it into the words "
                "that the model should read, for example with `json.dumps` or `str`."
            )
        for name in ("metrics", "turn_feedback"):
            if not isinstance(getattr(self, name), Mapping):
                raise TypeError(f"Verdict.{name} must be a mapping, got {type(getattr(self, name)).__name__}.")
        for name, value in self.metrics.items():
            if not (isinstance(name, str) and hasattr(value, "__float__")):
                raise TypeError(
                    "Verdict.metrics must map names to numbers, as in `{'pass_fraction': 0.5}`; "
                    f"got {name!r}: {type(value).__name__}."
                )
        for turn, text in self.turn_feedback.items():
            if not (isinstance(turn, int) and turn >= 0 and isinstance(text, str)):
                raise TypeError(
                    "Verdict.turn_feedback must map the number of a turn, from 0, to text, as in `{0: 'Look.'}`; "
                    f"got {turn!r}: {type(text).__name__}."
                )

    def __repr__(self) -> str:
        """What it says; nothing of what it leaves empty."""
        said = {one.name: value for one in fields(self) if (value := getattr(self, one.name)) or one.name == "reward"}
        return f"Verdict({', '.join(f'{name}={value!r}' for name, value in said.items())})"

    def __float__(self) -> float:
        return math.nan if self.reward is None else float(self.reward)


logger = logging.getLogger(__name__)


class VerifierTimeout(TimeoutError):
    """A reward function has not returned within `verifier_timeout`."""


@dataclass(frozen=True)
class VerifierPolicy:
    """What is done about a reward function that fails.

    Args:
        on_error: `"raise"` or `"skip"`.
        timeout: seconds for one call, None for no limit.
    """

    on_error: Literal["raise", "skip"] = "raise"
    timeout: float | None = None

    def call(self, name: str, reward_func: Callable[..., Any], arguments: dict[str, Any]) -> Any | None:
        """What the function returns; None where it failed and that is to be skipped.

        Raises:
            VerifierTimeout: it took too long, with `on_error="raise"`. What else it raises passes through.
        """
        try:
            if self.timeout is None:
                return reward_func(**arguments)
            return _within(self.timeout, name, reward_func, arguments)
        except Exception as error:
            return self._failed(name, error)

    async def call_async(self, name: str, reward_func: Callable[..., Any], arguments: dict[str, Any]) -> Any | None:
        """The same of a coroutine function, which has to give way while it waits."""
        try:
            with given_up_after(self.timeout):
                call = asyncio.ensure_future(reward_func(**arguments))
            try:
                await asyncio.wait({call}, timeout=self.timeout)
                if call.done():  # not `wait_for`: a function may raise a TimeoutError of its own
                    return call.result()
            finally:
                call.cancel()
            raise _too_late(name, self.timeout)
        except Exception as error:
            return self._failed(name, error)

    def _failed(self, name: str, error: Exception) -> None:
        if self.on_error == "raise":
            raise error
        logger.warning(f"{name} failed ({type(error).__name__}: {error}); the rollouts it was given are left out.")


def _within(seconds: float, name: str, reward_func: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Call a function in a thread that is abandoned when the time is over: its late words reach nobody."""
    import torch  # not above: verdicts are made where torch is not loaded, too

    is_late = threading.Event()
    outcome: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()

    def until_late(log: Callable[..., None]) -> Callable[..., None]:
        return lambda *words: None if is_late.is_set() else log(*words)

    arguments = arguments | {
        key: until_late(arguments[key]) for key in ("log_extra", "log_metric") if key in arguments
    }

    device = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None

    def run() -> None:
        try:
            if device is not None:  # torch keeps the current one for each thread
                torch.accelerator.set_device_index(device)
            with given_up_after(seconds):
                outcome.put((True, reward_func(**arguments)))
        except BaseException as error:
            outcome.put((False, error))

    threading.Thread(target=run, name=f"verifier {name}", daemon=True).start()
    try:
        has_returned, value = outcome.get(timeout=seconds)
    except queue.Empty:
        is_late.set()
        raise _too_late(name, seconds) from None
    if not has_returned:
        raise value
    return value


def _too_late(name: str, seconds: float | None) -> VerifierTimeout:
    return VerifierTimeout(
        f"The reward function {name!r} has not returned within {seconds:g} s. Raise `verifier_timeout`, make it "
        "faster, or go on without the rollouts it was given: `on_verifier_error='skip'`."
    )


class VerdictLog:
    """Feedback of one generation batch, gathered while the reward functions run.

    `recording(f)` wraps a reward function so that TRL sees floats and this log keeps the feedback. A sample's feedback
    is what its verifiers said, in the order of the reward functions, joined by an empty line.

    Args:
        policy: what is done about functions that fail.
    """

    def __init__(self, policy: VerifierPolicy | None = None) -> None:
        self.policy = policy or VerifierPolicy()
        self._feedback: dict[int, list[str | None]] = {}
        self._turns: dict[int, list[Mapping[int, str]]] = {}
        self._has_failed = False

    def clear(self) -> None:
        self._feedback.clear()
        self._turns.clear()
        self._has_failed = False

    def skipped(self, num_samples: int) -> list[bool]:
        """For each local sample, whether a function that graded it failed; a function grades all of them."""
        return [self._has_failed] * num_samples

    def feedback(self, num_samples: int) -> list[str | None]:
        """One text per local sample, or None where nobody said anything."""
        columns = [self._feedback[i] for i in sorted(self._feedback)]
        return [join_feedback([column[row] for column in columns]) for row in range(num_samples)]

    def turn_feedback(self, num_samples: int) -> list[dict[int, str]]:
        """What was said of the turns of each local sample, by turn; several functions' words are joined."""
        said: list[dict[int, str]] = [{} for _ in range(num_samples)]
        for position in sorted(self._turns):
            for turns, texts in zip(said, self._turns[position], strict=True):
                joined = {turn: join_feedback([turns.get(turn), text]) for turn, text in texts.items()}
                turns.update({turn: text for turn, text in joined.items() if text is not None})
        return said

    def recording(self, reward_func: Callable[..., Any], position: int) -> Callable[..., Any]:
        """Wrap the reward function at `position` of the trainer's list; a coroutine function stays one."""
        name = getattr(reward_func, "__name__", type(reward_func).__name__)
        if inspect.iscoroutinefunction(reward_func) or inspect.iscoroutinefunction(type(reward_func).__call__):

            async def recorded_async(**kwargs: Any) -> list[float | None]:
                return self._record(position, await self.policy.call_async(name, reward_func, kwargs), kwargs)

            return recorded_async

        def recorded(**kwargs: Any) -> list[float | None]:
            return self._record(position, self.policy.call(name, reward_func, kwargs), kwargs)

        return recorded

    def _record(self, position: int, output: Sequence[Any] | None, given: Mapping[str, Any]) -> list[float | None]:
        if output is None:
            self._has_failed = True
            return [0.0] * len(given["completions"])  # stands in until the rewards are withheld
        log_metric = given.get("log_metric")
        verdicts = [v if isinstance(v, Verdict) else Verdict(v) for v in output]
        self._feedback[position] = [v.feedback for v in verdicts]
        self._turns[position] = [v.turn_feedback for v in verdicts]
        for verdict in verdicts:
            for name, value in verdict.metrics.items():
                if log_metric is not None:
                    log_metric(name, float(value))
        return [v.reward for v in verdicts]


def join_feedback(parts: Sequence[str | None]) -> str | None:
    """Texts that say something, each once, separated by an empty line; None if none does."""
    said = dict.fromkeys(part for part in parts if part is not None and part.strip())
    return "\n\n".join(said) or None
