"""Programs, their limits and their outcomes: the data that go into a sandbox and come out of it, and their channel.

A `Program` has no field for an expected output. Outputs are compared outside of the sandbox, so a program cannot find,
read or guess the expected one. For the same reason an `Outcome` does not say whether a program is correct:
`status="ok"` means that it ended by itself without an error.
"""

import errno
import json
import math
import os
import select
import socket
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

Status = Literal[
    "ok",  # ended by itself: exit status 0 (script), or the function returned (functional call)
    "runtime_error",  # an uncaught exception, a non-zero exit status, a signal, or no return value
    "timeout",  # limit of processor time or wall-clock time
    "memory",  # MemoryError, or killed because it held more than `memory_bytes`
    "output_limit",  # more than `output_bytes` on both streams, or an answer of more than `answer_bytes`
    "deadline",  # the batch's deadline came before the program had ended
    "skipped",  # not started: its group had stopped by `skip_group_after` or `failed_group_seconds`
    "rejected",  # ended by itself, with an answer that `keep` rejected; no sandbox gives this status itself
]
STATUSES: tuple[str, ...] = get_args(Status)

MIB = 1024 * 1024
_CHUNK = 1 << 18  # bytes that a channel sends or receives at once
_LARGEST_LIMIT = 1 << 62  # the kernel stores limits as signed longs
_SMALLEST_MEMORY = 64 * MIB  # for an interpreter to start
_OPEN_FILES = range(16, 65)  # for an interpreter to start; full sockets hold 0.3 MiB each, which no limit counts


class SandboxError(RuntimeError):
    """The sandbox itself failed (not the program in it), or this machine has none."""


class ResourcesExhausted(SandboxError):
    """This machine or process has no descriptors, processes or memory left. It says nothing about the isolation."""


_EXHAUSTED = tuple(os.strerror(code) for code in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN))


def sandbox_error(message: str) -> SandboxError:
    """`ResourcesExhausted` if the message has the kernel's text for that, else `SandboxError`."""
    if any(text in message for text in _EXHAUSTED):
        return ResourcesExhausted(f"{message} Close files and processes, or raise their limits (ulimit -n, -u).")
    return SandboxError(message)


@dataclass(frozen=True)
class Limits:
    """Resource limits of one program.

    Args:
        cpu_seconds: processor time of the program, rounded up to whole seconds.
        wall_seconds: wall-clock time of the program, without the time in which it could run and waited for a
            processor. At the limit its whole process group is killed.
        memory_bytes: address space of the program (`RLIMIT_AS`), and what it holds with page tables, which is sampled;
            at least 64 MiB.
        processes: threads of the program, the first one included. An unprotected program may start processes, which
            count too; their time and memory is sampled.
        open_files: file descriptors, from 16 to 64.
        output_bytes: standard output and standard error together; also the return value of a functional call.
        answer_bytes: the answer alone: a script's standard output, a functional call's return value, at most
            `output_bytes`. `Outcome.stdout` is cut to it.

    Raises:
        ValueError: a limit is not positive, not finite, or too small for an interpreter to start.
    """

    cpu_seconds: float = 10.0
    wall_seconds: float = 12.0
    memory_bytes: int = 1024 * MIB
    processes: int = 16
    open_files: int = 64
    output_bytes: int = 8 * MIB
    answer_bytes: int = _LARGEST_LIMIT - 1  # no limit of its own

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            if not 0 < value < _LARGEST_LIMIT:
                raise ValueError(f"Limits.{limit.name} must be positive and finite, below 2**62, got {value!r}.")
        if self.open_files not in _OPEN_FILES:
            raise ValueError(f"Limits.open_files must be from 16 to 64, got {self.open_files}.")
        if self.memory_bytes < _SMALLEST_MEMORY:
            raise ValueError(f"Limits.memory_bytes must be at least {_SMALLEST_MEMORY}, got {self.memory_bytes}.")

    @property
    def longest_answer(self) -> int:
        """Largest answer in bytes, see `answer_bytes`."""
        return min(self.answer_bytes, self.output_bytes)


@dataclass(frozen=True)
class Program:
    """One run of a program: as a script that reads standard input, or as one call of a function that it defines.

    Args:
        source: Python source text. A script runs as `__main__`. For a functional call the source runs as a module
            named `program` (its `if __name__ == "__main__":` block does not run), then `fn_name` is called.
        stdin: text on standard input, which can also be opened as `/dev/stdin`. Scripts only.
        fn_name: function to call. If the source defines a class `Solution` with that attribute,
            `Solution().fn_name` is called, else the module-level `fn_name`.
        arguments: positional arguments as the JSON text of an array, e.g. `"[[1, 2, 3], 4]"`. Functional calls only.
        prelude: source text that runs before `source` in the same namespace. Line numbers in tracebacks count from
            the start of `source`.
        limits: see `Limits`.
        group: label of programs that belong together, e.g. the tests of one rollout; see `Sandbox.run`.

    Raises:
        ValueError: `stdin` together with `fn_name`, `arguments` without `fn_name`, or `arguments` that are not the
            text of an array.
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
            raise ValueError("A functional call has no standard input; use Program.arguments and not Program.stdin.")
        arguments = "[]" if self.arguments is None else self.arguments.strip()
        if not (arguments.startswith("[") and arguments.endswith("]")):
            raise ValueError(
                f"Program.arguments must be the JSON text of an array, one element per argument, got "
                f"{arguments[:80]!r}. Use json.dumps([first, second])."
            )


@dataclass(frozen=True)
class Outcome:
    """Observed result of one `Program`. The program controls every field but `status` and `seconds`.

    Args:
        status: see `Status`.
        stdout: standard output, UTF-8 with undecodable bytes replaced, at most `answer_bytes`. Shortened by `excerpt`
            unless `status` is `"ok"`.
        value: the function's return value as JSON text (tuples become arrays); `None` unless `status` is `"ok"` and
            the program is a functional call. A program that exits with status 0 before its function returned, or
            whose return value is not JSON, has the status `"runtime_error"`.
        error: empty for `"ok"`. For `"runtime_error"` and `"memory"` a short traceback with lines of `source` and no
            path of this machine, or the end of standard error, or the signal's name. Else one line with the limit.
        exit_code: exit status of the process, `-n` for signal n, `None` if the sandbox ended or skipped it.
        seconds: wall-clock time that it ran, with waits for a processor.
    """

    status: Status
    stdout: str = ""
    value: str | None = None
    error: str = ""
    exit_code: int | None = None
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether the program ended by itself without an error. Its answer may still be wrong."""
        return self.status == "ok"


class Channel:
    """One end of a connection between the client and the server of a sandbox, over a stream socket.

    It never blocks: `send` queues, `flush` writes, `pump` writes and reads. A message is a line of JSON in ASCII, with
    line feeds and lone surrogates as escapes.
    """

    def __init__(self, stream: socket.socket) -> None:
        stream.setblocking(False)
        self.stream = stream
        self.closed = False
        self.unsent = bytearray()
        self._incoming = bytearray()

    def send(self, message: dict[str, Any]) -> None:
        """Queue a message."""
        self.unsent += json.dumps(message, separators=(",", ":")).encode("ascii") + b"\n"

    def flush(self) -> None:
        """Write as much as the socket accepts."""
        try:
            while self.unsent:
                sent = self.stream.send(memoryview(self.unsent)[:_CHUNK])
                del self.unsent[:sent]
        except BlockingIOError:
            pass
        except OSError:
            self.closed = True

    def pump(self) -> list[dict[str, Any]]:
        """Write as much as the socket accepts, read all that it has, and return the complete messages.

        Sets `closed` if the other end is closed.
        """
        self.flush()
        try:
            while chunk := self.stream.recv(_CHUNK):
                self._incoming += chunk
            self.closed = True
        except BlockingIOError:
            pass
        except OSError:
            self.closed = True
        *lines, self._incoming = self._incoming.split(b"\n")
        return [json.loads(line) for line in lines]

    def wait(self, timeout: float) -> None:
        """Wait until `pump` has something to do, at most `timeout` seconds."""
        poll = select.poll()  # `select.select` takes no descriptor above 1023
        poll.register(self.stream, select.POLLIN | (select.POLLOUT if self.unsent else 0))
        poll.poll(None if timeout == math.inf else max(0.0, timeout) * 1000)

    def close(self) -> None:
        self.closed = True
        self.stream.close()


def printable(text: str, allowed: str = "") -> str:
    """Text with its non-printable characters spelled out, so that it cannot control a terminal or start a line."""
    return "".join(c if c.isprintable() or c in allowed else f"⟨U+{ord(c):04X}⟩" for c in text)


def excerpt(text: str, size: int = 8192) -> str:
    """A text of at most `kept` characters, or both ends of a longer one and the number of characters between them."""
    dropped = len(text) - size
    if dropped <= 0:
        return text
    return f"{text[: size // 2]}\n[... {dropped:,} characters dropped ...]\n{text[-size // 2 :]}"
