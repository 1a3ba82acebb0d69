"""A sandbox somewhere else, spoken to over HTTP in the style of Sandbox Fusion.

    POST {url}/run_code
        {"code": ..., "language": "python", "stdin": ..., "run_timeout": seconds, "memory_limit_MB": ..., ...}
    200 {"status": "Success" | "Failed" | "SandboxError", "message": ...,
         "run_result": {"status": "Finished" | "TimeLimitExceeded" | "Error", "execution_time": seconds,
                        "return_code": ..., "stdout": ..., "stderr": ...}}

How well a program is held there is that service's part. What this module keeps up is the rest of the contract: no
expected output is ever sent, a program that exits early has not returned, a service that fails is an error and never
a wrong answer, and the deadline holds whatever the service does.
"""

from __future__ import annotations

import http.client
import json
import logging
import secrets
import threading
import time
import urllib.parse
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from importlib.resources import files
from typing import Any

from credit_trl.rollout.deadline import seconds_left
from credit_trl.sandbox.batch import Batch
from credit_trl.sandbox.protocol import MIB, Outcome, Program, SandboxError, Status, excerpt

# What a service may take on top of a program's own wall clock limit: queueing, starting, sending.
_ALLOWANCE_SECONDS = 60.0
_CHUNK = 1 << 16
# Between tries of a program: doubled each time, longer where the service asks for it by `Retry-After`.
_FIRST_WAIT, _LONGEST_WAIT = 1.0, 60.0
# Of a service that cannot be reached, is overloaded or restarts, half a minute in all; of one that fails otherwise.
_TRIES_UNAVAILABLE, _TRIES_FAILED = 6, 2

_logger = logging.getLogger(__name__)

# Follows the driver's functions in place of its `main`. The report goes to the end of standard error, behind a mark
# that is new for every program.
_MAIN = """
def main(mark, prelude, source, fn_name, arguments):
    name = "__main__" if fn_name is None else "program"
    module = type(sys)(name)
    module.__file__ = "program.py"
    sys.modules[name] = module
    process = os.getpid()
    builtins.exit = builtins.quit = sys.exit
    if fn_name is not None:
        import json
        arguments = json.loads(arguments)
    try:
        execute(prelude, source, module.__dict__)
        if fn_name is None:
            return
        kind, text, status = "R", json.dumps(call(fn_name, arguments, module.__dict__)), 0
    except SystemExit:
        raise
    except MemoryError:
        module.__dict__.clear()
        kind, text, status = "M", "MemoryError", 1
    except BaseException as error:
        kind, text, status = "E", short_traceback(error, {"program.py": source, "prelude.py": prelude}), 1
    if os.getpid() == process:
        try:
            sys.stdout.flush()
        except Exception:
            pass
        report = ("\\n" + mark + kind + text).encode("utf-8", "backslashreplace")
        while report:
            report = report[os.write(2, report):]
    os._exit(status)
"""


class RemoteSandbox:
    """A `Sandbox` behind a URL.

    Args:
        url: the service's address, `http://` or `https://`; `/run_code` is appended.
        workers: requests that are under way at the same time.

    Raises:
        SandboxError: the service does not run a program that prints 42.
        ValueError: the URL is not one.
    """

    tier = "remote"

    def __init__(self, url: str, workers: int = 16) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f'The address of a remote sandbox looks like "http://host:8080", got {url!r}.')
        self.url = url
        self.workers = workers
        self.description = f"remote, {parts.scheme}://{parts.netloc}"
        self._parts = parts
        # A wrong address is an error at once.
        outcome = self.run_one(Program("print(6 * 7)"), until=None)
        if (outcome.status, outcome.stdout.strip()) != ("ok", "42"):
            raise SandboxError(f"The remote sandbox {url} does not run Python: {outcome}.")

    def run(
        self,
        programs: Sequence[Program],
        *,
        deadline: float | None = None,
        skip_group_after: Collection[Status] = (),
        progress: bool | str = False,
        keep: Callable[[int, Outcome], Outcome] | None = None,
    ) -> list[Outcome]:
        """See `Sandbox.run`. Requests still under way at the deadline are abandoned."""
        deadline = seconds_left(deadline)
        until = None if deadline is None else time.monotonic() + deadline
        with Batch(programs, skip_group_after, progress, keep) as batch:
            crew = _Crew(self, batch, until)
            crew.work(min(self.workers, len(batch.programs)))
            return batch.outcomes()

    def run_one(self, program: Program, until: float | None) -> Outcome:
        """One request.

        Raises:
            SandboxError: the service failed; `_Unavailable` where it may be there again soon.
            TimeoutError: at `until`.
            ValueError: arguments that are not JSON.
        """
        if program.arguments is not None and not _readable(program.arguments):
            raise ValueError(f"Program.arguments are not JSON: {program.arguments[:80]!r}")
        limits = program.limits
        allowed = time.monotonic() + limits.wall_seconds + _ALLOWANCE_SECONDS
        give_up = allowed if until is None else min(allowed, until)
        mark = secrets.token_hex(16)
        body = {
            "code": remote_code(program, mark),
            "language": "python",
            "stdin": program.stdin,
            "compile_timeout": limits.wall_seconds,
            "run_timeout": limits.wall_seconds,
            "memory_limit_MB": limits.memory_bytes // MIB,
            "files": {},
            "fetch_files": [],
        }
        # Text may be escaped to six bytes a character, twice; more than that is no answer to this program.
        most = 12 * limits.output_bytes + MIB
        try:
            answer = json.loads(self._post(json.dumps(body).encode(), give_up, most))
            outcome = outcome_of(program, answer, mark)
            return outcome if outcome.ok else replace(outcome, stdout=excerpt(outcome.stdout))
        except TimeoutError:
            if until is not None and time.monotonic() >= until:
                raise
            raise SandboxError(f"{self.url} did not answer in time") from None
        except _TooLong:
            return Outcome("output_limit", error=f"more than {limits.output_bytes} bytes of output")
        except (OSError, http.client.HTTPException) as error:
            raise _Unavailable(f"{self.url}: {type(error).__name__}: {error}") from error
        except (ValueError, TypeError, RecursionError) as error:
            raise SandboxError(f"{self.url}: {type(error).__name__}: {error}") from error

    def _post(self, body: bytes, until: float, most: int) -> bytes:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._parts.hostname, self._parts.port, timeout=_left(until))
        try:
            path = self._parts.path.rstrip("/") + "/run_code"
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            received = bytearray()
            while True:
                left = _left(until)
                if connection.sock is not None:  # it is None where the answer's end is the connection's
                    connection.sock.settimeout(left)
                if not (chunk := response.read1(_CHUNK)):
                    break
                received += chunk
                if len(received) > most:
                    raise _TooLong
            if response.status != 200:
                said = f"{self.url} answered {response.status}: {received[:300].decode(errors='replace')}"
                if response.status == 429 or response.status >= 500:
                    raise _Unavailable(said, _seconds(response.headers.get("Retry-After")))
                raise SandboxError(said)
            return bytes(received)
        finally:
            connection.close()

    def close(self) -> None:
        """Nothing is held between runs."""

    def __enter__(self) -> RemoteSandbox:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Unavailable(SandboxError):
    """The service cannot be reached, or has too much to do. `retry_after`: seconds that it asks to be left alone."""

    def __init__(self, message: str, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class _TooLong(Exception):
    """The answer is larger than any outcome of this program can be."""


class _Crew:
    """Threads that take programs from a batch. Only this object's lock lets anybody touch the batch."""

    def __init__(self, sandbox: RemoteSandbox, batch: Batch, until: float | None) -> None:
        self.sandbox = sandbox
        self.batch = batch
        self.until = until
        self.changed = threading.Condition()
        self.stopped = False
        self.warned = False
        self.error: BaseException | None = None

    def work(self, count: int) -> None:
        """Start the threads, wait for the batch or the deadline, and leave no thread that would still touch it."""
        for _ in range(count):
            threading.Thread(target=self._toil, daemon=True, name="credit-trl-remote-sandbox").start()
        with self.changed:
            try:
                while not self.batch.finished and self.error is None:
                    left = None if self.until is None else self.until - time.monotonic()
                    if left is not None and left <= 0:
                        self.batch.expire()
                        break
                    self.changed.wait(left)
            finally:
                self.stopped = True
                self.changed.notify_all()
        if self.error is not None:
            raise self.error

    def _toil(self) -> None:
        while True:
            with self.changed:
                index = None if self.stopped else self.batch.take()
                if index is None:
                    self.changed.notify_all()
                    return
            try:
                result: Outcome | BaseException = self._ask(self.batch.programs[index])
            except BaseException as error:
                result = error
            with self.changed:
                if not self.stopped:
                    self._record(index, result)
                self.changed.notify_all()

    def _ask(self, program: Program) -> Outcome:
        """Ask the service until it answers, or has failed too often."""
        tried = 0
        while True:
            try:
                return self.sandbox.run_one(program, self.until)
            except SandboxError as error:
                tried += 1
                unavailable = isinstance(error, _Unavailable)
                if tried >= (_TRIES_UNAVAILABLE if unavailable else _TRIES_FAILED):
                    raise SandboxError(f"The remote sandbox failed {tried} times on a program: {error}") from error
                asked = error.retry_after if unavailable else 0.0
                self._wait(min(_LONGEST_WAIT, max(asked, _FIRST_WAIT * 2 ** (tried - 1))), error)

    def _wait(self, seconds: float, reason: SandboxError) -> None:
        """Leave the service alone for a while, as long as somebody waits for the batch."""
        with self.changed:
            if not self.warned and not self.stopped:
                self.warned = True
                _logger.warning("Trying again in %.0f s, and some times more: %s", seconds, reason)
            self.changed.wait_for(lambda: self.stopped, seconds)
            if self.stopped:
                raise TimeoutError

    def _record(self, index: int, result: Outcome | BaseException) -> None:
        try:
            if isinstance(result, Outcome):
                self.batch.done(index, result)
            elif isinstance(result, TimeoutError):
                self.batch.done(index, Outcome("deadline", error="the deadline came before it ended"))
            else:
                raise result
        except BaseException as error:
            self.error = error


def remote_code(program: Program, mark: str) -> str:
    """The driver's functions, a `main` that reports on standard error, and its call on this program."""
    driver = files(__package__).joinpath("driver.py").read_text(encoding="utf-8")
    functions = driver.partition("\ndef main():")[0].replace("import marshal\n", "").replace("import resource\n", "")
    call = (
        f"main({mark!r}, {program.prelude!r}, {program.source!r}, {program.fn_name!r}, {program.arguments or '[]'!r})"
    )
    return f"{functions}\n{_MAIN}\n\n{call}\n"


def outcome_of(program: Program, answer: Any, mark: str) -> Outcome:
    """Read a service's answer.

    Raises:
        SandboxError: the service says that it failed itself, or the answer has another form.
    """
    run = answer.get("run_result") if isinstance(answer, dict) else None
    if not isinstance(run, dict) or "status" not in run or answer.get("status") == "SandboxError":
        raise SandboxError(f"the remote sandbox failed: {json.dumps(answer)[:500]}")
    limits = program.limits
    seconds = float(run.get("execution_time") or 0.0)
    printed = str(run.get("stdout") or "").encode("utf-8", "replace")
    stdout = printed[: limits.longest_answer].decode("utf-8", "ignore")
    stderr, _, report = str(run.get("stderr") or "").partition("\n" + mark)
    code = run.get("return_code")
    most = limits.longest_answer if program.fn_name is None else limits.output_bytes
    passed = (
        most if len(printed) > most else limits.longest_answer if len(report) > limits.longest_answer + 4000 else 0
    )
    if run["status"] == "TimeLimitExceeded":
        return Outcome("timeout", stdout, error=f"more than {limits.wall_seconds:g} seconds", seconds=seconds)
    if passed:
        return Outcome("output_limit", stdout, error=f"more than {passed} bytes of output", seconds=seconds)
    kind, text = report[:1], report[1:]
    if kind in ("E", "M"):
        status: Status = "memory" if kind == "M" else "runtime_error"
        return Outcome(status, stdout, error=text[:4000], exit_code=code, seconds=seconds)
    if program.fn_name is None and code == 0:
        return Outcome("ok", stdout, exit_code=code, seconds=seconds)
    if program.fn_name is not None and kind == "R" and _readable(text):
        return Outcome("ok", stdout, value=text, exit_code=code, seconds=seconds)
    before = "" if program.fn_name is None else f" before {program.fn_name} returned"
    error = f"{stderr[-2000:].strip()}\nexited with status {code}{before}".strip()
    return Outcome("runtime_error", stdout, error=error, exit_code=code, seconds=seconds)


def _readable(text: str) -> bool:
    try:
        json.loads(text, parse_int=str)  # a long integer is JSON, whether or not it is a number here
    except (ValueError, RecursionError):
        return False
    return True


def _seconds(retry_after: str | None) -> float:
    """`Retry-After` as seconds; 0 for a date or nothing, after which the usual wait is long enough."""
    return float(retry_after) if retry_after is not None and retry_after.strip().isdecimal() else 0.0


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
