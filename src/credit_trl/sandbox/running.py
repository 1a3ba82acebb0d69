"""A running program in the server, and the outcome that its ending gives."""

import json
import math
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from credit_trl.sandbox.cgroups import MemoryGroup
from credit_trl.sandbox.observe import ProcessorTimes
from credit_trl.sandbox.protocol import Outcome, Program, Status, excerpt

ERROR_CHARACTERS = 4000


@dataclass(eq=False)
class RunningProgram:
    """A program from the start of its process to its end."""

    number: int  # the client's, of the program
    program: Program
    pid: int
    pipes: Sequence[int]  # from which standard output, standard error, the driver's report and its begin mark are read
    group: MemoryGroup | None  # control group of its processes, `None` where the server can make none
    started_at: float  # time at which its process was started
    began_at: float | None = None  # time of the driver's begin mark; its wall-clock limit counts from here
    delayed: float = 0.0  # seconds since then in which it could run and waited for a processor that others used
    cpu_seconds: float = 0.0  # largest processor time of its processes in any sample
    is_starved: bool = False  # whether it got less than a fifth of a processor between the last two samples
    not_before: float = 0.0  # time before which its wall-clock limit is not enforced, as it waits for a processor
    next_sample: float = math.inf  # time at which its use of resources is read next, once it has begun
    stdout: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)
    report: bytearray = field(default_factory=bytearray)
    begin_mark: bytearray = field(default_factory=bytearray)
    ended_by: Status | None = None  # status with which the server ended it, `None` if it ended by itself
    reason: str = ""
    open_pipes: dict[int, bytearray] = field(default_factory=dict)  # what was read, by descriptor, of those not ended
    _samples: list[tuple[float, float]] = field(default_factory=list)  # first and last: time, processor time
    _threads: dict[str, tuple[float, float]] = field(default_factory=dict)  # active, processor time when that changed

    def __post_init__(self) -> None:
        self.open_pipes = dict(zip(self.pipes, (self.stdout, self.stderr, self.report, self.begin_mark), strict=True))

    def add_times(self, times: ProcessorTimes, now: float) -> None:
        """Take a sample of processor times, of which the first is that of the program's beginning.

        Adds to `delayed` the longest time that one thread was active since its last change, without the processor time
        of the whole program meanwhile: a thread that waits for another one of its own program is not delayed. In all
        the program is delayed at most for as long as it did not run.
        """
        total = max(self.cpu_seconds, times.total)
        first_at, first_total = self._samples[0] if self._samples else (now, total)
        last_at, last_total = self._samples[-1] if self._samples else (now, total)
        longest = 0.0
        threads: dict[str, tuple[float, float]] = {}
        for thread, active in times.active.items():
            is_new = thread not in self._threads
            previous = (0.0, last_total) if is_new else self._threads[thread]
            if active == previous[0]:
                threads[thread] = previous  # a wait for a processor counts when it ends
                continue
            threads[thread] = (active, total)
            longest = max(longest, (active - previous[0]) - (total - previous[1]))
        idle = (now - first_at) - (total - first_total)
        self.delayed = max(0.0, min(self.delayed + longest, idle))
        self.is_starved = total - last_total < 0.2 * (now - last_at)
        self.cpu_seconds = total
        self._threads = threads
        self._samples = [(first_at, first_total), (now, total)]

    def exceeded_output_limit(self) -> int | None:
        """The limit in bytes that its output exceeds, `None` for none."""
        limits = self.program.limits
        if len(self.stdout) + len(self.stderr) > limits.output_bytes:
            return limits.output_bytes
        printed = len(self.stdout) if self.program.fn_name is None else 0
        answer = max(printed, len(self.report) - ERROR_CHARACTERS)
        return limits.longest_answer if answer > limits.longest_answer else None

    def answer(self, exit_code: int, now: float) -> dict[str, Any]:
        """Message for the client: `"done"` with the outcome, or `"failed"` with the reason.

        A program that the server did not end, and whose begin mark is missing, never began: the driver writes the mark
        before the program's first line, to a pipe of which a program holds no end. Its report is only split, measured
        and passed on as text.
        """
        if self.ended_by is None and self.began_at is None:
            reason = _text(self.stderr or b"it ended before the program began")[-ERROR_CHARACTERS:].strip()
            return {"failed": self.number, "reason": f"{reason} (exit status {exit_code})"}
        return {"done": self.number, "outcome": vars(self._outcome(exit_code, now))}

    def _outcome(self, exit_code: int, now: float) -> Outcome:
        limits = self.program.limits
        seconds = 0.0 if self.began_at is None else round(now - self.began_at, 6)
        stdout = _text(self.stdout[: limits.longest_answer])
        if self.ended_by is not None:
            return failure(Outcome("ok", stdout, seconds=seconds), self.ended_by, self.reason)
        ended = Outcome("ok", stdout, exit_code=exit_code, seconds=seconds)
        # The last sample of its time may lag by half of the limit.
        cpu_seconds = max(seconds, 2 * self.cpu_seconds)
        report = _parse_report(bytes(self.report))
        return ended_outcome(self.program, ended, cpu_seconds, report, _text(self.stderr[-ERROR_CHARACTERS // 2 :]))


def failure(ended: Outcome, status: Status, error: str) -> Outcome:
    """The outcome with this status and error, and an excerpt of its standard output."""
    return replace(ended, status=status, error=error, stdout=excerpt(ended.stdout))


def ended_outcome(
    program: Program, ended: Outcome, cpu_seconds: float, report: tuple[str, str], stderr: str
) -> Outcome:
    """Outcome of a program that ended by itself with standard output, exit code and seconds, from its driver's report.

    `cpu_seconds` is the most processor time that it may have used. The report has a kind and a text; the kind is `""`
    if there is no well-formed one. `stderr` is the end of standard error.
    """
    kind, text = report
    code = ended.exit_code
    if isinstance(code, int) and 128 < code <= 128 + 64:
        code = 128 - code  # with status 128 + n bubblewrap and shells report signal n
        ended = replace(ended, exit_code=code)
    # The program may also exit with the status of a signal itself.
    if cpu_seconds >= program.limits.cpu_seconds and code in (-signal.SIGXCPU, -signal.SIGKILL):
        return failure(ended, "timeout", f"more than {program.limits.cpu_seconds:g} seconds of processor time")
    if kind in ("E", "M"):
        return failure(ended, "memory" if kind == "M" else "runtime_error", text[:ERROR_CHARACTERS])
    if program.fn_name is None:
        return ended if ended.exit_code == 0 else failure(ended, "runtime_error", _ending(ended, stderr))
    if kind != "R":
        return failure(ended, "runtime_error", _ending(ended, stderr, f" before {program.fn_name} returned"))
    if not is_json(text):
        return failure(ended, "runtime_error", "the return value is not JSON that can be read")
    return replace(ended, value=text)


def is_json(text: str) -> bool:
    """Whether a text can be parsed as JSON. Integers are not converted: long ones are refused, and cost time."""
    try:
        json.loads(text, parse_int=str)
    except (ValueError, RecursionError):
        return False
    return True


def _parse_report(report: bytes) -> tuple[str, str]:
    """Kind and text of exactly one well-formed report; `("", "")` for none, several, or a malformed one."""
    if len(report) < 9 or len(report) != 9 + int.from_bytes(report[1:9], "big"):
        return "", ""
    return chr(report[0]), _text(report[9:])


def _ending(ended: Outcome, stderr: str, when: str = "") -> str:
    """The end of standard error without directories, and the exit status or signal."""
    code = ended.exit_code
    if code is not None and code < 0:
        names = {number.value: number.name for number in signal.Signals}
        ending = f"killed by signal {names.get(-code, -code)}{when}"
    else:
        ending = f"exited with status {code}{when}"
    said = re.sub(r'File "[^"\n]*/([^"/\n]+)"', r'File "\1"', stderr).strip()
    return f"{said}\n{ending}" if said else ending


def _text(raw: bytes | bytearray) -> str:
    return raw.decode("utf-8", "replace")
