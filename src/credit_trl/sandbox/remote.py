"""Sandbox behind an HTTP service in the style of Sandbox Fusion.

    POST {url}/run_code
        {"code": ..., "language": "python", "stdin": ..., "run_timeout": seconds, "memory_limit_MB": ..., ...}
    200 {"status": "Success" | "Failed" | "SandboxError", "message": ...,
         "run_result": {"status": "Finished" | "TimeLimitExceeded" | "Error", "execution_time": seconds,
                        "return_code": ..., "stdout": ..., "stderr": ...}}

The service isolates the programs. This module keeps the rest of the contract: no expected output is sent, a program
that exits early has not returned, a failure of the service is an error and never a wrong answer, and the deadline
holds whatever the service does.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import io
import json
import logging
import math
import re
import secrets
import socket
import threading
import time
import urllib.parse
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

from credit_trl.sandbox.batch import Batch, Sandbox
from credit_trl.sandbox.protocol import MIB, Outcome, Program, SandboxError, printable
from credit_trl.sandbox.running import (
    ERROR_CHARACTERS,
    failure,
    is_json,
    processor_limit,
    reached_processor_limit,
    reported_outcome,
    signal_or_status,
)

# Time for a service to queue, start and send, on top of a program's wall-clock limit.
_ALLOWANCE_SECONDS = 60.0
_OPENING_SECONDS = 30.0
_CHUNK = 1 << 16
# Seconds between two tries of a program. They double each time; `Retry-After` can lengthen them.
_FIRST_WAIT, _LONGEST_WAIT = 1.0, 60.0
# Tries of a program: if the service is unreachable, overloaded or restarting (half a minute in all), and otherwise.
_TRIES_UNAVAILABLE, _TRIES_FAILED = 6, 2

_logger = logging.getLogger(__name__)

# Replaces the driver's `main`. The report goes to the end of standard error, after a mark that a program does not know
# in advance. The interface has no limit of processor time, so the program sets it.
_MAIN = """
def main(mark, cpu_seconds, prelude, source, fn_name, arguments):
    def report(kind, text):
        try:
            sys.stdout.flush()
        except Exception:
            pass
        payload = ("\\n" + mark + kind + text).encode("utf-8", "backslashreplace")
        while payload:
            payload = payload[os.write(2, payload):]
        os._exit(kind != "R")

    try:
        import resource
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1))
    except (ImportError, OSError, ValueError):  # the service has a lower limit, or none
        pass
    if fn_name is not None:
        arguments = parse_arguments(arguments)
    run(prelude, source, fn_name, arguments, report)
"""


class RemoteSandbox(Sandbox):
    """Sandbox behind a URL. It holds nothing between two calls of `run`.

    Args:
        url: address of the service, `http://` or `https://`; `/run_code` is appended. A user and password in it
            (`https://user:password@host`) are sent as basic authentication and appear in no message.

    Raises:
        SandboxError: the service fails to run a program that prints 42 within 30 seconds.
        ValueError: `url` is not such an address.
    """

    tier = "remote"

    def __init__(self, url: str, workers: int = 16) -> None:
        self._address = parse_address(url)
        self.url = self._address.shown
        self.workers = workers
        self.description = f"remote, {self.url}"
        # Without retries, so that a wrong address fails at once.
        try:
            outcome = self.run_one(Program("print(6 * 7)"), time.monotonic() + _OPENING_SECONDS)
        except TimeoutError:
            raise SandboxError(f"{self.url} did not answer within {_OPENING_SECONDS:g} seconds.") from None
        if (outcome.status, outcome.stdout.strip()) != ("ok", "42"):
            raise SandboxError(f"The remote sandbox {self._shown(f'{self.url} does not run Python: {outcome}')}.")

    def _shown(self, text: str) -> str:
        """A text for a message: what the service wrote cannot control a terminal or repeat the credentials."""
        for secret in self._address.secrets:
            text = text.replace(secret, "***")
        return printable(text)

    def _run_batch(self, batch: Batch, until: float) -> None:
        _BatchThreads(self, batch, until).run(min(self.workers, len(batch.programs)))

    def run_one(self, program: Program, until: float = math.inf) -> Outcome:
        """Run a program with a single request.

        Raises:
            SandboxError: the service failed; `_Unavailable` if it may recover soon.
            TimeoutError: at `until`.
            ValueError: arguments that are not JSON.
        """
        if program.arguments is not None and not is_json(program.arguments):
            raise ValueError(f"Program.arguments are not JSON: {program.arguments[:80]!r}")
        limits = program.limits
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
        # JSON may escape a character to six bytes, twice. A longer response is more output than the limit allows.
        most = 12 * limits.output_bytes + MIB
        give_up = min(until, time.monotonic() + limits.wall_seconds + _ALLOWANCE_SECONDS)
        try:
            response = self._post(json.dumps(body).encode(), give_up, most)
            if len(response) > most:
                return Outcome("output_limit", error=f"more than {limits.output_bytes} bytes of output")
            return outcome_of(program, json.loads(response), mark)
        except TimeoutError:
            if time.monotonic() >= until:
                raise
            raise SandboxError(f"{self.url} did not answer in time") from None
        except (OSError, http.client.HTTPException) as error:
            raise _Unavailable(self._shown(f"{self.url}: {type(error).__name__}: {error}")) from None
        except (ValueError, TypeError, RecursionError) as error:
            raise SandboxError(self._shown(f"{self.url}: {type(error).__name__}: {error}")) from None
        except SandboxError as error:
            error.args = (self._shown(str(error)),)
            raise

    def _post(self, body: bytes, until: float, most: int) -> bytes:
        """Body of the response, cut a little after `most` bytes."""
        kind = http.client.HTTPSConnection if self._address.is_tls else http.client.HTTPConnection
        connection = kind(self._address.host, self._address.port, timeout=_left(until))
        connection.connect()
        with contextlib.closing(connection.sock) as stream:
            connection.sock = _BoundedSocket(stream, until)
            headers = {"Content-Type": "application/json", **self._address.headers}
            connection.request("POST", self._address.path + "/run_code", body, headers)
            response = connection.getresponse()
            received = bytearray()
            while len(received) <= most and (chunk := response.read1(_CHUNK)):
                received += chunk
        if response.status != 200:
            problem = f"{self.url} answered {response.status}: {received[:300].decode(errors='replace')}"
            if response.status == 429 or response.status >= 500:
                raise _Unavailable(problem, response.headers.get("Retry-After"))
            raise SandboxError(problem)
        return bytes(received)

    def close(self) -> None:
        """Does nothing."""


@dataclass(frozen=True)
class Address:
    """Parts of a service's address. Credentials are in `headers`, not in `shown`; no message may have `secrets`."""

    host: str
    port: int | None
    is_tls: bool
    path: str
    shown: str
    headers: dict[str, str]
    secrets: tuple[str, ...]


def parse_address(url: str) -> Address:
    """Parse the address of a service.

    Raises:
        ValueError: not `http://host` or `https://host`, an invalid port, or a query. The message has no credentials.
    """
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port
    except ValueError:  # its message quotes the address
        parts, port = urllib.parse.urlsplit(""), None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(
            f'The address of a remote sandbox looks like "http://host:8080", got {without_credentials(url)!r}.'
        )
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    path = parts.path.rstrip("/")
    shown = printable(f"{parts.scheme}://{host}{f':{port}' if port else ''}{path}")
    headers, secrets = {}, ()
    if parts.username is not None or parts.password is not None:
        user, password = (urllib.parse.unquote(text or "") for text in (parts.username, parts.password))
        token = base64.b64encode(f"{user}:{password}".encode()).decode()
        headers = {"Authorization": f"Basic {token}"}
        secrets = tuple(filter(None, (token, parts.netloc.rpartition("@")[0], password, parts.password)))
    return Address(parts.hostname, port, parts.scheme == "https", path, shown, headers, secrets)


def without_credentials(url: str) -> str:
    """A text that may be an address, without what could be a user, a password or a query."""
    before, at, host = url.rpartition("@")
    scheme, slashes, _ = before.partition("//")
    shown = f"{scheme if slashes else ''}{slashes}***@{host}" if at else url
    return re.sub(r"[?#].*", "?***", shown, flags=re.DOTALL)


class _BoundedReader(io.RawIOBase):
    """Reads from a socket until a time. The socket's own time-out starts again with each byte."""

    def __init__(self, stream: socket.socket, until: float) -> None:
        super().__init__()
        self._stream = stream
        self._until = until

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._stream.settimeout(_left(self._until))
        return self._stream.recv_into(buffer)


@dataclass
class _BoundedSocket:
    """What `http.client` needs of a socket. A service that drips its headers would hold a plain one for ever."""

    stream: socket.socket
    until: float

    def sendall(self, content: bytes) -> None:
        self.stream.settimeout(_left(self.until))  # for the whole call
        self.stream.sendall(content)

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(_BoundedReader(self.stream, self.until))

    def close(self) -> None:
        """Does nothing: `http.client` closes the socket of a response before it is read."""


class _Unavailable(SandboxError):
    """The service is unreachable or overloaded. `retry_after`: its `Retry-After` in seconds, 0 for none or a date."""

    def __init__(self, message: str, retry_after: str | None = None) -> None:
        super().__init__(message)
        self.retry_after = float(retry_after) if retry_after and retry_after.strip().isdecimal() else 0.0


class _BatchThreads:
    """Threads that run the programs of a batch. Only a thread that holds `changed` may access the batch."""

    def __init__(self, sandbox: RemoteSandbox, batch: Batch, until: float) -> None:
        self.sandbox = sandbox
        self.batch = batch
        self.until = until
        self.changed = threading.Condition()
        self.stopped = False
        self.warned = False
        self.error: BaseException | None = None

    def run(self, count: int) -> None:
        """Start the threads and wait for the batch or the deadline. Afterwards no thread accesses the batch."""
        for _ in range(count):
            threading.Thread(target=self._work, daemon=True, name="credit-trl-remote-sandbox").start()
        with self.changed:
            try:
                while not self.batch.finished and self.error is None:
                    left = self.until - time.monotonic()
                    if left <= 0:
                        self.batch.expire()
                        break
                    self.changed.wait(min(left, threading.TIMEOUT_MAX))
            finally:
                self.stopped = True
                self.changed.notify_all()
        if self.error is not None:
            raise self.error

    def _work(self) -> None:
        while True:
            with self.changed:
                index = None if self.stopped else self.batch.take()
                if index is None:
                    self.changed.notify_all()
                    return
            try:
                result: Outcome | BaseException = self._request(self.batch.programs[index])
            except BaseException as error:
                result = error
            with self.changed:
                if not self.stopped:
                    self._record(index, result)
                self.changed.notify_all()

    def _request(self, program: Program) -> Outcome:
        """Run a program, and try again while the service fails, up to a limit."""
        tried = 0
        while True:
            try:
                return self.sandbox.run_one(program, self.until)
            except SandboxError as error:
                tried += 1
                if tried >= (_TRIES_UNAVAILABLE if isinstance(error, _Unavailable) else _TRIES_FAILED):
                    raise SandboxError(f"The remote sandbox failed {tried} times on a program: {error}") from error
                retry_after = getattr(error, "retry_after", 0.0)
                self._wait(min(_LONGEST_WAIT, max(retry_after, _FIRST_WAIT * 2 ** (tried - 1))), error)

    def _wait(self, seconds: float, reason: SandboxError) -> None:
        """Sleep; raise `TimeoutError` when the batch has stopped. Logs the first wait of a batch."""
        with self.changed:
            if not self.warned and not self.stopped:
                self.warned = True
                _logger.warning("Trying again in %.0f s, up to %d times: %s", seconds, _TRIES_UNAVAILABLE, reason)
            if self.changed.wait_for(lambda: self.stopped, seconds):
                raise TimeoutError

    def _record(self, index: int, result: Outcome | BaseException) -> None:
        try:
            if isinstance(result, TimeoutError):
                result = Outcome("deadline", error="the deadline came before it ended")
            if isinstance(result, BaseException):
                raise result
            self.batch.done(index, result)
        except BaseException as error:
            self.error = error


def remote_code(program: Program, mark: str) -> str:
    """Code for the service: the driver's functions, a `main` that reports on standard error, and its call."""
    driver = files(__package__).joinpath("driver.py").read_text(encoding="utf-8")
    functions = driver.partition("\ndef main():")[0].replace("import marshal\n", "").replace("import resource\n", "")
    call = (program.prelude, program.source, program.fn_name, program.arguments or "[]")
    arguments = (mark, math.ceil(program.limits.cpu_seconds), *call)
    return f"{functions}\n{_MAIN}\n\nmain{arguments!r}\n"


def outcome_of(program: Program, answer: Any, mark: str) -> Outcome:
    """Outcome from a service's response; raises `SandboxError` if the service failed or its form is unknown."""
    run = answer.get("run_result") if isinstance(answer, dict) else None
    seconds = _seconds(run)
    if seconds is None or run.get("status") not in ("Finished", "TimeLimitExceeded"):
        raise SandboxError(f"the remote sandbox failed: {json.dumps(answer)[:500]}")
    limits = program.limits
    printed = str(run.get("stdout") or "").encode("utf-8", "replace")
    stderr, _, report = str(run.get("stderr") or "").partition("\n" + mark)
    ended = Outcome("ok", printed[: limits.longest_answer].decode("utf-8", "ignore"), seconds=seconds)
    if run["status"] == "TimeLimitExceeded":
        return failure(ended, "timeout", f"more than {limits.wall_seconds:g} seconds")
    most_printed = limits.longest_answer if program.fn_name is None else limits.output_bytes
    for size, most in ((len(printed), most_printed), (len(report) - ERROR_CHARACTERS, limits.longest_answer)):
        if size > most:
            return failure(ended, "output_limit", f"more than {most} bytes of output")
    ended = replace(ended, exit_code=signal_or_status(run.get("return_code")))
    if reached_processor_limit(ended.exit_code, seconds, limits):
        return failure(ended, "timeout", processor_limit(limits))
    return reported_outcome(program, ended, report[:1], report[1:], stderr[-ERROR_CHARACTERS // 2 :])


def _seconds(run: Any) -> float | None:
    """Seconds that a service reports for a program, 0 for none; None if they or the whole report are malformed."""
    try:
        seconds = float(run.get("execution_time") or 0.0)
    except (AttributeError, TypeError, ValueError, OverflowError):
        return None
    return seconds if 0.0 <= seconds < math.inf else None


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
