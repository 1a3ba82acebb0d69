"""A run that a scheduler ends saves a checkpoint after the current step and exits with a code for requeuing."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
from accelerate.utils import gather_object
from transformers import TrainerCallback

logger = logging.getLogger(__name__)

# Exit code of a run that a SIGTERM ended with a checkpoint: EX_TEMPFAIL of sysexits.h.
REQUEUE = 75


class SaveOnSigterm(TrainerCallback):
    """Handles SIGTERM from its construction in the main thread on: the process ends with exit code `REQUEUE`.

    While a run trains, the current step is finished and a checkpoint saved, from which the same command continues bit
    for bit; with several processes one signal to any of them ends the run. At other times the process ends at once:
    before the first step nothing is lost, and an evaluation continues from the samples that it has saved.
    """

    def __init__(self) -> None:
        self._trains = False
        self._received = False
        self._ends = False
        signal.signal(signal.SIGTERM, self._receive)

    def _receive(self, number: int, frame: Any) -> None:
        self._received = True
        if not self._trains:
            self._end("the run")

    def _end(self, continued: str) -> None:
        logger.warning(
            f"SIGTERM: ends with code {REQUEUE}. `resume_from_checkpoint='latest'` continues {continued}, and an "
            "evaluation from its samples."
        )
        sys.exit(REQUEUE)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trains = True
        self._received = False
        self._ends = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._ends = any(gather_object([self._received]))
        if self._ends:
            control.should_save = control.should_training_stop = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._ends:
            self._trains = False
            self._end(f"from checkpoint-{state.global_step} in {args.output_dir}")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trains = False


@contextmanager
def sigterm_to_children() -> Iterator[None]:
    """Pass SIGTERM on to the child processes and keep waiting for them, as a launcher."""

    def forward(number: int, frame: Any) -> None:
        for child in psutil.Process().children():
            child.send_signal(number)

    previous = signal.signal(signal.SIGTERM, forward)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
