"""Handling of SIGTERM in one process; `tests/faults` sends it to whole runs."""

import os
import signal
from types import SimpleNamespace

import pytest

from credit_trl.cli.preemption import REQUEUE, SaveOnSigterm


def test_signal_ends_a_run_after_its_step_and_only_while_it_trains():
    handler = signal.getsignal(signal.SIGTERM)
    save, control = SaveOnSigterm(), SimpleNamespace(should_save=False)
    events = SimpleNamespace(output_dir="run"), SimpleNamespace(global_step=3), control
    try:
        save.on_train_begin(*events)
        os.kill(os.getpid(), signal.SIGTERM)
        save.on_step_end(*events)
        assert control.should_save
        with pytest.raises(SystemExit, match=str(REQUEUE)):
            save.on_save(*events)
        save.on_train_end(*events)
        assert signal.getsignal(signal.SIGTERM) is handler
        save.on_train_begin(*events)  # of another run in the process
        control.should_save = False
        save.on_step_end(*events)
        assert not control.should_save
    finally:
        signal.signal(signal.SIGTERM, handler)
