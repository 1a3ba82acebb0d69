"""`ReportCallback`: the report of a run while it trains, and what dashboards show first."""

import html
import time
from functools import partial
from pathlib import Path
from typing import Any

from pandas import DataFrame
from transformers import TrainerCallback
from transformers.utils import is_in_notebook

from credit_trl.contexts.prompts import images_of
from credit_trl.lab.analysis.callback import CreditMapCallback
from credit_trl.lab.analysis.responses import data_url
from credit_trl.lab.report.logs import print_lines, send_credit, send_rollouts
from credit_trl.lab.report.runs import COMPLETIONS
from credit_trl.lab.report.write import REPORT_FILE, write_report
from credit_trl.training.optional import OptionalEvents
from credit_trl.trl_compat import prepare_multimodal_messages, strip_images_from_messages

# Steps of a run of which rollouts are saved, evenly spaced, beside the last.
_ROLLOUT_STEPS = 50
# Least time between two reports during training: in seconds, and as a multiple of the time that the last one took.
_SECONDS = 10.0
_REST = 50


def run_callbacks(trainer: Any) -> list[TrainerCallback]:
    """Callbacks that a `CreditTrainer` adds to itself. Its logs are printed one a line."""
    print_lines(trainer.callback_handler)
    maps = [] if trainer.credit_step is None else [CreditMapCallback(trainer)]  # without a teacher there is no credit
    return [*maps, ReportCallback(trainer)]


def defer_link(trainer: Any) -> None:
    """Have the report's callback print no link, for a caller that prints it when all is done."""
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, ReportCallback):
            callback.prints_link = False


def report_link(folder: str | Path) -> str:
    """Link to the report of a run, which terminals and notebooks open."""
    return (Path(folder) / REPORT_FILE).resolve().as_uri()


_SHOWN: set[str] = set()  # cells of a notebook that show a report


def _show_report(folder: str) -> None:
    """Show the report of a run in a notebook, in place of that of an earlier run of the same cell."""
    from IPython import get_ipython
    from IPython.display import display

    page = html.escape((Path(folder) / REPORT_FILE).read_text("utf-8"))
    frame = f'<iframe srcdoc="{page}" style="width: 100%; height: 720px; border: 0"></iframe>'
    cell = f"credit-report-{getattr(get_ipython(), 'execution_count', 0)}"
    display({"text/html": frame}, raw=True, display_id=cell, update=cell in _SHOWN)
    _SHOWN.add(cell)


class ReportCallback(OptionalEvents, TrainerCallback):
    """Write `report.html` in the output directory while a run trains and when it ends, and print a link to it.

    It also saves rollouts of at most 51 steps, as TRL's table of completions does with `log_completions`, and sends
    S_t, ΔV_t, R_t and fidelity as one group to trackio, W&B and TensorBoard, and the rollouts to trackio's traces.

    Every `CreditTrainer` has one, see `run_callbacks`; `trainer.remove_callback(ReportCallback)` removes it. Reports
    take at most 2 % of the time of training; a notebook shows the last one.

    Args:
        trainer: a `CreditTrainer`.
        rollouts: number of rollouts of a step.

    Attributes:
        prints_link: whether it prints the link when training ends; a command that goes on prints its own.
    """

    def __init__(self, trainer: Any, *, rollouts: int = 8) -> None:
        self.prints_link = True
        self.trainer = trainer
        self.rollouts = rollouts
        self._next_report = 0.0
        self._next_step = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._next_report = time.monotonic() + _SECONDS
        self._next_step = 0

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        if "reward" in (logs or {}):
            self.attempt(partial(self._log_step, Path(args.output_dir), state, logs))
        started = time.monotonic()
        if started >= self._next_report and self.trainer.run_log.has_begun:
            self.attempt(partial(write_report, [args.output_dir]))
            ended = time.monotonic()
            self._next_report = ended + max(_SECONDS, _REST * (ended - started))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero and self.attempt(partial(write_report, [args.output_dir])):
            if self.prints_link:
                print(f"Report: {report_link(args.output_dir)}", flush=True)
            if is_in_notebook():
                self.attempt(partial(_show_report, args.output_dir))

    def _log_step(self, folder: Path, state: Any, logs: dict[str, Any]) -> None:
        """Send the credit, and save and send the first rollouts of the last generation batch where they are due."""
        send_credit(self.trainer, logs)
        step = state.global_step
        if not self.trainer._logs["prompt"] or step < min(self._next_step, state.max_steps):
            return
        self._next_step = step + max(1, state.max_steps // _ROLLOUT_STEPS)
        rollout_logs = self.trainer._logs
        columns = {
            "prompt": rollout_logs["prompt"],
            "completion": rollout_logs["completion"],
            **rollout_logs["rewards"],
            **rollout_logs["extra"],
        }
        columns["advantage"] = rollout_logs["advantages"]
        rows = {name: list(values)[: self.rollouts] for name, values in columns.items()}
        frame = DataFrame(rows)
        frame.insert(0, "step", step)
        images = []
        for prompt in frame["prompt"]:
            images.append(list(map(data_url, images_of(prompt))))
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
