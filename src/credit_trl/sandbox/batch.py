"""Base class of the sandboxes, and the state of one batch of programs."""

from __future__ import annotations

import heapq
import math
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from credit_trl.sandbox.protocol import STATUSES, Outcome, Program, SandboxError, Status, printable, sandbox_error
from credit_trl.sandbox.running import GROUP_STOPPED, is_json

# Batches that end earlier show no progress bar.
_PROGRESS_DELAY_SECONDS = 0.5
# Seconds that a group is charged for its first program, and at least for each, until the program has ended.
_FIRST_SECONDS = 0.001
# Interval of progress lines if standard error is not a terminal.
_LOG_SECONDS = 10.0


@dataclass(eq=False)
class _Group:
    """Programs that belong together.

    Args:
        charged: seconds that its programs have run, and those in progress are expected to run.
        expected: seconds that its next program is expected to run, as many as its last one did.
        since_failure: seconds that its programs have run since one failed, `None` if none has.
    """

    number: int
    waiting: deque[int] = field(default_factory=deque)
    charged: float = 0.0
    expected: float = _FIRST_SECONDS
    since_failure: float | None = None
    stopped: bool = False


class Batch:
    """State of one `Sandbox.run`, which has its arguments: waiting and running programs, outcomes, groups, progress.

    The next program is one of the group that has had the least time, so that groups of slow programs do not keep the
    others waiting. `newly_stopped` has the numbers of the groups that stopped since the caller last cleared it.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        skip_group_after: Collection[Status] = (),
        failed_group_seconds: float = math.inf,
        progress: bool | str = False,
        keep: Callable[[int, Outcome], Outcome] | None = None,
    ) -> None:
        unknown = set(skip_group_after) - set(STATUSES)
        if unknown:
            raise ValueError(f"skip_group_after has {sorted(unknown)}; the statuses are {', '.join(STATUSES)}.")
        for index, program in enumerate(programs):
            if program.arguments is not None and not is_json(program.arguments):
                raise ValueError(f"Program.arguments of program {index} are not JSON: {program.arguments[:80]!r}")
        self.programs = list(programs)
        self.stops = tuple(sorted(skip_group_after))
        self.newly_stopped: list[int] = []
        self._keep = keep
        self._failed_group_seconds = failed_group_seconds
        self._group_of = self._grouped()
        self._groups = list(dict.fromkeys(self._group_of))
        self._turns: list[tuple[float, int]] = []  # heap of (charged, group); entries with another charge are stale
        self._started: dict[int, float] = {}  # by index, the seconds that its group was charged at the start
        self._retried: set[int] = set()
        self._outcomes: list[Outcome | None] = [None] * len(self.programs)
        self._left = len(self.programs)
        self._bar = _progress_bar(len(self.programs), progress) if progress else None
        for group in self._groups:
            self._queue(group)

    def _grouped(self) -> list[_Group]:
        """The group of each program. A program whose `group` is `None` is a group of its own."""
        groups: dict[Any, _Group] = {}
        group_of = []
        for index, program in enumerate(self.programs):
            label = (program.group, None if program.group is not None else index)
            group = groups.setdefault(label, _Group(len(groups)))
            group.waiting.append(index)
            group_of.append(group)
        return group_of

    def close(self) -> None:
        """Close the progress bar."""
        if self._bar is not None:
            self._bar.close()

    @property
    def finished(self) -> bool:
        """Whether every program has an outcome."""
        return not self._left

    def group_number(self, index: int) -> int | None:
        """Number of a program's group, `None` if its `group` is `None`."""
        return None if self.programs[index].group is None else self._group_of[index].number

    def take(self) -> int | None:
        """Index of the next program to start, `None` if none is waiting."""
        while self._turns:
            charged, number = heapq.heappop(self._turns)
            group = self._groups[number]
            if charged != group.charged or not group.waiting:
                continue
            index = group.waiting.popleft()
            self._started[index] = group.expected
            group.charged += group.expected
            self._queue(group)
            return index
        return None

    def done(self, index: int, outcome: Outcome) -> None:
        """Record the outcome of a started program. Skips the waiting programs of its group if that stops it."""
        group = self._group_of[index]
        group.charged += outcome.seconds - self._started.pop(index)
        if outcome.status != "skipped":
            group.expected = max(outcome.seconds, _FIRST_SECONDS)
        self._queue(group)
        kept = self._set(index, outcome)
        if kept.status not in ("ok", "skipped") or group.since_failure is not None:
            group.since_failure = 0.0 if group.since_failure is None else group.since_failure + outcome.seconds
        is_over = group.since_failure is not None and group.since_failure > self._failed_group_seconds
        if self.programs[index].group is not None and (is_over or outcome.status in self.stops):
            self._stop(group)

    def _stop(self, group: _Group) -> None:
        if not group.stopped:
            group.stopped = True
            self.newly_stopped.append(group.number)
        while group.waiting:
            self._set(group.waiting.popleft(), Outcome("skipped", error=GROUP_STOPPED))

    def failed(self, index: int, reason: str) -> None:
        """Record that the sandbox could not start a program. It waits again the first time; the second is an error."""
        if index in self._retried:
            raise sandbox_error(f"The sandbox could not start program {index}, twice: {printable(reason)}")
        self._retried.add(index)
        self._wait_again([index])

    def abandon(self) -> None:
        """Start no more of the waiting programs."""
        self._turns.clear()

    def requeue(self) -> None:
        """Let all running programs wait again, in their order."""
        self._wait_again(list(self._started))

    def _wait_again(self, indices: Collection[int]) -> None:
        for index in indices:
            group = self._group_of[index]
            group.charged -= self._started.pop(index)
            group.waiting = deque(sorted((index, *group.waiting)))
            if group.stopped:
                self._stop(group)
            self._queue(group)

    def expire(self, reason: str = "the deadline came before it ended") -> None:
        """Give every program without an outcome the status `"deadline"`."""
        for index, outcome in enumerate(self._outcomes):
            if outcome is None:
                self._set(index, Outcome("deadline", error=reason))

    def outcomes(self) -> list[Outcome]:
        """All outcomes in the order of the programs."""
        missing = [index for index, outcome in enumerate(self._outcomes) if outcome is None]
        if missing:
            raise SandboxError(f"The sandbox lost programs {missing[:10]}.")
        return [outcome for outcome in self._outcomes if outcome is not None]

    def _queue(self, group: _Group) -> None:
        if group.waiting:
            heapq.heappush(self._turns, (group.charged, group.number))

    def _set(self, index: int, outcome: Outcome) -> Outcome:
        kept = outcome if self._keep is None else self._keep(index, outcome)
        self._left -= self._outcomes[index] is None
        self._outcomes[index] = kept
        if self._bar is not None:
            self._bar.update()
        return kept


class Sandbox(ABC):
    """Runs programs in isolation, `workers` at a time. A context manager; `open_sandbox` returns one.

    `tier` is `"bubblewrap"`, `"landlock"`, `"unprotected"` or `"remote"`; `description` adds its versions or address.
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
        failed_group_seconds: float = math.inf,
        progress: bool | str = False,
        keep: Callable[[int, Outcome], Outcome] | None = None,
    ) -> list[Outcome]:
        """Run all programs and return their outcomes in the same order.

        Args:
            programs: `workers` of them run at a time. Groups take turns: the next program is one of the group whose
                programs have run for the shortest time in total, in this order within a group.
            deadline: seconds from now after which the call returns. Running programs are killed, waiting ones are not
                started, and both get the status `"deadline"`. With `None` only the programs' own limits apply.
            skip_group_after: once a program of a group ends with one of these statuses, the programs of that group
                that have not started get the status `"skipped"`. With `("timeout",)` an endless loop costs its time
                limit once per group and not once per test. Programs whose `group` is `None` are never skipped, and
                each takes turns as a group of its own.
            failed_group_seconds: seconds that the programs of a group may run in total after one of them has failed,
                which means that its outcome, as `keep` returned it, is not `"ok"`. Then the others are skipped.
            progress: show a progress bar on standard error; a string is its description.
            keep: called with the index and the outcome of each program when it ends, one call at a time. Its return
                value replaces the outcome, so that a batch need not hold the output of all programs in memory. It may
                have the status `"rejected"` for an answer that is wrong.

        Raises:
            SandboxError: the sandbox itself failed, also on a second try. Such a failure is never an outcome, so a
                broken machine does not look like wrong answers.
            ValueError: an unknown status in `skip_group_after`, or `Program.arguments` that are not JSON.
        """
        until = math.inf if deadline is None else time.monotonic() + deadline
        with closing(Batch(programs, skip_group_after, failed_group_seconds, progress, keep)) as batch:
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
