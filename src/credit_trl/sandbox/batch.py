"""One batch on its way: which program is next, which outcomes are in, which groups have stopped, the progress bar."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

from credit_trl.sandbox.protocol import STATUSES, Outcome, Program, SandboxError, Status

# Shown only for batches that take longer than this.
_PROGRESS_DELAY_SECONDS = 0.5
_LOG_SECONDS = 10.0  # between lines where standard error is a log and no terminal


class Batch:
    """The state of one `Sandbox.run`, whose arguments it takes. A context manager: it closes its progress bar.

    Raises:
        ValueError: `skip_group_after` names no status.
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

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.close()

    @property
    def finished(self) -> bool:
        """Whether every program has its outcome, or is about to be skipped."""
        return not self._waiting and not self._started

    def take(self) -> int | None:
        """The index of the next program to start; those of stopped groups are skipped on the way."""
        while self._waiting:
            index = self._waiting.popleft()
            if self.programs[index].group in self._stopped:
                self._set(index, Outcome("skipped", error="its group had already stopped"))
                continue
            self._started.add(index)
            return index
        return None

    def done(self, index: int, outcome: Outcome) -> None:
        group = self.programs[index].group
        if group is not None and outcome.status in self._skip_after:
            self._stopped.add(group)
        self._started.discard(index)
        self._set(index, outcome)

    def failed(self, index: int, reason: str) -> None:
        """The sandbox could not start a program: once more, then `SandboxError`."""
        if index in self._retried:
            raise SandboxError(f"The sandbox could not start program {index}, twice: {reason}")
        self._retried.add(index)
        self._started.discard(index)
        self._waiting.appendleft(index)

    def abandon(self) -> None:
        """No program that still waits will be started."""
        self._waiting.clear()

    def requeue(self) -> None:
        """Everything started and unanswered waits again, in its order."""
        self._waiting = deque(sorted({*self._waiting, *self._started}))
        self._started.clear()

    def expire(self, why: str = "the deadline came before it ended") -> None:
        """The deadline has come: what has no outcome yet gets `"deadline"`."""
        for index, outcome in enumerate(self._outcomes):
            if outcome is None:
                self._set(index, Outcome("deadline", error=why))

    def outcomes(self) -> list[Outcome]:
        """All outcomes, in the programs' order."""
        missing = [index for index, outcome in enumerate(self._outcomes) if outcome is None]
        if missing:
            raise SandboxError(f"The pool lost programs {missing[:10]}.")
        return [outcome for outcome in self._outcomes if outcome is not None]

    def _set(self, index: int, outcome: Outcome) -> None:
        self._outcomes[index] = outcome if self._keep is None else self._keep(index, outcome)
        if self._bar is not None:
            self._bar.update()


def _progress_bar(total: int, progress: bool | str) -> Any:
    from tqdm import tqdm

    description = progress if isinstance(progress, str) else "programs"
    often = 0.1 if sys.stderr.isatty() else _LOG_SECONDS
    return tqdm(
        total=total, desc=description, unit="run", delay=_PROGRESS_DELAY_SECONDS, mininterval=often, leave=False
    )
