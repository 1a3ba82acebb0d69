"""Verdicts of verifiers, the error and timeout policy for reward functions, and the feedback of a generation batch.

A reward function may return a list of `Verdict`s instead of floats. A verdict holds the scalar reward that GRPO uses
and the feedback that the teacher conditions on. The deadline of a call can be read by the code that it runs.
"""

import asyncio
import inspect
import logging
import math
import pickle
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from numbers import Integral
from threading import Thread
from typing import Any, Literal, TypeVar

from credit_trl.sandbox.user_code import copied, exit_is_an_error, explained_verifier

T = TypeVar("T")
DelayedCalls = list[Callable[[], None]]  # of loggers

logger = logging.getLogger(__name__)

# Names that the trainer or an evaluation logs itself.
_LOGGED = re.compile(
    "(loss|policy_loss|aux_loss|reward|reward_std|frac_reward_zero_std|kl|entropy|entropy_coef|cispo_clip_ratio"
    "|grad_norm|learning_rate|epoch|step|step_time|num_tokens|mean_length|truncated|runtime)$"
    "|(credit|completions|rewards|sampling|clip_ratio|tools|vespo)/|(avg|pass)@|(eval|train)_"
)


@dataclass(frozen=True)
class Verdict:
    """Reward and feedback of one rollout.

    Args:
        reward: scalar reward, or None if the verifier does not apply to the row, as in TRL: group statistics ignore
            the reward.
        feedback: text on the completion, part of the privileged context; None or an empty string for none. It is
            data, not instructions: special-token strings in it are encoded as plain text.
        metrics: numbers to log, averaged over the rollouts that have them (`{"pass_fraction": 0.5}`); one that is not
            finite counts as missing.
        turn_feedback: text on single turns of a rollout with tools or environments, by turn index from 0. A turn is
            one message of the model with its tool calls.

    Raises:
        TypeError: `reward` or a value of `metrics` is not a number, `feedback` is not text, or `turn_feedback` does
            not map integers to text.
        ValueError: `metrics` has a name that the trainer or an evaluation logs itself, such as `reward`.
    """

    reward: float | None
    feedback: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    turn_feedback: Mapping[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.reward is not None and not _is_number(self.reward):
            kind = type(self.reward).__name__
            raise TypeError(f"Verdict.reward must be a number or None, got {kind}. Write Verdict(1.0, feedback).")
        if self.feedback is not None and not isinstance(self.feedback, str):
            kind = type(self.feedback).__name__
            raise TypeError(f"Verdict.feedback must be text or None, got {kind}. Write it as text.")
        for name, form in (("metrics", '{"name": number}'), ("turn_feedback", "{turn: text}")):
            value = getattr(self, name)
            if not isinstance(value, Mapping):
                raise TypeError(f"Verdict.{name} must be a mapping, got {type(value).__name__}. Write {form}.")
        for name, value in self.metrics.items():
            if not isinstance(name, str):
                raise TypeError(
                    f"Verdict.metrics must have names that are text, got {name!r:.80}. Write it in quotes."
                )
            if not _is_number(value):
                kind = type(value).__name__
                raise TypeError(f"Verdict.metrics[{name!r}] must be a number, got {kind}. Leave the name out.")
        for turn, text in self.turn_feedback.items():
            if not isinstance(turn, Integral) or not isinstance(text, str):
                pair = f"{{{turn!r}: {text!r:.80}}}"
                raise TypeError(f"Verdict.turn_feedback must map indices to text, got {pair}. Write {{0: 'text'}}.")
        for name in filter(_LOGGED.match, self.metrics):
            raise ValueError(
                f"Verdict.metrics has {name!r}, a name that the trainer or an evaluation logs itself. Rename it, for "
                f"example to 'verifier_{name}'."
            )

    def __float__(self) -> float:
        return math.nan if self.reward is None else float(self.reward)


_NO_LIST = (Mapping, Set, str, bytes)

# The caller's own time-out comes first, so that its error is the one that is raised.
_MARGIN_SECONDS = 1.0

_deadline: ContextVar[float] = ContextVar("deadline", default=math.inf)  # on the clock of `time.monotonic`

_MAX_REWARD = 1e15  # whose square is summed in fp32

# Result of a reward function that failed and is skipped.
FAILED = object()


class VerifierTimeout(TimeoutError):
    """A reward function did not return within `verifier_timeout`."""


@dataclass(frozen=True)
class VerifierPolicy:
    """Error and timeout policy for reward functions: `"raise"` ends the run, `"skip"` masks the rollouts of the call.

    `timeout` is the limit of one call in seconds, None for no limit.
    """

    on_error: Literal["raise", "skip"] = "raise"
    timeout: float | None = None

    def call(self, name: str, reward_func: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """Call a reward function; return its result, or `FAILED` if it failed and `on_error="skip"`.

        Raises:
            VerifierTimeout: it took too long, with `on_error="raise"`: a result that comes late, too, since a thread
                that keeps the interpreter lock stops this one. Other exceptions propagate.
        """

        def work() -> tuple[Any, float]:
            with deadline_in(self.timeout), exit_is_an_error(f"The reward function {name!r}"):
                return listed(reward_func(**copies), arguments), time.monotonic()

        copies = copied(arguments)
        began = time.monotonic()
        try:
            if self.timeout is None:
                return work()[0]
            outcome = call_in_thread(f"verifier {name}", work)  # a thread that is abandoned after the timeout
            wait([outcome], timeout=self.timeout)
            return self._result(name, outcome, began)
        except Exception as error:
            return self._handle(name, error, arguments)

    async def call_async(self, name: str, reward_func: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """Call a coroutine function as `call` does, without blocking the event loop."""

        async def work() -> tuple[Any, float]:
            with exit_is_an_error(f"The reward function {name!r}"):
                return listed(await reward_func(**copies), arguments), time.monotonic()

        copies = copied(arguments)
        began = time.monotonic()
        try:
            with deadline_in(self.timeout):
                outcome = asyncio.ensure_future(work())
            try:
                await asyncio.wait({outcome}, timeout=self.timeout)  # `wait_for` hides a TimeoutError of the function
                return self._result(name, outcome, began)
            finally:
                outcome.cancel()
        except Exception as error:
            return self._handle(name, error, arguments)

    def _result(self, name: str, outcome: asyncio.Future | Future, began: float) -> Any:
        if outcome.done():
            output, ended = outcome.result()
            if self.timeout is None or ended - began <= self.timeout:
                return output
        raise VerifierTimeout(
            f"The reward function {name!r} has not returned within {self.timeout:g} s. Raise `verifier_timeout`, run "
            "it in a process that can be killed (`credit_trl.in_process`), or set `on_verifier_error='skip'`."
        )

    def _handle(self, name: str, error: Exception, arguments: Mapping[str, Any]) -> object:
        completion = next(iter(arguments.get("completions", ())), None)
        error = explained_verifier(error, name, completion)
        if self.on_error == "raise":
            raise error from None
        logger.warning(f"{name} failed ({type(error).__name__}: {error}); the rollouts of this call are skipped.")
        return FAILED


@contextmanager
def deadline_in(seconds: float | None) -> Iterator[None]:
    """Set the deadline of the code in this context to one second after its caller stops waiting.

    The caller waits `seconds`, or without limit. An earlier deadline of an outer context stays.
    """
    deadline = math.inf if seconds is None else time.monotonic() + seconds + _MARGIN_SECONDS
    token = _deadline.set(min(_deadline.get(), deadline))
    try:
        yield
    finally:
        _deadline.reset(token)


def remaining_seconds(limit: float | None = None) -> float | None:
    """Seconds until the deadline, at most `limit`; `None` if there is neither. Negative after the deadline."""
    remaining = _deadline.get() - time.monotonic()
    if remaining == math.inf:
        return limit
    return remaining if limit is None else min(remaining, limit)


def call_in_thread(name: str, work: Callable[[], T]) -> Future[T]:
    """Run `work` in a daemon thread with the caller's deadline and current device, and return its future.

    A call that never returns does not keep the process alive. torch stores the current device per thread.
    """
    import torch  # deferred: tasks import this module without torch

    device = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            if device is not None:
                torch.accelerator.set_device_index(device)
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    Thread(target=copy_context().run, args=(run,), name=name, daemon=True).start()
    return outcome


class VerdictLog:
    """Feedback of one generation batch, collected while the reward functions run.

    `wrap` wraps a reward function so that TRL gets floats and this log keeps the feedback. The feedback of a sample
    joins that of its reward functions, in their order, with an empty line between them.
    """

    def __init__(self, policy: VerifierPolicy | None = None) -> None:
        self.policy = policy or VerifierPolicy()
        self.clear()

    def clear(self) -> None:
        """Remove the feedback of the last generation batch."""
        self._verdicts: dict[int, list[Verdict]] = {}  # by position of the reward function
        self.has_failed = False  # whether a reward function did, which grades all local samples in one call

    def wrap(self, reward_func: Callable[..., Any], position: int) -> Callable[..., Any]:
        """Wrap the reward function at `position` of the trainer's list. A coroutine function stays one."""
        # Tasks import this module without TRL.
        from credit_trl.trl_compat import get_callable_name, is_async_callable

        name = get_callable_name(reward_func)
        ignored = () if takes(reward_func, "truncated") else ("truncated",)

        def accepted(arguments: dict[str, Any], delayed: DelayedCalls) -> dict[str, Any]:
            """Arguments that the function takes. Its calls of loggers are delayed, as it may fail or be late."""
            result = {}
            for key, value in arguments.items():
                if key in _DELAY:
                    result[key] = partial(_DELAY[key], delayed, value)
                elif key not in ignored:
                    result[key] = value
            return result

        def record(output: Any, arguments: dict[str, Any], delayed: DelayedCalls) -> list[float | None]:
            if output is FAILED:
                self.has_failed = True
                return [0.0] * len(arguments["completions"])  # placeholders, replaced in `mask_skipped_rewards`
            for log in delayed:
                log()
            verdicts = as_verdicts(name, output, arguments)
            self._verdicts[position] = verdicts
            if "log_metric" in arguments:
                _log_metrics(verdicts, arguments["log_metric"])
            return [verdict.reward for verdict in verdicts]

        async def wrapped_async(**kwargs: Any) -> list[float | None]:
            delayed: DelayedCalls = []
            output = await self.policy.call_async(name, reward_func, accepted(kwargs, delayed))
            return record(output, kwargs, delayed)

        def wrapped(**kwargs: Any) -> list[float | None]:
            delayed: DelayedCalls = []
            output = self.policy.call(name, reward_func, accepted(kwargs, delayed))
            return record(output, kwargs, delayed)

        return wrapped_async if is_async_callable(reward_func) else wrapped

    def _by_sample(self, num_samples: int) -> list[list[Verdict]]:
        """Verdicts of each local sample, in the order of the reward functions."""
        samples: list[list[Verdict]] = [[] for _ in range(num_samples)]
        for position in sorted(self._verdicts):
            for verdicts, verdict in zip(samples, self._verdicts[position], strict=True):
                verdicts.append(verdict)
        return samples

    def feedback(self, num_samples: int) -> list[str | None]:
        """Feedback of each local sample, or None."""
        texts = []
        for verdicts in self._by_sample(num_samples):
            texts.append(join_feedback([verdict.feedback for verdict in verdicts]))
        return texts

    def turn_feedback(self, num_samples: int) -> list[dict[int, str]]:
        """Feedback on the turns of each local sample, by turn index."""
        samples = []
        for verdicts in self._by_sample(num_samples):
            texts: dict[int, list[str]] = defaultdict(list)
            for verdict in verdicts:
                for turn, text in verdict.turn_feedback.items():
                    texts[turn].append(text)
            joined = {turn: join_feedback(texts[turn]) for turn in sorted(texts)}
            samples.append({turn: text for turn, text in joined.items() if text is not None})
        return samples


def _delay(delayed: DelayedCalls, log: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Store a call of a logger with copies of its arguments, which the function may change later."""
    copied_args = map(copy, args)
    copied_kwargs = {key: copy(value) for key, value in kwargs.items()}
    delayed.append(partial(log, *copied_args, **copied_kwargs))


def _delay_column(delayed: DelayedCalls, log: Callable[..., None], column: str, values: list[Any]) -> None:
    """Store a call of `log_extra`, unless the trainer fills a column of that name."""
    if column in ("feedback", "teacher_prompt", "s_mean"):
        raise ValueError(f"The trainer logs {column!r} itself in runs with a teacher. Give the column another name.")
    _delay(delayed, log, column=column, values=values)


# Argument of a reward function -> how a call of it is stored.
_DELAY = {"log_extra": _delay_column, "log_metric": _delay}


def _log_metrics(verdicts: Iterable[Verdict], log_metric: Callable[[str, float], None]) -> None:
    for verdict in verdicts:
        for metric, value in verdict.metrics.items():
            if math.isfinite(value):
                log_metric(metric, float(value))


def listed(output: Any, arguments: Mapping[str, Any]) -> Any:
    """A result of a reward function as a list. An iterable is read up to one element beyond the expected number."""
    if isinstance(output, _NO_LIST) or not isinstance(output, Iterable):
        return output
    limit = len(arguments["completions"]) + 1 if "completions" in arguments else None
    return list(islice(output, limit))


def as_verdicts(name: str, output: Any, arguments: Mapping[str, Any]) -> list[Verdict]:
    """The result of a reward function as one verdict per completion.

    Raises:
        TypeError: the result is not a list, or an element is neither a number, a `Verdict` nor None.
        ValueError: the number of elements is not the number of completions, or a reward is not finite.
    """
    fix = "Return a list with one `Verdict(reward, feedback)`, number or None for each completion."
    if output is None:
        raise TypeError(f"The reward function {name!r} returned None; is a `return` missing? {fix}")
    elements = listed(output, arguments)  # of an iterator without an end, too
    if not isinstance(elements, list):
        raise TypeError(f"The reward function {name!r} returned a {type(output).__name__} instead of a list. {fix}")
    expected = len(arguments["completions"]) if "completions" in arguments else None
    if expected is not None and len(elements) != expected:
        count = f"more than {expected}" if len(elements) > expected else len(elements)
        raise ValueError(f"The reward function {name!r} returned {count} elements for {expected} completions. {fix}")
    verdicts = []
    for index, element in enumerate(elements):
        if isinstance(element, int) and not _is_number(element):
            element = math.inf  # above every float
        if not (element is None or isinstance(element, Verdict) or _is_number(element)):
            kind = type(element).__name__
            raise TypeError(f"The reward function {name!r} returned a {kind} for completion {index}. {fix}")
        verdict = element if isinstance(element, Verdict) else Verdict(element)
        if verdict.reward is not None and not abs(verdict.reward) <= _MAX_REWARD:
            raise ValueError(
                f"The reward function {name!r} returned the reward {float(verdict)} for completion {index}. Return a "
                f"finite number of at most {_MAX_REWARD:g}, or None where the function does not apply."
            )
        verdicts.append(verdict)
    return verdicts


def _is_number(value: Any) -> bool:
    """Whether a value converts to one float; text does not."""
    try:
        math.isfinite(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return False
    return True


def parameters_of(func: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Parameters of a function by name; a callable without a signature takes any keyword."""
    try:
        return dict(inspect.signature(func).parameters)
    except (TypeError, ValueError):
        return {"kwargs": inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)}


def takes(func: Callable[..., Any], name: str) -> bool:
    """Whether a function takes a keyword argument of this name, by itself or in `**kwargs`."""
    parameters = parameters_of(func)
    kinds = [parameter.kind for parameter in parameters.values()]
    return name in parameters or inspect.Parameter.VAR_KEYWORD in kinds


def transferable(error: Exception | None) -> Exception | None:
    """The error, or one with its type and text where it cannot be sent to another process."""
    with suppress(Exception):
        pickle.loads(pickle.dumps(error))  # bytes of this process, not of others
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")


def join_feedback(parts: Sequence[str | None]) -> str | None:
    """Join the distinct texts that are not blank with an empty line; None if there are none."""
    present = [part for part in parts if part and part.strip()]
    text = "\n\n".join(dict.fromkeys(present))
    return text.encode("utf-8", "replace").decode("utf-8") or None  # tokenizers and files reject lone surrogates
