"""Calls of functions that a user writes: copies of their arguments, the state of the process, and their errors.

A reward function, contrast source, token weight or task may edit what it gets, and may change what the process shares,
such as random generators. Neither changes the run.
"""

import json
import os
import posix
import random
import signal
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from copy import copy, deepcopy
from dataclasses import is_dataclass
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from types import TracebackType
from typing import Any

PACKAGE_FOLDER = Path(__file__).parents[1]
_INSTALLED = (PACKAGE_FOLDER, *(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")))
_MAX_TEXT = 500  # characters of an error's text in its sentence
_TIMERS = (signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF)


def copied(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a call with copies of the data that the function may edit: lists, and the trainer's state.

    One object in several places stays one. Of a list whose elements cannot be copied, the list alone is. Other
    objects, such as a sandbox, are shared.
    """
    memo: dict[int, Any] = {}
    copies = dict(arguments)
    for name, value in arguments.items():
        if name == "environments" or not (isinstance(value, list) or is_dataclass(value)):
            continue
        try:
            copies[name] = deepcopy(value, memo)
        except Exception:  # of any type of element
            copies[name] = copy(value)
    return copies


# Settings of the process, with the functions that read and set them.
_SETTINGS = {
    "the working directory": "os.getcwd os.chdir",
    "torch's default dtype": "torch.get_default_dtype torch.set_default_dtype",
    "torch's default device": "torch.get_default_device torch.set_default_device",
    "the number of torch's threads": "torch.get_num_threads torch.set_num_threads",
    "whether torch records gradients": "torch.is_grad_enabled torch.set_grad_enabled",
    "whether torch is deterministic": (
        "torch.are_deterministic_algorithms_enabled torch.use_deterministic_algorithms"
    ),
    "the precision of matrix products": "torch.get_float32_matmul_precision torch.set_float32_matmul_precision",
}


def _shared_settings() -> dict[str, Sequence[Callable[..., Any]]]:
    """The functions of `_SETTINGS`, imported late: the command line reads this module for every error."""
    import numpy as np

    settings = {name: list(map(resolve_name, functions.split())) for name, functions in _SETTINGS.items()}
    settings["numpy's floating-point errors"] = [np.geterr, lambda values: np.seterr(**values)]
    settings["`json.dumps`"] = [lambda: json.dumps, partial(setattr, json, "dumps")]
    return settings


@contextmanager
def undisturbed(key: Sequence[int], warn: Callable[[str], Any]) -> Iterator[None]:
    """Run user functions that change neither the random generators nor the settings of the process.

    In the block the generators of Python, numpy and torch have streams of their own, so that what a function draws
    does not depend on the training, nor the training on it. `key` seeds them. `warn` is called with the settings that
    the block has changed, which are restored. `os._exit` raises `SystemExit`.

    Raises:
        ValueError: a function has installed the handler of a timer outside the main thread, where it has no effect.
    """
    settings = _shared_settings()
    values = {}
    for name, (get_value, _) in settings.items():
        with suppress(Exception):  # a working directory that was removed, a precision that torch cannot tell
            values[name] = get_value()
    refused: list[str] = []
    with ExitStack() as restored:
        restored.enter_context(_own_generators(key))
        restored.enter_context(_signal_handlers())
        restored.enter_context(exit_raises())
        restored.callback(setattr, signal, "signal", signal.signal)
        signal.signal = _timers_of_main_thread(signal.signal, refused)
        try:
            yield
        finally:
            changed = [name for name in values if _differs(settings[name][0], values[name])]
            for name in changed:
                settings[name][1](values[name])
            if changed:
                warn(f"A function of yours changed {', '.join(changed)}, which is restored. Let it restore them.")
            if refused:
                raise ValueError(
                    f"A time-out inside the function of the thread {refused[0]!r} sets a signal, as math_verify's "
                    "does, which only works in the main thread. `verifier_timeout` calls functions in threads: wrap "
                    "the function in `credit_trl.in_process`, or remove `verifier_timeout`."
                )


def _differs(get_value: Callable[[], Any], value: Any) -> bool:
    with suppress(Exception):
        return get_value() != value
    return True


@contextmanager
def _own_generators(key: Sequence[int]) -> Iterator[None]:
    """Random generators of Python, numpy and torch that are seeded by the key in the block, and restored after it."""
    import numpy as np
    import torch

    seed = int(np.random.SeedSequence(key).generate_state(1)[0])
    of_python = random.getstate()
    of_numpy = np.random.get_state()
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices, device_type="cuda"):
        random.seed(seed)
        np.random.seed(seed)
        torch.default_generator.manual_seed(seed)
        if devices:
            torch.cuda.manual_seed_all(seed)
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)


@contextmanager
def _signal_handlers() -> Iterator[None]:
    """Restore handlers of signals after the block, and stop an alarm that it has set. Only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    install = signal.signal
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    has_alarm = signal.getitimer(signal.ITIMER_REAL)[0] > 0.0
    try:
        yield
    finally:
        if not has_alarm:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        for number, handler in handlers.items():
            if handler is not None and signal.getsignal(number) != handler:
                install(number, handler)


@contextmanager
def exit_raises() -> Iterator[None]:
    """`os._exit` ends children of this process in the block, and raises in it, whose run is not finished.

    That holds for a module that is imported in the block, too. A function that was imported earlier, or is called
    through ctypes, ends the process; the launcher of `trl credit` reports that.
    """
    process = os.getpid()
    exit_now = os._exit

    def exit_of_children(status: int) -> None:
        if os.getpid() != process:
            exit_now(status)
        raise SystemExit(status)

    try:
        os._exit = posix._exit = exit_of_children
        yield
    finally:
        os._exit = posix._exit = exit_now


def _timers_of_main_thread(install: Callable[..., Any], refused: list[str]) -> Callable[..., Any]:
    """`signal.signal` that adds the name of another thread to `refused` where it would install a timer's handler."""

    def install_handler(number: int, handler: Any) -> Any:
        thread = threading.current_thread()
        if number in _TIMERS and thread is not threading.main_thread():
            refused.append(thread.name)
        return install(number, handler)

    return install_handler


def user_line(trace: TracebackType | None) -> str | None:
    """`my_verifier.py, line 12`: the innermost frame in a file that is not installed; None without any."""
    for frame in reversed(traceback.extract_tb(trace)):
        path = Path(frame.filename)
        is_installed = "site-packages" in path.parts or any(path.is_relative_to(folder) for folder in _INSTALLED)
        if path.is_file() and not is_installed and path.name not in ("trl", "credit-trl"):  # the scripts in bin/
            return f"{path.name}, line {frame.lineno}"
    return None


def is_raised_by(error: BaseException, folders: Sequence[Path]) -> bool:
    """Whether a `raise` statement in a file below the folders has raised an error."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or not (frames[-1].line or "").startswith("raise "):
        return False
    return any(Path(frames[-1].filename).is_relative_to(folder) for folder in folders)


def explained(error: Exception, subject: str, advice: str, kind: type[Exception] | None = None) -> Exception:
    """An error of a user's function whose text is one line: subject, place, cause and advice. `kind` is another type.

    An error that this package raised is returned unchanged: its text is such a line. Others have `is_explained`.
    """
    if is_raised_by(error, [PACKAGE_FOLDER]) or getattr(error, "is_explained", False):
        return error
    line = user_line(error.__traceback__)
    place = "" if line is None or isinstance(error, SyntaxError) else f" ({line})"  # whose text has it
    cause = ": ".join(filter(None, [type(error).__name__, " ".join(str(error).split())[:_MAX_TEXT].rstrip(".")]))
    text = f"{subject} failed{place} with {cause}. {advice}"
    kind = kind or type(error)
    fields = {"__str__": lambda self: text, "is_explained": True, "__module__": kind.__module__}
    try:
        same = type(kind.__name__, (kind,), fields)
        changed = same.__new__(same, *error.args)
        vars(changed).update(vars(error))
    except Exception:  # a type with a constructor of its own
        changed = type(kind.__name__, (RuntimeError,), fields)()
    return changed.with_traceback(error.__traceback__)


@contextmanager
def exit_is_an_error(subject: str) -> Iterator[None]:
    """Raise a `RuntimeError` where the block would end the program, as `exit()` in code of a model does."""
    try:
        yield
    except SystemExit as error:
        raise RuntimeError(
            f"{subject} called `sys.exit({error.code!r})` or `os._exit`. Raise an exception, and run code of the "
            "model in a sandbox (`credit_trl.sandbox.open_sandbox`)."
        ) from error


@contextmanager
def explained_errors(subject: str, advice: str) -> Iterator[None]:
    """Raise the errors of the block as `explained`, and its end of the program as an error."""
    try:
        with exit_is_an_error(subject):
            yield
    except Exception as error:
        raise explained(error, subject, advice) from None


def explained_verifier(error: Exception, name: str, completion: Any) -> Exception:
    """`explained` for a reward function, with advice where it may have read a completion of the other form."""
    advice = "Correct it, or skip such rollouts with `on_verifier_error='skip'`."
    kind = None
    if isinstance(completion, list) and _reads(error, ("list", "dict")):
        kind = TypeError
        advice = (
            "If it read a completion, take the text of completion[-1]['content']: in a conversation a completion is "
            "a list of messages."
        )
    if isinstance(completion, str) and _reads(error, ("string indices", "'str' object")):
        kind = TypeError
        advice = "Read the completion as text: for a prompt that is text it is no list of messages."
    return explained(error, f"The reward function {name!r}", advice, kind)


def _reads(error: Exception, texts: Sequence[str]) -> bool:
    """Whether an error may come from a value of another type, which Python names by one of the texts."""
    if isinstance(error, KeyError):
        return isinstance(next(iter(error.args), None), int | slice)  # a message is indexed like text
    return isinstance(error, AttributeError | TypeError) and any(text in str(error) for text in texts)
