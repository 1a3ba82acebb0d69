"""`ReportCallback`: the report of a run while it trains."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from credit_trl.lab.report.write import REPORT_FILE, write_report

logger = logging.getLogger(__name__)


def report_link(folder: str | Path) -> str:
    """Link to the report of a run, which terminals and notebooks open."""
    return (Path(folder) / REPORT_FILE).resolve().as_uri()


class ReportCallback(TrainerCallback):
    """Write `report.html` in the output directory after each log, and print a link to it when training ends.

    Add it after other callbacks, `trainer.add_callback(ReportCallback())`, so that the last report has the last
    evaluation and the link is the last line. A report that cannot be written gives one warning and does not end the
    run.

    Args:
        seconds: least time between two reports during training.
    """

    def __init__(self, seconds: float = 10.0) -> None:
        self.seconds = seconds
        self._last = -float("inf")
        self._has_warned = False

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero and time.monotonic() - self._last >= self.seconds:
            self._write(args.output_dir)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero and self._write(args.output_dir):
            print(f"Report: {report_link(args.output_dir)}", flush=True)

    def _write(self, folder: str) -> bool:
        try:
            write_report([Path(folder)])
        except Exception as error:
            if not self._has_warned:
                logger.warning(f"No report of {folder}: {type(error).__name__}: {error}")
            self._has_warned = True
            return False
        self._last = time.monotonic()
        return True
