"""Base class of the sandboxes, and the state of one batch of programs."""

import bisect
import math
import time
from abc import abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any

from credit_trl.sandbox.protocol import STATUSES, Outcome, Program, Status, printable, sandbox_error
from credit_trl.sandbox.running import is_json


class Batch:
    """State of one `Sandbox.run`, which has its arguments: waiting and running programs, and outcomes.

    The next program is one of the group that has the fewest running, among these of the one that has had the least
    time, so that groups of slow programs do not keep the others waiting. Programs without a group count as one.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        skip_group_after: Collection[Status] = (),
        failed_group_seconds: float = math.inf,
        keep: Callable[[int, Outcome], Outcome] | None = None,
    ) -> None:
        unknown = set(skip_group_after) - set(STATUSES)
        if unknown:
            raise ValueError(f"skip_group_after has {sorted(unknown)}; the statuses are {', '.join(STATUSES)}.")
        for index, program in enumerate(programs):
            if program.arguments is not None and not is_json(program.arguments):
                raise ValueError(f"Program.arguments of program {index} are not JSON: {program.arguments[:80]!r}")
        self.programs = list(programs)
        self._stops = frozenset(skip_group_after)
        self._failed_group_seconds = failed_group_seconds
        self._keep = keep
        self._waiting: dict[Any, list[int]] = {}  # by group, in their order
        self._spent: dict[Any, float] = defaultdict(float)  # seconds that the programs of each group have run
        self.running: set[int] = set()
        self._retried: set[int] = set()
        self._stopped: set[Any] = set()  # groups
        self._since_failure: dict[Any, float] = {}  # by group, seconds that its programs have run since one failed
        self.outcomes: dict[int, Outcome] = {}
        self._wait(range(len(self.programs)))

    @property
    def finished(self) -> bool:
        """Whether every program has an outcome."""
        return len(self.outcomes) == len(self.programs)

    def take(self, workers: int) -> int | None:
        """Index of the next program to start, `None` if none is waiting or `workers` programs run."""
        if not self._waiting or len(self.running) >= workers:
            return None
        at_once = Counter(self.programs[index].group for index in self.running)
        group = min(self._waiting, key=lambda group: (at_once[group], self._spent[group]))
        index = self._waiting[group].pop(0)
        if not self._waiting[group]:
            del self._waiting[group]
        self.running.add(index)
        return index

    def done(self, index: int, outcome: Outcome) -> None:
        """Record the outcome of a started program. Skips the waiting programs of its group if that stops it."""
        self.running.remove(index)
        recorded = self._record(index, outcome)
        group = self.programs[index].group
        self._spent[group] += outcome.seconds
        if group is None:
            return
        if group in self._since_failure:
            self._since_failure[group] += outcome.seconds
        elif recorded.status != "ok":
            self._since_failure[group] = 0.0
        if outcome.status in self._stops or self._since_failure.get(group, -math.inf) > self._failed_group_seconds:
            self._stopped.add(group)
            self._skip_stopped()

    def failed(self, indices: Collection[int], reason: str) -> None:
        """Record that the sandbox could not run programs. Each waits again the first time; the second is an error."""
        for index in indices:
            if index in self._retried:
                raise sandbox_error(f"The sandbox could not run program {index}, twice: {printable(reason)}")
        self._retried.update(indices)
        self.running.difference_update(indices)
        self._wait(indices)

    def _wait(self, indices: Collection[int]) -> None:
        """Let programs wait in their order, without those of groups that have stopped."""
        for index in indices:
            bisect.insort(self._waiting.setdefault(self.programs[index].group, []), index)
        self._skip_stopped()

    def _skip_stopped(self) -> None:
        """Skip the waiting programs of groups that have stopped."""
        for group in self._stopped & self._waiting.keys():
            for index in self._waiting.pop(group):
                self._record(index, Outcome("skipped", error="its group had already stopped"))

    def expire(self) -> None:
        """Give every program without an outcome the status `"deadline"`."""
        for index in range(len(self.programs)):
            if index not in self.outcomes:
                self._record(index, Outcome("deadline", error="the deadline came before it ended"))

    def _record(self, index: int, outcome: Outcome) -> Outcome:
        """Set a program's only outcome; return it as `keep` changed it."""
        self.outcomes[index] = outcome if self._keep is None else self._keep(index, outcome)
        return self.outcomes[index]


class Sandbox(AbstractContextManager):
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
        keep: Callable[[int, Outcome], Outcome] | None = None,
    ) -> list[Outcome]:
        """Run all programs and return their outcomes in the same order.

        Args:
            programs: `workers` of them run at a time. Groups take turns, by the time that their programs have run.
            deadline: seconds from now after which the call returns. Running programs are killed, waiting ones are not
                started, and both get the status `"deadline"`. With `None` only the programs' own limits apply.
            skip_group_after: once a program of a group ends with one of these statuses, the programs of that group
                that have not started get the status `"skipped"`. With `("timeout",)` an endless loop costs its time
                limit once per group and not once per test. Programs whose `group` is `None` are never skipped.
            failed_group_seconds: seconds that the programs of a group may run in total after one of them has failed,
                which means that its outcome, as `keep` returned it, is not `"ok"`. Then the others are skipped.
            keep: called with the index and the outcome of each program when it ends, one call at a time. Its return
                value replaces the outcome, so that a batch need not hold the output of all programs in memory. It may
                have the status `"rejected"` for an answer that is wrong.

        Raises:
            SandboxError: the sandbox itself failed, also on a second try. Such a failure is never an outcome, so a
                broken machine does not look like wrong answers.
            ValueError: an unknown status in `skip_group_after`, or `Program.arguments` that are not JSON.
        """
        until = math.inf if deadline is None else time.monotonic() + deadline
        batch = Batch(programs, skip_group_after, failed_group_seconds, keep)
        self._run_batch(batch, until)
        return [batch.outcomes[index] for index in range(len(batch.programs))]

    @abstractmethod
    def _run_batch(self, batch: Batch, until: float) -> None:
        """Give every program of the batch an outcome, at the latest at `until` (`time.monotonic`)."""

    def close(self) -> None:
        """End all running programs, also those of other threads. Closing twice is allowed, `run` afterwards is not."""

    def __exit__(self, *exc: object) -> None:
        self.close()
