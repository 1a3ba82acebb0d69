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

import contextlib
import http.client
import json
import math
import secrets
import threading
import time
import urllib.parse
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from importlib.resources import files
from typing import Any

from credit_trl.sandbox import running
from credit_trl.sandbox.batch import Batch, Sandbox
from credit_trl.sandbox.protocol import MIB, Outcome, Program, SandboxError, printable

# Time for a service to queue, start and send, on top of a program's wall-clock limit.
_ALLOWANCE_SECONDS = 60.0
_OPENING_SECONDS = 30.0
# Time between a failed request and its only repetition: the service may be overloaded, or restart.
_RETRY_SECONDS = 5.0

# Replaces the driver's `main`. The report goes to the end of standard error, after a mark that a program does not know
# in advance. The interface has no limit of processor time, so the program sets it.
_MAIN = """
def main(mark, cpu_seconds, prelude, source, fn_name, arguments):
    def report(kind, text):
        payload = ("\\n" + mark + kind + text).encode("utf-8", "backslashreplace")
        while payload:
            payload = payload[os.write(2, payload):]

    try:
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1))
    except (OSError, ValueError):  # the service has a lower limit
        pass
    if fn_name is not None:
        arguments = parse_arguments(arguments)
    run(prelude, source, fn_name, arguments, report)
"""


class RemoteSandbox(Sandbox):
    """Sandbox behind a URL. It holds nothing between two calls of `run`.

    Args:
        url: address of the service, `http://` or `https://`; `/run_code` is appended.

    Raises:
        SandboxError: the service fails to run a program that prints 42 within 30 seconds.
        ValueError: `url` is not such an address.
    """

    tier = "remote"

    def __init__(self, url: str, workers: int = 16) -> None:
        self._address = parse_address(url)
        self.url = printable(url.rstrip("/"))
        self.workers = workers
        self.description = f"remote, {self.url}"
        outcome = self._request(Program("print(6 * 7)"), time.monotonic() + _OPENING_SECONDS)
        if (outcome.status, outcome.stdout.strip()) != ("ok", "42"):
            raise SandboxError(printable(f"The remote sandbox {self.url} does not run Python: {outcome}."))

    def _run_batch(self, batch: Batch, until: float) -> None:
        threads = ThreadPoolExecutor(self.workers, thread_name_prefix="credit-trl-remote-sandbox")
        requests: dict[Future[Outcome], int] = {}
        try:
            while not batch.finished and time.monotonic() < until:
                while (index := batch.take(self.workers)) is not None:
                    requests[threads.submit(self._run_program, batch.programs[index], until)] = index
                seconds_left = min(until - time.monotonic(), threading.TIMEOUT_MAX)
                for request in wait(requests, max(0.0, seconds_left), FIRST_COMPLETED).done:
                    index = requests.pop(request)
                    try:
                        outcome = request.result()
                    except SandboxError as error:
                        if time.monotonic() < until:
                            batch.failed([index], str(error))
                    else:
                        batch.done(index, outcome)
            batch.expire()
        finally:
            threads.shutdown(wait=False, cancel_futures=True)

    def _run_program(self, program: Program, until: float) -> Outcome:
        try:
            return self._request(program, until)
        except SandboxError:
            time.sleep(max(0.0, min(_RETRY_SECONDS, until - time.monotonic())))
            raise

    def _request(self, program: Program, until: float) -> Outcome:
        """Run a program with a single request. Raises `SandboxError` if the service fails or exceeds the time."""
        limits = program.limits
        mark = secrets.token_hex(16)
        body = {
            "code": remote_code(program, mark),
            "language": "python",
            "stdin": program.stdin,
            "run_timeout": limits.wall_seconds,
            "memory_limit_MB": limits.memory_bytes // MIB,
        }
        # JSON may escape a character to six bytes, twice. A longer response is more output than the limit allows.
        most = 12 * limits.output_bytes + MIB
        is_tls = self._address.scheme == "https"
        kind = http.client.HTTPSConnection if is_tls else http.client.HTTPConnection
        seconds_left = min(until - time.monotonic(), limits.wall_seconds + _ALLOWANCE_SECONDS)
        connection = kind(self._address.hostname, self._address.port, timeout=max(0.01, seconds_left))
        try:
            with contextlib.closing(connection):
                path = self._address.path.rstrip("/") + "/run_code"
                connection.request("POST", path, json.dumps(body).encode(), {"Content-Type": "application/json"})
                response = connection.getresponse()
                received = response.read(most + 1)
            if response.status != 200:
                raise SandboxError(f"status {response.status}, {received[:300].decode(errors='replace')}")
            if len(received) > most:
                return Outcome("output_limit", error=f"more than {limits.output_bytes} bytes of output")
            return outcome_of(program, json.loads(received), mark)
        except (OSError, http.client.HTTPException, ValueError, TypeError, RecursionError, SandboxError) as error:
            reason = printable(f"{type(error).__name__}: {error}")
            raise SandboxError(f"The remote sandbox {self.url} failed: {reason}") from None


def parse_address(url: str) -> urllib.parse.SplitResult:
    """Parse the address of a service.

    Raises:
        ValueError: not `http://host` or `https://host`, an invalid port, credentials, or a query. The message does not
            quote the address, which could contain a password.
    """
    form = 'The address of a remote sandbox has the form "http://host:8080/path", without user, password and query.'
    try:
        parts = urllib.parse.urlsplit(url)
        is_valid = parts.port != 0 and parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        raise ValueError(form) from None
    if not is_valid or "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError(form)
    return parts


def remote_code(program: Program, mark: str) -> str:
    """Code for the service: the driver's functions, a `main` that reports on standard error, and its call."""
    driver = files(__package__).joinpath("driver.py").read_text(encoding="utf-8")
    functions = driver.partition("\ndef main():")[0]
    call = (program.prelude, program.source, program.fn_name, program.arguments or "[]")
    arguments = (mark, math.ceil(program.limits.cpu_seconds), *call)
    return f"{functions}\n{_MAIN}\n\nmain{arguments!r}\n"


def outcome_of(program: Program, answer: Any, mark: str) -> Outcome:
    """Outcome from a service's response; raises `SandboxError` if the service failed or its form is unknown."""
    try:
        run = answer["run_result"]
        seconds = float(run.get("execution_time") or 0.0)
        is_known = run["status"] in ("Finished", "TimeLimitExceeded") and 0.0 <= seconds < math.inf
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        is_known = False
    if not is_known:
        raise SandboxError(f"unknown response {json.dumps(answer)[:500]}")
    limits = program.limits
    printed = str(run.get("stdout") or "").encode("utf-8", "replace")
    stderr, _, report = str(run.get("stderr") or "").partition("\n" + mark)
    ended = Outcome("ok", printed[: limits.longest_answer].decode("utf-8", "ignore"), seconds=seconds)
    if run["status"] == "TimeLimitExceeded":
        return running.failure(ended, "timeout", f"more than {limits.wall_seconds:g} seconds")
    most_printed = limits.longest_answer if program.fn_name is None else limits.output_bytes
    for size, most in ((len(printed), most_printed), (len(report) - running.ERROR_CHARACTERS, limits.longest_answer)):
        if size > most:
            return running.failure(ended, "output_limit", f"more than {most} bytes of output")
    ended = replace(ended, exit_code=run.get("return_code"))
    return running.ended_outcome(
        program, ended, seconds, (report[:1], report[1:]), stderr[-running.ERROR_CHARACTERS // 2 :]
    )
