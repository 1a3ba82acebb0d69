"""Deadline of a reward function call, readable by the code that it runs, and calls in a daemon thread."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from threading import Thread
from typing import TypeVar

T = TypeVar("T")

# The caller's own time-out comes first, so that its error is the one that is raised.
_MARGIN_SECONDS = 1.0

_deadline: ContextVar[float] = ContextVar("deadline", default=math.inf)  # on the clock of `time.monotonic`


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
    return limit if remaining == math.inf else min(remaining, math.inf if limit is None else limit)


def call_in_thread(name: str, work: Callable[[], T]) -> Future[T]:
    """Run `work` in a daemon thread with the caller's deadline and current device, and return its future.

    A call that never returns does not keep the process alive. torch stores the current device per thread.
    """
    import torch  # deferred: `rollout.verdict` is imported without torch

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
