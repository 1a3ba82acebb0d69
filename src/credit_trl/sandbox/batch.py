"""Base class of the sandboxes, and the state of one batch of programs."""

from __future__ import annotations

import math
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from typing import Any

from credit_trl.sandbox.protocol import STATUSES, Outcome, Program, SandboxError, Status

# Batches that end earlier show no progress bar.
_PROGRESS_DELAY_SECONDS = 0.5
# Interval of progress lines if standard error is not a terminal.
_LOG_SECONDS = 10.0


class Batch:
    """State of one `Sandbox.run`: waiting and running programs, outcomes, stopped groups, the progress bar.

    Args:
        programs, skip_group_after, progress, keep: as in `Sandbox.run`.

    Raises:
        ValueError: `skip_group_after` has an unknown status.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        skip_group_after: Collection[Status] = (),
        progress: bool | str = False,
        keep: Callable[[int, Outcome], Outcome] | None = None,
    ) -> None:
        unknown = set(skip_group_after) - set(STATUSES)
        if unknown:
            raise ValueError(f"skip_group_after has {sorted(unknown)}; the statuses are {', '.join(STATUSES)}.")
        self.programs = list(programs)
        self._keep = keep
        self._skip_after = frozenset(skip_group_after)
        self._stopped: set[Any] = set()
        self._waiting = deque(range(len(self.programs)))
        self._started: set[int] = set()
        self._retried: set[int] = set()
        self._outcomes: list[Outcome | None] = [None] * len(self.programs)
        self.longest_wall_seconds = max((p.limits.wall_seconds for p in self.programs), default=0.0)
        self._bar = _progress_bar(len(self.programs), progress) if progress else None

    def close(self) -> None:
        """Close the progress bar."""
        if self._bar is not None:
            self._bar.close()

    @property
    def finished(self) -> bool:
        """Whether no program is waiting or running."""
        return not self._waiting and not self._started

    def take(self) -> int | None:
        """Index of the next program to start, `None` if none is waiting. Skips programs of stopped groups."""
        while self._waiting:
            index = self._waiting.popleft()
            if self.programs[index].group in self._stopped:
                self._set(index, Outcome("skipped", error="its group had already stopped"))
                continue
            self._started.add(index)
            return index
        return None

    def done(self, index: int, outcome: Outcome) -> None:
        """Record the outcome of a started program."""
        group = self.programs[index].group
        if group is not None and outcome.status in self._skip_after:
            self._stopped.add(group)
        self._started.discard(index)
        self._set(index, outcome)

    def failed(self, index: int, reason: str) -> None:
        """Record that the sandbox could not start a program. The first time it waits again.

        Raises:
            SandboxError: the second time.
        """
        if index in self._retried:
            raise SandboxError(f"The sandbox could not start program {index}, twice: {reason}")
        self._retried.add(index)
        self._started.discard(index)
        self._waiting.appendleft(index)

    def abandon(self) -> None:
        """Start no more of the waiting programs."""
        self._waiting.clear()

    def requeue(self) -> None:
        """Let all running programs wait again, in their order."""
        self._waiting = deque(sorted({*self._waiting, *self._started}))
        self._started.clear()

    def expire(self, reason: str = "the deadline came before it ended") -> None:
        """Give every program without an outcome the status `"deadline"`."""
        for index, outcome in enumerate(self._outcomes):
            if outcome is None:
                self._set(index, Outcome("deadline", error=reason))

    def outcomes(self) -> list[Outcome]:
        """All outcomes in the order of the programs.

        Raises:
            SandboxError: a program has none.
        """
        missing = [index for index, outcome in enumerate(self._outcomes) if outcome is None]
        if missing:
            raise SandboxError(f"The sandbox lost programs {missing[:10]}.")
        return [outcome for outcome in self._outcomes if outcome is not None]

    def _set(self, index: int, outcome: Outcome) -> None:
        self._outcomes[index] = outcome if self._keep is None else self._keep(index, outcome)
        if self._bar is not None:
            self._bar.update()


class Sandbox(ABC):
    """Runs programs in isolation. A context manager; `open_sandbox` returns one.

    Attributes:
        tier: `"bubblewrap"`, `"landlock"`, `"unprotected"` or `"remote"`.
        workers: number of programs that run at the same time.
        description: the tier with its versions or address.
    """

    tier: str
    workers: int
    description: str

    def run(
        self,
        programs: Sequence[Program],
        *,
        deadline: float | None = None,
        skip_group_after: Collection[Status] = (),
        progress: bool | str = False,
        keep: Callable[[int, Outcome], Outcome] | None = None,
    ) -> list[Outcome]:
        """Run all programs and return their outcomes in the same order.

        Args:
            programs: they start in this order, `workers` of them at a time.
            deadline: seconds from now after which the call returns. Running programs are killed, waiting ones are not
                started, and both get the status `"deadline"`. With `None` only the programs' own limits apply.
            skip_group_after: once a program of a group ends with one of these statuses, the programs of that group
                that have not started get the status `"skipped"`. With `("timeout",)` an endless loop costs its time
                limit once per group and not once per test. Programs whose `group` is `None` are never skipped.
            progress: show a progress bar on standard error; a string is its description.
            keep: called with the index and the outcome of each program when it ends, one call at a time. Its return
                value replaces the outcome, so that a batch need not hold the output of all programs in memory.

        Raises:
            SandboxError: the sandbox itself failed, also on a second try. Such a failure is never an outcome, so a
                broken machine does not look like wrong answers.
            ValueError: an unknown status in `skip_group_after`, or `Program.arguments` that are not JSON.
        """
        until = math.inf if deadline is None else time.monotonic() + deadline
        with closing(Batch(programs, skip_group_after, progress, keep)) as batch:
            self._run_batch(batch, until)
            return batch.outcomes()

    @abstractmethod
    def _run_batch(self, batch: Batch, until: float) -> None:
        """Give every program of the batch an outcome, at the latest at `until` (`time.monotonic`)."""

    @abstractmethod
    def close(self) -> None:
        """End all running programs, also those of other threads. Closing twice is allowed, `run` afterwards is not."""

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _progress_bar(total: int, progress: bool | str) -> Any:
    from tqdm import tqdm

    description = progress if isinstance(progress, str) else "programs"
    interval = 0.1 if sys.stderr.isatty() else _LOG_SECONDS
    return tqdm(
        total=total, desc=description, unit="run", delay=_PROGRESS_DELAY_SECONDS, mininterval=interval, leave=False
    )
