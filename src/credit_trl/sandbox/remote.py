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
import json
import math
import re
import secrets
import socket
import threading
import time
import urllib.parse
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from importlib.resources import files
from typing import Any

from credit_trl.sandbox.batch import Batch, Sandbox
from credit_trl.sandbox.protocol import MIB, Outcome, Program, SandboxError, printable
from credit_trl.sandbox.running import (
    ERROR_CHARACTERS,
    failure,
    processor_limit,
    reached_processor_limit,
    reported_outcome,
    signal_or_status,
)

# Time for a service to queue, start and send, on top of a program's wall-clock limit.
_ALLOWANCE_SECONDS = 60.0
_CONNECT_SECONDS = 10.0
_OPENING_SECONDS = 30.0
# Time between a failed request and its only repetition; `Retry-After` replaces it, up to the longest.
_RETRY_SECONDS = 5.0
_LONGEST_RETRY_SECONDS = 60.0

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


class _RequestError(SandboxError):
    """A failed request. `retry_seconds` is the time after which the service may answer."""

    def __init__(self, message: str, retry_after: str | None = None) -> None:
        super().__init__(message)
        has_seconds = retry_after is not None and retry_after.strip().isdecimal()
        self.retry_seconds = float(retry_after) if has_seconds else _RETRY_SECONDS


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
        self._headers, self._secrets = _credentials(self._address)
        self.url = _without_user(self._address)
        self.workers = workers
        self.description = f"remote, {self.url}"
        try:
            outcome = self._request(Program("print(6 * 7)"), time.monotonic() + _OPENING_SECONDS, set())
        except TimeoutError:
            raise SandboxError(f"{self.url} did not answer within {_OPENING_SECONDS:g} seconds.") from None
        if (outcome.status, outcome.stdout.strip()) != ("ok", "42"):
            raise SandboxError(f"The remote sandbox {self._shown(f'{self.url} does not run Python: {outcome}')}.")

    def _shown(self, text: str) -> str:
        """A text for a message: what the service wrote cannot control a terminal or repeat the credentials."""
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return printable(text)

    def _run_batch(self, batch: Batch, until: float) -> None:
        threads = ThreadPoolExecutor(self.workers, thread_name_prefix="credit-trl-remote-sandbox")
        stopped = threading.Event()
        streams: set[socket.socket] = set()
        running: dict[Future[Outcome], int] = {}
        try:
            while not batch.finished and time.monotonic() < until:
                while len(running) < self.workers and (index := batch.take()) is not None:
                    request = threads.submit(self._run_program, batch.programs[index], until, stopped, streams)
                    running[request] = index
                left = min(until - time.monotonic(), threading.TIMEOUT_MAX)
                for request in wait(running, max(0.0, left), FIRST_COMPLETED).done:
                    with contextlib.suppress(TimeoutError):  # the deadline, which ends the loop
                        batch.done(running[request], request.result())
                        del running[request]
            batch.expire()
        finally:
            stopped.set()
            for stream in tuple(streams):
                _abort(stream)
            threads.shutdown(wait=False, cancel_futures=True)

    def _run_program(
        self, program: Program, until: float, stopped: threading.Event, streams: set[socket.socket]
    ) -> Outcome:
        """Run a program, and try once more if the service fails."""
        try:
            return self._request(program, until, streams)
        except _RequestError as error:
            left = until - time.monotonic()
            stopped.wait(min(error.retry_seconds, _LONGEST_RETRY_SECONDS, max(0.0, left)))
        if stopped.is_set() or time.monotonic() >= until:
            raise TimeoutError
        try:
            return self._request(program, until, streams)
        except _RequestError as error:
            raise SandboxError(f"The remote sandbox failed twice on a program: {error}") from error

    def _request(self, program: Program, until: float, streams: set[socket.socket]) -> Outcome:
        """Run a program with a single request, whose socket is in `streams` meanwhile.

        Raises:
            SandboxError: the service failed.
            TimeoutError: at `until`.
        """
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
            response = self._post(json.dumps(body).encode(), give_up, most, streams)
            if len(response) > most:
                return Outcome("output_limit", error=f"more than {limits.output_bytes} bytes of output")
            return outcome_of(program, json.loads(response), mark)
        except _RequestError:
            raise
        except (OSError, http.client.HTTPException, ValueError, TypeError, RecursionError, SandboxError) as error:
            if time.monotonic() >= until:
                raise TimeoutError from None
            if time.monotonic() >= give_up:
                raise _RequestError(f"{self.url} did not answer in time") from None
            kind = "" if isinstance(error, SandboxError) else f"{self.url}: {type(error).__name__}: "
            raise _RequestError(self._shown(f"{kind}{error}")) from None

    def _post(self, body: bytes, give_up: float, most: int, streams: set[socket.socket]) -> bytes:
        """Body of the response, at most `most + 1` bytes. At `give_up` the connection ends, however slowly it goes."""
        is_tls = self._address.scheme == "https"
        kind = http.client.HTTPSConnection if is_tls else http.client.HTTPConnection
        left = max(0.01, give_up - time.monotonic())
        connection = kind(self._address.hostname, self._address.port, timeout=min(_CONNECT_SECONDS, left))
        connection.connect()
        stream = connection.sock
        stream.settimeout(left)
        timer = threading.Timer(give_up - time.monotonic(), _abort, (stream,))  # a time-out begins anew at each byte
        timer.daemon = True
        timer.start()
        streams.add(stream)
        try:
            headers = {"Content-Type": "application/json", **self._headers}
            connection.request("POST", self._address.path.rstrip("/") + "/run_code", body, headers)
            response = connection.getresponse()
            received = response.read(most + 1)
        finally:
            timer.cancel()
            streams.discard(stream)
            stream.close()
        if response.status != 200:
            said = f"{self.url} answered {response.status}: {received[:300].decode(errors='replace')}"
            raise _RequestError(self._shown(said), response.headers.get("Retry-After"))
        return received

    def close(self) -> None:
        """Does nothing."""


def _abort(stream: socket.socket) -> None:
    """End a connection that another thread reads."""
    with contextlib.suppress(OSError):
        stream.shutdown(socket.SHUT_RDWR)


def parse_address(url: str) -> urllib.parse.SplitResult:
    """Parse the address of a service.

    Raises:
        ValueError: not `http://host` or `https://host`, an invalid port, or a query. The message has no credentials.
    """
    try:
        parts = urllib.parse.urlsplit(url)
        is_valid = parts.port != 0 and parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:  # its message quotes the address
        is_valid = False
    if not is_valid or parts.query or parts.fragment:
        raise ValueError(
            f'The address of a remote sandbox looks like "http://host:8080", got {without_credentials(url)!r}.'
        )
    return parts


def _without_user(address: urllib.parse.SplitResult) -> str:
    host = address.netloc.rpartition("@")[2]
    return printable(f"{address.scheme}://{host}{address.path.rstrip('/')}")


def _credentials(address: urllib.parse.SplitResult) -> tuple[dict[str, str], list[str]]:
    """Headers of basic authentication, and the texts that no message may contain."""
    if address.username is None and address.password is None:
        return {}, []
    user = urllib.parse.unquote(address.username or "")
    password = urllib.parse.unquote(address.password or "")
    token = base64.b64encode(f"{user}:{password}".encode()).decode()
    hidden = (token, address.netloc.rpartition("@")[0], password, address.password)
    return {"Authorization": f"Basic {token}"}, [text for text in hidden if text]


def without_credentials(url: str) -> str:
    """A text that may be an address, without what could be a user, a password or a query."""
    before, at, host = url.rpartition("@")
    scheme, slashes, _ = before.partition("//")
    shown = f"{scheme if slashes else ''}{slashes}***@{host}" if at else url
    return re.sub(r"[?#].*", "?***", shown, flags=re.DOTALL)


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
