"""Wall-clock time of each stage of a training step."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class StageClock:
    """Accumulates wall-clock seconds by stage. The time of a stage inside another counts for the inner one only.

    A stage is timed if `counts` returns True when it ends.
    """

    def __init__(self, counts: Callable[[], bool] = lambda: True) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._counts = counts
        self._step = 0

    def start(self, step: int) -> None:
        """Count steps from this one, at which a run begins or resumes."""
        self._step = step

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the duration of the block to a stage."""
        before, started = sum(self.seconds.values()), time.perf_counter()
        try:
            yield
        finally:
            if self._counts():
                inside = sum(self.seconds.values()) - before
                self.seconds[name] += time.perf_counter() - started - inside

    def report(self, step: int) -> dict[str, float]:
        """Return `credit/seconds_<stage>`, means per optimizer step since the last report, and reset the clock."""
        steps = max(step - self._step, 1)
        means = {f"credit/seconds_{name}": seconds / steps for name, seconds in self.seconds.items()}
        self.seconds.clear()
        self._step = step
        return means
