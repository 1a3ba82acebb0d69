"""What goes into a sandbox and what comes out of it.

A `Program` is a request, an `Outcome` is what was observed, a `Sandbox` runs a batch of one and returns as many of
the other. A request has no field for an expected output: comparison happens outside, so a program cannot find, read
or guess what it is compared with. For the same reason an outcome knows no pass or fail. `status="ok"` means that the
program ended by itself without an error; what it printed or returned is data that the program chose, and only the
comparison makes a verdict of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, fields
from typing import Literal, Protocol, get_args, runtime_checkable

Status = Literal[
    "ok",  # ended by itself: exit status 0 (standard input) or the function returned (functional call)
    "runtime_error",  # an uncaught exception, a non-zero exit status, a signal, or no return value
    "timeout",  # the processor or the wall clock limit
    "memory",  # MemoryError, or killed because all its processes together held more than `memory_bytes`
    "output_limit",  # standard output and error together passed `output_bytes`, or the answer `answer_bytes`
    "deadline",  # the batch's deadline came before the program had ended
    "skipped",  # never started: its group had already ended with a status in `skip_group_after`
]
STATUSES: tuple[str, ...] = get_args(Status)

MIB = 1024 * 1024
_EXCERPT_CHARACTERS = 4096
_MOST = 1 << 62  # the kernel takes limits as signed longs


class SandboxError(RuntimeError):
    """The sandbox itself failed (not the program in it), or no sandbox can be had on this machine."""


@dataclass(frozen=True)
class Limits:
    """What one program may use.

    Args:
        cpu_seconds: processor time of each process; rounded up to whole seconds, the kernel's granularity.
        wall_seconds: time from start to end; sleeping counts. Enforced by killing the whole process group.
        memory_bytes: address space of each process (`RLIMIT_AS`), and the memory resident in all of the program's
            processes together, sampled while it runs.
        processes: processes and threads together (the interpreter itself is one).
        file_bytes: the largest file, and all scratch files together where there is a scratch directory; at most one
            file for each 4 KiB of it.
        open_files: file descriptors of each process.
        output_bytes: standard output and standard error together; also the return value of a functional call.
        answer_bytes: of it, the answer alone: a script's standard output, a functional call's return value; `None` for
            as much as `output_bytes`. What a program says beside its answer does not count. An outcome's `stdout` is
            cut to it.

    Raises:
        ValueError: a limit is not positive, not finite, or too small for an interpreter to start.
    """

    cpu_seconds: float = 10.0
    wall_seconds: float = 12.0
    memory_bytes: int = 1024 * MIB
    processes: int = 16
    file_bytes: int = 16 * MIB
    open_files: int = 64
    output_bytes: int = 8 * MIB
    answer_bytes: int | None = None

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            if not (value is None and limit.name == "answer_bytes") and not 0 < value < _MOST:
                raise ValueError(f"Limits.{limit.name} must be positive and finite, below 2**62, got {value!r}.")
        if self.memory_bytes < 64 * MIB:
            raise ValueError(
                f"Limits.memory_bytes is {self.memory_bytes}; an interpreter needs 64 MiB of address space to start. "
                "Give at least 67108864."
            )
        if self.open_files < 16:
            raise ValueError(f"Limits.open_files is {self.open_files}; an interpreter needs 16. Give at least 16.")

    @property
    def longest_answer(self) -> int:
        """Bytes of the answer, see `answer_bytes`."""
        return self.output_bytes if self.answer_bytes is None else min(self.answer_bytes, self.output_bytes)


@dataclass(frozen=True)
class Program:
    """One run of one program: as a script that reads standard input, or as one call of a function it defines.

    Args:
        source: Python source text. As a script it runs as `__main__`; for a functional call it runs as a module named
            `program` (so `if __name__ == "__main__":` blocks do not run) and `fn_name` is called afterwards.
        stdin: text on standard input; `/dev/stdin` can be opened too. Scripts only.
        fn_name: function to call. Where the source defines a class `Solution` with that attribute,
            `Solution().fn_name` is called, else the module-level `fn_name`.
        arguments: positional arguments as the JSON text of an array, e.g. `"[[1, 2, 3], 4]"`. Functional calls only.
        prelude: source text executed before `source` in the same namespace; line numbers in tracebacks are those of
            `source` alone.
        limits: see `Limits`.
        group: programs that belong together, e.g. all tests of one rollout; see `Sandbox.run`.

    Raises:
        ValueError: `stdin` together with `fn_name`, `arguments` without it, or `arguments` that are no JSON array.
    """

    source: str
    stdin: str = ""
    fn_name: str | None = None
    arguments: str | None = None
    prelude: str = ""
    limits: Limits = field(default_factory=Limits)
    group: str | int | None = None

    def __post_init__(self) -> None:
        if self.fn_name is None and self.arguments is not None:
            raise ValueError("Program.arguments needs Program.fn_name, the function to call with them.")
        if self.fn_name is not None and self.stdin:
            raise ValueError("A functional call has no standard input: give Program.arguments, not Program.stdin.")
        if self.arguments is not None and not (
            self.arguments.lstrip().startswith("[") and self.arguments.rstrip().endswith("]")
        ):
            raise ValueError(
                f"Program.arguments must be the JSON text of an array, one element per argument, got "
                f"{self.arguments[:80]!r}. Use json.dumps([first, second])."
            )


@dataclass(frozen=True)
class Outcome:
    """What was observed of one `Program`. Everything but `status` and `seconds` is the program's own word.

    Args:
        status: see `Status`.
        stdout: standard output, UTF-8 with undecodable bytes replaced, at most `answer_bytes` of it; its beginning
            and its end unless `status` is `"ok"` (`excerpt`), so that a batch does not hold the floods of all its
            programs.
        value: the function's return value as JSON text (tuples become arrays), `None` unless `status` is `"ok"` and
            the program is a functional call. A program that exits with status 0 before its function returned, or
            whose return value JSON cannot express, has `status="runtime_error"` and no value.
        error: for `"runtime_error"` and `"memory"`, a short traceback with the lines of `source` and no path of this
            machine, or the end of standard error, or the signal's name; for the other failures, one line that says
            which limit was reached; empty for `"ok"`.
        exit_code: the process's exit status, `-n` for signal n, `None` where the sandbox ended or skipped it.
        seconds: wall-clock time it ran.
    """

    status: Status
    stdout: str = ""
    value: str | None = None
    error: str = ""
    exit_code: int | None = None
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether the program ended by itself without an error. It says nothing of the answer's correctness."""
        return self.status == "ok"


def excerpt(text: str) -> str:
    """A text's first and last 4096 characters, with a remark between them of what is left out."""
    left_out = len(text) - 2 * _EXCERPT_CHARACTERS
    if left_out <= 0:
        return text
    return f"{text[:_EXCERPT_CHARACTERS]}\n[... {left_out} characters ...]\n{text[-_EXCERPT_CHARACTERS:]}"


@runtime_checkable
class Sandbox(Protocol):
    """Runs programs. A context manager; `open_sandbox` gives one."""

    tier: str
    workers: int

    def run(
        self,
        programs: Sequence[Program],
        *,
        deadline: float | None = None,
        skip_group_after: Collection[Status] = (),
        progress: bool | str = False,
        keep: Callable[[int, Outcome], Outcome] | None = None,
    ) -> list[Outcome]:
        """Run every program and return the outcomes in the same order.

        Args:
            programs: they start in this order, `workers` of them at a time.
            deadline: seconds from now after which the call returns in any case: what runs then is killed, what has
                not started never does, and both come back with status `"deadline"`. `None`: only the programs' own
                limits bound the call.
            skip_group_after: once a program of a group has ended with one of these statuses, those of the same group
                that have not been started come back as `"skipped"`; `("timeout",)` keeps an endless loop from
                costing its limit once per test. Programs whose `group` is `None` are never skipped.
            progress: show a progress bar on standard error; a string is its description.
            keep: called once a program, with its place and its outcome as soon as that is in, one call at a time; what
                it returns stands in the outcome's place. So a batch need not hold all that its programs printed.

        Raises:
            SandboxError: the sandbox itself failed and one restart did not help. It is never reported as an outcome,
                so that a broken machine is not mistaken for wrong answers.
        """
        ...

    def close(self) -> None:
        """End every running program and the pool, whoever waits for them. Closing twice is allowed, `run` afterwards
        is not.
        """
        ...

    def __enter__(self) -> Sandbox: ...

    def __exit__(self, *exc: object) -> None: ...
