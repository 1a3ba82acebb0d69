"""Trusted functions in processes of their own, which end at the deadline whatever the function does.

A thread cannot be ended, and while one of them keeps the interpreter lock, in a regular expression or a long call of
C, no other thread runs. The process imports the function by its name: a worker of `multiprocessing`, or of a pool on
top of it, would import the training script again (spawn), or copy the threads and CUDA context of this process (fork).
"""

import asyncio
import atexit
import faulthandler
import inspect
import os
import pickle
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import update_wrapper
from importlib import import_module
from itertools import islice
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from threading import Lock
from typing import Any

_BOOT = "import sys; sys.path[:] = {!r}; from credit_trl.sandbox.in_process import serve; serve({}, {!r}, {!r})"
_NOT_SENT = {"trainer_state", "environments", "log_extra", "log_metric"}  # objects and functions of the trainer
_GRACE_SECONDS = 1.0


class InProcess:
    """A reward function that runs in a process of its own; one thread at a time calls it.

    The process starts at the first call, which includes the import of the function's module. With all processes that
    the function has started it is killed at the deadline, and another one starts. Arguments, results and errors are
    pickled. The trainer's state, environments and loggers are not passed; return `Verdict.metrics` to log.

    Args:
        function: what is called.
        remaining_seconds: returns the seconds until the caller's deadline, or None without one.
        context: returns a function that gives the process the context of the caller; it is pickled.

    Raises:
        TypeError: another process cannot import the function by its name: it is a lambda, a method, an object, or a
            function of another function or of the script or notebook that trains.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        remaining_seconds: Callable[[], float | None],
        context: Callable[[], Callable[[], None]],
    ) -> None:
        module, name = (getattr(function, attribute, None) for attribute in ("__module__", "__qualname__"))
        if name is None or not name.isidentifier() or module == "__main__":
            raise TypeError(
                f"`in_process` got {function!r}, which another process cannot import by its name. Use a function that "
                "`def` defines at the top level of a module, and not of the script or notebook that trains."
            )
        update_wrapper(self, function)
        self._remaining_seconds = remaining_seconds
        self._context = context
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self, *values: Any, **arguments: Any) -> Any:
        """Call the function.

        Raises:
            TimeoutError: the deadline came first.
            RuntimeError: the process has ended.
            Exception: the function's error, or that of pickling.
        """
        request = (values, {key: value for key, value in arguments.items() if key not in _NOT_SENT})
        seconds = self._remaining_seconds()
        if not self._lock.acquire(timeout=-1 if seconds is None else max(0.0, seconds)):
            raise TimeoutError(f"The process of the reward function {self.__name__!r} is still busy.")
        try:
            is_error, answer = self._ask(request)
        except BaseException as error:  # also an interrupt: the next call must not get the answer to this one
            status = self._end()
            if isinstance(error, TimeoutError):
                self._start()  # imports the module meanwhile
            if isinstance(error, EOFError | ConnectionError):
                raise RuntimeError(
                    f"The process of the reward function {self.__name__!r} has ended with exit status {status}. The "
                    "next call starts another one."
                ) from error
            raise
        finally:
            self._lock.release()
        if is_error:
            raise answer
        return answer

    def _ask(self, request: tuple[Any, ...]) -> tuple[bool, Any]:
        """Send a request to the process and return what `_answer` gives."""
        if self._process is None:
            self._start()
        seconds = self._remaining_seconds()
        self._connection.send((*request, seconds, self._context()))
        if not self._connection.poll(seconds and max(0.0, seconds)):
            raise TimeoutError(f"The process of the reward function {self.__name__!r} has not answered in time.")
        return self._connection.recv()

    def _start(self) -> None:
        self._connection, theirs = Pipe()
        with theirs:
            descriptor = theirs.fileno()
            command = [sys.executable, "-c", _BOOT.format(sys.path, descriptor, self.__module__, self.__name__)]
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[descriptor], start_new_session=True
            )
        atexit.register(self._end)

    def _end(self) -> int | None:
        """Kill the process, if there is one, and those that it has started, and return its exit status."""
        process = self._process
        self._process = None
        if process is None:
            return None
        atexit.unregister(self._end)
        self._connection.close()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the number is not used again before `wait`
        return process.wait()


def serve(descriptor: int, module: str, name: str) -> None:
    """Answer the requests that arrive on a connection until it closes: the main function of the process."""
    connection = Connection(descriptor)
    with ThreadPoolExecutor(1) as reader:
        pending = reader.submit(connection.recv_bytes)  # the sender of a large request does not wait for the import
        with suppress(Exception):
            import_module(module)  # else the answer to a request has the error
    with suppress(EOFError, ConnectionError):
        request = pending.result()
        while True:
            connection.send_bytes(_answer(module, name, request))
            request = connection.recv_bytes()


def _answer(module: str, name: str, request: bytes) -> bytes:
    """The pickled pair (False, result) or (True, error)."""
    try:
        values, arguments, seconds, enter_context = pickle.loads(request)
        if seconds is not None:  # ends this process also if the trainer was killed meanwhile
            faulthandler.dump_traceback_later(max(0.0, seconds) + _GRACE_SECONDS, exit=True)
        enter_context()
        function = getattr(import_module(module), name)
        if isinstance(function, InProcess):  # a decorated one
            function = function.__wrapped__
        output = function(*values, **arguments)
        if inspect.iscoroutine(output):
            output = asyncio.run(output)
        if isinstance(output, Iterable) and not isinstance(output, list | Mapping | Set | str | bytes):
            # It may have no end or no pickle. The caller raises an error for one element too many.
            count = len(arguments["completions"]) + 1 if "completions" in arguments else None
            output = list(islice(output, count))
        return pickle.dumps((False, output))
    except BaseException as error:
        error.add_note(f"In the process of {name!r}:\n{traceback.format_exc()}")
        with suppress(Exception):
            answer = pickle.dumps((True, error))
            if isinstance(pickle.loads(answer)[1], Exception):
                return answer
        return pickle.dumps((True, RuntimeError(f"{type(error).__name__}: {error}")))
    finally:
        faulthandler.cancel_dump_traceback_later()
