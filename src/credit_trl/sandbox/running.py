"""A running program's record in the pool server, and the outcome that is read off it once it has ended."""

from __future__ import annotations

import json
import re
import signal
from dataclasses import dataclass, field
from typing import Any

from credit_trl.sandbox.launch import Process
from credit_trl.sandbox.protocol import Program, excerpt

_ERROR_CHARACTERS = 4000


@dataclass(eq=False)
class Run:
    """A program from the building of its walls to its end.

    `released_at`: it was told to begin. `began_at`: its driver said that the program begins; from here the clock runs.
    `ended_by`: the status with which the server ended it, if it did.
    """

    number: int
    program: Program
    process: Process
    user: int | None
    released_at: float | None = None
    began_at: float | None = None
    stdout: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)
    report: bytearray = field(default_factory=bytearray)
    ended_by: str | None = None
    reason: str = ""
    pipes_open: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.pipes_open = {self.process.stdout, self.process.stderr, self.process.report}

    @property
    def descriptors(self) -> tuple[int, int, int, int]:
        return (self.process.pidfd, self.process.stdout, self.process.stderr, self.process.report)

    @property
    def received(self) -> int:
        return len(self.stdout) + len(self.stderr) + len(self.report)

    @property
    def limit_passed(self) -> int:
        """The limit in bytes that what it wrote has passed, 0 for none."""
        limits = self.program.limits
        if len(self.stdout) + len(self.stderr) > limits.output_bytes:
            return limits.output_bytes
        printed = len(self.stdout) if self.program.fn_name is None else 0
        answer = max(printed, len(self.report) - _ERROR_CHARACTERS)
        return limits.longest_answer if answer > limits.longest_answer else 0

    def take(self, descriptor: int, chunk: bytes, now: float) -> None:
        """Store what came from one of the pipes."""
        if descriptor == self.process.stdout:
            self.stdout += chunk
        elif descriptor == self.process.stderr:
            self.stderr += chunk
        else:
            self.report += chunk
            if self.began_at is None and self.report.startswith(b"B"):
                self.began_at = now


def outcome(run: Run, exit_code: int, now: float) -> dict[str, Any]:
    """The fields of an `Outcome`, or `{"failed": reason}` where the program never began, or `{"malformed": reason}`
    where its arguments are not JSON.

    Nothing in the report is believed: it is split, measured, and passed on as text. A program that was not ended by
    the server and whose first report byte is missing cannot have begun, because the driver writes it before the
    program's first line.
    """
    seconds = 0.0 if run.began_at is None else round(now - run.began_at, 6)
    if run.ended_by is not None:
        return _fields(run, run.ended_by, run.reason, None, seconds)
    if run.began_at is None:
        if run.report.startswith(b"A"):
            return {"malformed": _text(run.report[9:])}
        reason = run.stderr or b"it ended before the program began"
        return {"failed": _text(reason)[-_ERROR_CHARACTERS:].strip() + f" (exit status {exit_code})"}
    if 128 < exit_code <= 128 + 64:  # how bubblewrap and shells pass a signal on
        exit_code = 128 - exit_code
    if exit_code == -signal.SIGXCPU or (exit_code == -signal.SIGKILL and seconds >= run.program.limits.cpu_seconds):
        reason = f"more than {run.program.limits.cpu_seconds:g} seconds of processor time"
        return _fields(run, "timeout", reason, exit_code, seconds)
    kind, text = _parse_report(bytes(run.report[1:]))
    if kind in ("E", "M"):
        status = "memory" if kind == "M" else "runtime_error"
        return _fields(run, status, text[:_ERROR_CHARACTERS], exit_code, seconds)
    if run.program.fn_name is not None:
        if kind != "R":
            reason = _ending(run, exit_code, f" before {run.program.fn_name} returned")
            return _fields(run, "runtime_error", reason, exit_code, seconds)
        try:
            json.loads(text, parse_int=str)  # a long integer is JSON; making a number of it is refused, and costs
        except (ValueError, RecursionError):
            return _fields(run, "runtime_error", "the return value is not JSON that can be read", exit_code, seconds)
        return {**_fields(run, "ok", "", exit_code, seconds), "value": text}
    if exit_code != 0:
        return _fields(run, "runtime_error", _ending(run, exit_code, ""), exit_code, seconds)
    return _fields(run, "ok", "", exit_code, seconds)


def _parse_report(report: bytes) -> tuple[str, str]:
    """The kind and text of exactly one well-formed report; `("", "")` for none, several, or a broken one."""
    if len(report) < 9 or len(report) != 9 + int.from_bytes(report[1:9], "big"):
        return "", ""
    return chr(report[0]), _text(report[9:])


def _ending(run: Run, exit_code: int, what: str) -> str:
    """How it ended, after the end of its standard error."""
    if exit_code < 0:
        try:
            name = signal.Signals(-exit_code).name
        except ValueError:
            name = str(-exit_code)
        ending = f"killed by signal {name}{what}"
    else:
        ending = f"exited with status {exit_code}{what}"
    said = re.sub(r'File "[^"\n]*/([^"/\n]+)"', r'File "\1"', _text(run.stderr[-_ERROR_CHARACTERS // 2 :]).strip())
    return f"{said}\n{ending}" if said else ending


def _text(raw: bytes | bytearray) -> str:
    return raw.decode("utf-8", "replace")


def _fields(run: Run, status: str, error: str, exit_code: int | None, seconds: float) -> dict[str, Any]:
    stdout = _text(run.stdout[: run.program.limits.longest_answer])
    return {
        "status": status,
        "stdout": stdout if status == "ok" else excerpt(stdout),
        "error": error,
        "exit_code": exit_code,
        "seconds": seconds,
    }
