"""Verifiers that fail: they hang, raise, or answer too late, and the run goes on or ends as configured.

One call of a reward function grades all rollouts of a process, so that is what is skipped: those rollouts have no
reward, their tokens are in no loss, and they are nobody's demonstration. Losses that divide by tokens count none of
theirs; `grpo`, `sapo`, `dr_grpo` and `luspo` divide by rollouts, and count them.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from credit_trl.sandbox.batch import given_up_after

logger = logging.getLogger(__name__)


class VerifierTimeout(TimeoutError):
    """A reward function has not returned within `verifier_timeout`."""


@dataclass(frozen=True)
class VerifierPolicy:
    """What is done about a reward function that fails.

    Args:
        on_error: `"raise"` or `"skip"`.
        timeout: seconds for one call, None for no limit.
    """

    on_error: Literal["raise", "skip"] = "raise"
    timeout: float | None = None

    def call(self, name: str, reward_func: Callable[..., Any], arguments: dict[str, Any]) -> Any | None:
        """What the function returns; None where it failed and that is to be skipped.

        Raises:
            VerifierTimeout: it took too long, with `on_error="raise"`. What else it raises passes through.
        """
        try:
            if self.timeout is None:
                return reward_func(**arguments)
            return _within(self.timeout, name, reward_func, arguments)
        except Exception as error:
            return self._failed(name, error)

    async def call_async(self, name: str, reward_func: Callable[..., Any], arguments: dict[str, Any]) -> Any | None:
        """The same of a coroutine function, which has to give way while it waits."""
        try:
            with given_up_after(self.timeout):
                call = asyncio.ensure_future(reward_func(**arguments))
            try:
                await asyncio.wait({call}, timeout=self.timeout)
                if call.done():  # not `wait_for`: a function may raise a TimeoutError of its own
                    return call.result()
            finally:
                call.cancel()
            raise _too_late(name, self.timeout)
        except Exception as error:
            return self._failed(name, error)

    def _failed(self, name: str, error: Exception) -> None:
        if self.on_error == "raise":
            raise error
        logger.warning(f"{name} failed ({type(error).__name__}: {error}); the rollouts it was given are left out.")


def _within(seconds: float, name: str, reward_func: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Call a function in a thread that is abandoned when the time is over: its late words reach nobody."""
    import torch  # not above: verdicts are made where torch is not loaded, too

    is_late = threading.Event()
    outcome: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()

    def until_late(log: Callable[..., None]) -> Callable[..., None]:
        return lambda *words: None if is_late.is_set() else log(*words)

    arguments = arguments | {
        key: until_late(arguments[key]) for key in ("log_extra", "log_metric") if key in arguments
    }

    device = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None

    def run() -> None:
        try:
            if device is not None:  # torch keeps the current one for each thread
                torch.accelerator.set_device_index(device)
            with given_up_after(seconds):
                outcome.put((True, reward_func(**arguments)))
        except BaseException as error:
            outcome.put((False, error))

    threading.Thread(target=run, name=f"verifier {name}", daemon=True).start()
    try:
        has_returned, value = outcome.get(timeout=seconds)
    except queue.Empty:
        is_late.set()
        raise _too_late(name, seconds) from None
    if not has_returned:
        raise value
    return value


def _too_late(name: str, seconds: float | None) -> VerifierTimeout:
    return VerifierTimeout(
        f"The reward function {name!r} has not returned within {seconds:g} s. Raise `verifier_timeout`, make it "
        "faster, or go on without the rollouts it was given: `on_verifier_error='skip'`."
    )
