"""One line a log on the console, in place of transformers' dictionaries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tqdm.auto import tqdm
from transformers import PrinterCallback, ProgressCallback
from transformers.trainer_callback import CallbackHandler

# Names in the log -> columns of the console line.
COLUMNS = {
    "reward": "reward",
    "completions/mean_length": "length",
    "credit/s_mean": "s",
    "credit/delta_v_mean": "ΔV",
    "credit/generic_mean": "generic",
    "credit/kl_to_target": "kl",
    "sampling/importance_sampling_ratio/median": "ratio",
}
_SECONDS = "credit/seconds_"


def log_line(logs: Mapping[str, Any], step: int, last_step: int) -> str:
    """One line for a training or evaluation log: step, the `COLUMNS` that it has, and seconds by stage.

    A log without any of these columns, such as that of avg@k, is shown with all its numbers.
    """
    is_eval = any(name.startswith("eval_") for name in logs)
    values = {name.removeprefix("eval_"): value for name, value in logs.items() if isinstance(value, int | float)}
    parts = [f"{column} {values[name]:7.3f}" for name, column in COLUMNS.items() if name in values]
    parts = parts or [f"{name} {value:.4g}" for name, value in values.items() if name not in ("epoch", "total_flos")]
    stages = [f"{name.removeprefix(_SECONDS)} {x:.1f}" for name, x in values.items() if name.startswith(_SECONDS)]
    if stages:
        parts.append(f"seconds {' '.join(stages)}")
    start = f"{'eval at ' if is_eval else ''}step {step:{len(str(last_step))}}/{last_step}"
    return "  ".join([start, *parts])


class LogLines(PrinterCallback):
    """Prints one line a log, above a progress bar if there is one, in place of transformers' dictionaries."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and logs:
            tqdm.write(log_line(logs, state.global_step, state.max_steps))


class _SilentProgress(ProgressCallback):
    """transformers' progress bar, which prints no logs."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        pass


def print_lines(handler: CallbackHandler) -> None:
    """Replace transformers' callbacks that print dictionaries. The progress table of notebooks stays."""
    printed = [handler.pop_callback(kind) for kind in (PrinterCallback, ProgressCallback)]
    if any(printed):
        handler.add_callback(LogLines)
    if printed[1]:
        handler.add_callback(_SilentProgress)
