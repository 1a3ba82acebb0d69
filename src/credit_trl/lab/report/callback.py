"""`ReportCallback`: the report of a run while it trains, and what dashboards show first."""

from __future__ import annotations

import html
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pandas import DataFrame
from transformers import TrainerCallback
from transformers.utils import is_in_notebook
from trl.data_utils import prepare_multimodal_messages
from trl.trainer.utils import strip_images_from_messages

from credit_trl.contexts.prompts import images_of
from credit_trl.lab.analysis.responses import data_url
from credit_trl.lab.report.dashboards import send_credit, send_rollouts
from credit_trl.lab.report.runs import COMPLETIONS
from credit_trl.lab.report.write import REPORT_FILE, write_report

logger = logging.getLogger(__name__)

# Steps of a run of which rollouts are saved, evenly spaced, beside the last.
_ROLLOUT_STEPS = 50


def show_report(folder: str | Path) -> None:
    """Show the report of a run in a notebook, in a frame of its own."""
    from IPython.display import display

    page = html.escape((Path(folder) / REPORT_FILE).read_text("utf-8"))
    frame = f'<iframe srcdoc="{page}" style="width: 100%; height: 720px; border: 0"></iframe>'
    display({"text/html": frame}, raw=True)


def report_link(folder: str | Path) -> str:
    """Link to the report of a run, which terminals and notebooks open."""
    return (Path(folder) / REPORT_FILE).resolve().as_uri()


class ReportCallback(TrainerCallback):
    """Write `report.html` in the output directory after each log, and link to it when training ends.

    With a trainer it also saves rollouts of at most 51 steps, as TRL's table of completions does with
    `log_completions`, and sends S_t, ΔV_t, R_t and fidelity as one group to trackio, W&B and TensorBoard, and the
    rollouts to trackio's traces.

    Add it after other callbacks, `trainer.add_callback(ReportCallback(trainer))`, so that the last report has the last
    evaluation and the link is the last line; a notebook shows the report itself. What cannot be written or sent gives
    one warning and does not end the run.

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
            self._attempt(self._log_step, Path(args.output_dir), state, logs)
        if time.monotonic() - self._last >= self.seconds and self._attempt(write_report, [args.output_dir]):
            self._last = time.monotonic()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero and self._attempt(write_report, [args.output_dir]):
            print(f"Report: {report_link(args.output_dir)}", flush=True)
            if is_in_notebook():
                show_report(args.output_dir)

    def _log_step(self, folder: Path, state: Any, logs: dict[str, Any]) -> None:
        """Send the credit, and save and send the first rollouts of the last generation batch where they are due."""
        send_credit(self.trainer, logs)
        step = state.global_step
        if step < min(self._next_step, state.max_steps):
            return
        self._next_step = step + max(1, state.max_steps // _ROLLOUT_STEPS)
        own = self.trainer._logs
        columns = {"prompt": own["prompt"], "completion": own["completion"], **own["rewards"], **own["extra"]}
        columns["advantage"] = own["advantages"]
        frame = DataFrame({name: list(values)[: self.rollouts] for name, values in columns.items()})
        frame.insert(0, "step", step)
        images = [list(map(data_url, images_of(prompt))) for prompt in frame["prompt"]]
        if any(images):
            frame["images"] = images
            frame["prompt"] = frame["prompt"].map(prepare_multimodal_messages)  # a column has contents of one type
        for name in ("prompt", "completion"):
            frame[name] = frame[name].map(strip_images_from_messages)
        if not self.trainer.log_completions:  # else TRL writes all of them
            path = folder / COMPLETIONS / f"completions_{step:05d}.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            frame.to_parquet(path)
        send_rollouts(self.trainer, frame.drop(columns="images", errors="ignore").to_dict("records"))

    def _attempt(self, function: Callable[..., Any], *arguments: Any) -> bool:
        """Call a function, and warn at the first time that one fails."""
        try:
            function(*arguments)
        except Exception as error:
            if not self._has_warned:
                logger.warning(f"The report misses something: {type(error).__name__}: {error}")
            self._has_warned = True
            return False
        return True
