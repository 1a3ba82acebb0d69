"""A run that a scheduler ends saves a checkpoint after the current step and exits with a code for requeuing."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import psutil
from accelerate.utils import gather_object
from transformers import TrainerCallback

logger = logging.getLogger(__name__)

# Exit code of a run that a SIGTERM ended with a checkpoint: EX_TEMPFAIL of sysexits.h.
REQUEUE = 75


class Preempted(SystemExit):
    """Raised after the checkpoint or the last step; ends the process with exit code `REQUEUE`."""


class SaveOnSigterm(TrainerCallback):
    """Ends a run after SIGTERM: the current step is finished, a checkpoint is saved, and `Preempted` is raised.

    No step is lost: the same command with `resume_from_checkpoint="latest"` continues bit for bit. With several
    processes one signal to any of them ends the run. Signals are handled while the main thread trains.
    """

    def __init__(self) -> None:
        self._previous = signal.getsignal(signal.SIGTERM)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._received = False
        self._ends = False
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._receive)

    def _receive(self, number: int, frame: Any) -> None:
        self._received = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._ends = any(gather_object([self._received]))
        if self._ends:
            control.should_save = control.should_training_stop = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._ends:
            logger.warning(
                f"SIGTERM: saved checkpoint-{state.global_step} in {args.output_dir} and ends with code {REQUEUE}. "
                "`resume_from_checkpoint='latest'` continues the run."
            )
            raise Preempted(REQUEUE)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._previous)


def requeue_on_sigterm() -> AbstractContextManager[None]:
    """Raise `Preempted` at once on SIGTERM. It surrounds a run, whose steps `SaveOnSigterm` finishes.

    Before them nothing is lost, and the evaluation after them continues from the samples that it has saved.
    """

    def end(number: int, frame: Any) -> None:
        logger.warning(
            f"SIGTERM: ends with code {REQUEUE}. The same command with `--resume_from_checkpoint latest` continues "
            "from the last checkpoint, and an evaluation from its samples."
        )
        raise Preempted(REQUEUE)

    return _on_sigterm(end)


def sigterm_to_children() -> AbstractContextManager[None]:
    """Pass SIGTERM on to the child processes and keep waiting for them, as a launcher."""

    def forward(number: int, frame: Any) -> None:
        for child in psutil.Process().children():
            child.send_signal(number)

    return _on_sigterm(forward)


@contextmanager
def _on_sigterm(handler: Callable[[int, Any], None]) -> Iterator[None]:
    previous = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
