"""Where the wall time of a step goes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class StageClock:
    """Seconds of wall time by stage since the last report. Stages do not nest, except in one that is `around` them.

    Args:
        counts: whether a stage that begins now is part of a step; by default all are.
    """

    def __init__(self, counts: Callable[[], bool] = lambda: True) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._counts = counts
        self._step = 0

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Adds the block's time to a stage."""
        if not self._counts():
            yield
            return
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - started

    @contextmanager
    def around(self, name: str) -> Iterator[None]:
        """Adds the block's time to a stage, less that of the stages inside it."""
        inside = sum(self.seconds.values())
        started = time.perf_counter()
        try:
            yield
        finally:
            elsewhere = sum(self.seconds.values()) - inside
            self.seconds[name] += time.perf_counter() - started - elsewhere

    def report(self, step: int) -> dict[str, float]:
        """`credit/seconds_<stage>`, a mean over the optimizer steps since the last report, which ends here.

        Args:
            step: optimizer steps done so far.
        """
        steps = max(step - self._step, 1)
        means = {f"credit/seconds_{name}": seconds / steps for name, seconds in self.seconds.items()}
        self.seconds.clear()
        self._step = step
        return means
