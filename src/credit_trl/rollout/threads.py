"""Calls in a daemon thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


def call_in_thread(name: str, work: Callable[[], T]) -> Future[T]:
    """Run `work` in a daemon thread with the caller's context and current device, and return its future.

    A call that never returns does not keep the process alive. torch stores the current device per thread. The context
    has the deadline of a reward function call.
    """
    import torch  # deferred: `rollout.verdict` is imported without torch

    device = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            if device is not None:
                torch.accelerator.set_device_index(device)
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    Thread(target=copy_context().run, args=(run,), name=name, daemon=True).start()
    return outcome
