"""Deadline of a reward function call, readable by the code that it runs."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

# Between a caller's giving up and the end of its batch, so that the batch's own word on the time never comes first.
_ABANDONED_SECONDS = 1.0

_must_end: ContextVar[float] = ContextVar("must_end", default=math.inf)


@contextmanager
def given_up_after(seconds: float | None) -> Iterator[None]:
    """What is called in here is not waited for any longer than this; `None`: as long as it takes.

    A batch that it runs then ends a second later, whatever its own deadline: it would hold the sandbox for nobody.
    """
    until = math.inf if seconds is None else time.monotonic() + seconds + _ABANDONED_SECONDS
    token = _must_end.set(min(_must_end.get(), until))
    try:
        yield
    finally:
        _must_end.reset(token)


def seconds_left(deadline: float | None) -> float | None:
    """A batch's deadline in seconds, or less where it is `given_up_after` fewer."""
    left = _must_end.get() - time.monotonic()
    if left == math.inf:
        return deadline
    return left if deadline is None else min(deadline, left)
