"""`ReportCallback`: the report of a run while it trains, and what dashboards show first."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from trl.trainer.utils import strip_images_from_messages

from credit_trl.lab.report.dashboards import send_credit, send_rollouts
from credit_trl.lab.report.runs import COMPLETIONS
from credit_trl.lab.report.write import REPORT_FILE, write_report

logger = logging.getLogger(__name__)

# Steps of a run of which rollouts are saved, evenly spaced, beside the last.
_ROLLOUT_STEPS = 50


def report_link(folder: str | Path) -> str:
    """Link to the report of a run, which terminals and notebooks open."""
    return (Path(folder) / REPORT_FILE).resolve().as_uri()


class ReportCallback(TrainerCallback):
    """Write `report.html` in the output directory after each log, and print a link to it when training ends.

    With a trainer it also saves rollouts of at most 51 steps, as TRL's table of completions does with
    `log_completions`, and sends S_t, ΔV_t, R_t and fidelity as one group to trackio, W&B and TensorBoard, and the
    rollouts to trackio's traces.

    Add it after other callbacks, `trainer.add_callback(ReportCallback(trainer))`, so that the last report has the last
    evaluation and the link is the last line. A report that cannot be written gives one warning and does not end the
    run.

    Args:
        trainer: a `CreditTrainer`; None for curves, evaluations and token maps only.
        seconds: least time between two reports during training.
        rollouts: number of rollouts of a step.
    """

    def __init__(self, trainer: Any = None, *, seconds: float = 10.0, rollouts: int = 8) -> None:
        self.trainer = trainer
        self.seconds = seconds
        self.rollouts = rollouts
        self._last = -float("inf")
        self._next_step = 0
        self._has_warned = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._next_step = 0

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        if self.trainer is not None and "reward" in (logs or {}):
            send_credit(self.trainer, logs)
            if state.global_step >= min(self._next_step, state.max_steps):
                self._next_step = state.global_step + max(1, state.max_steps // _ROLLOUT_STEPS)
                self._save_rollouts(Path(args.output_dir), state.global_step)
        if time.monotonic() - self._last >= self.seconds:
            self._write(args.output_dir)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero and self._write(args.output_dir):
            print(f"Report: {report_link(args.output_dir)}", flush=True)

    def _save_rollouts(self, folder: Path, step: int) -> None:
        """Write the first rollouts of the last generation batch, where TRL does not write all of them."""
        from pandas import DataFrame

        logs = self.trainer._logs
        columns = {"prompt": logs["prompt"], "completion": logs["completion"], **logs["rewards"], **logs["extra"]}
        columns["advantage"] = logs["advantages"]
        frame = DataFrame({name: list(values)[: self.rollouts] for name, values in columns.items()})
        frame.insert(0, "step", step)
        for name in ("prompt", "completion"):
            frame[name] = frame[name].map(strip_images_from_messages)
        if not self.trainer.log_completions:
            path = folder / COMPLETIONS / f"completions_{step:05d}.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            frame.to_parquet(path)
        send_rollouts(self.trainer, frame.to_dict("records"))

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
