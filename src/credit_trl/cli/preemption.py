"""A run that a scheduler ends saves a checkpoint after the current step and exits with a code for requeuing."""

import logging
import signal
import sys
from typing import Any

from accelerate.utils import gather_object
from transformers import TrainerCallback

logger = logging.getLogger(__name__)

# Exit code of a run that a SIGTERM ended with a checkpoint: EX_TEMPFAIL of sysexits.h.
REQUEUE = 75


class SaveOnSigterm(TrainerCallback):
    """On SIGTERM, finishes the step of a run, saves a checkpoint and ends the process with exit code `REQUEUE`.

    The same command continues from the checkpoint bit for bit. With several processes one signal to any of them ends
    the run. transformers' `enable_jit_checkpoint` saves inside a step, and each process at its own. A failure ends the
    run, which would ignore the signal.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._received = False
        self._ends = False
        self._before = signal.signal(signal.SIGTERM, self._receive)

    def _receive(self, number: int, frame: Any) -> None:
        self._received = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._ends = any(gather_object([self._received]))
        if self._ends:
            control.should_save = control.should_training_stop = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._ends:
            logger.warning(
                f"SIGTERM: ends with code {REQUEUE}. `resume_from_checkpoint='latest'` continues from "
                f"checkpoint-{state.global_step} in {args.output_dir}."
            )
            sys.exit(REQUEUE)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        signal.signal(signal.SIGTERM, self._before)
