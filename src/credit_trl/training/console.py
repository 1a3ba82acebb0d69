"""One line per log on the console, in place of the dictionary that transformers prints."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from transformers import PrinterCallback, ProgressCallback
from transformers.trainer_callback import CallbackHandler

# Column -> names in the log, the first that is there; GRPO logs `kl` where it has a reference model.
FIELDS = {
    "reward": ("reward",),
    "length": ("completions/mean_length",),
    "s": ("credit/s_mean",),
    "ΔV": ("credit/delta_v_mean",),
    "generic": ("credit/generic_mean",),
    "kl": ("credit/kl_to_target", "kl"),
}
_SECONDS = "credit/seconds_"
_UNSHOWN = ("epoch", "total_flos")


def log_line(logs: Mapping[str, Any], step: int, last_step: int, seconds_left: float = math.nan) -> str:
    """One line for a training or evaluation log: step, the columns of `FIELDS`, seconds by stage and the time left.

    A log without any of these columns, such as that of avg@k, is shown with all its numbers.

    Args:
        logs: what the trainer logs. Names of an evaluation begin with `eval_`.
        seconds_left: estimate for the rest of the run; NaN where there is none.
    """
    is_eval = any(name.startswith("eval_") for name in logs)
    values = {n.removeprefix("eval_"): v for n, v in logs.items() if isinstance(v, int | float) and n not in _UNSHOWN}
    shown = {
        column: values[name] for column, names in FIELDS.items() for name in [n for n in names if n in values][:1]
    }
    parts = [f"{'eval at ' if is_eval else ''}step {step:{len(str(last_step))}}/{last_step}"]
    if shown:
        parts += [f"{name} {value:{'6.1f' if name == 'length' else '7.3f'}}" for name, value in shown.items()]
    else:
        parts += [f"{name} {value:.4g}" for name, value in values.items()]
    stages = {name.removeprefix(_SECONDS): v for name, v in values.items() if name.startswith(_SECONDS)}
    if shown and stages:
        parts.append("seconds " + " ".join(f"{name} {seconds:.1f}" for name, seconds in stages.items()))
    if not math.isnan(seconds_left):
        parts.append(f"left {duration(seconds_left)}")
    return "  ".join(parts)


def duration(seconds: float) -> str:
    """Seconds as `42s`, `3m20s` or `5h07m`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


class _Lines:
    """Mixin of a callback that prints logs: passes it one line instead of the dictionary."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._started, self._first = time.monotonic(), state.global_step
        super().on_train_begin(args, state, control, **kwargs)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or not logs:
            return
        left, done = math.nan, state.global_step - getattr(self, "_first", state.global_step)
        if "loss" in logs and done > 0:
            left = (state.max_steps - state.global_step) * (time.monotonic() - self._started) / done
        self.write(log_line(logs, state.global_step, state.max_steps, left))


class LinePrinter(_Lines, PrinterCallback):
    """Prints one line per log (`disable_tqdm=True`)."""

    def write(self, line: str) -> None:
        print(line, flush=True)


class LineProgress(_Lines, ProgressCallback):
    """Progress bar with one line per log."""

    def write(self, line: str) -> None:
        self.training_bar.write(line) if self.training_bar is not None else print(line, flush=True)


def print_lines(handler: CallbackHandler) -> None:
    """Replace transformers' callbacks that print dictionaries. The progress table of notebooks stays."""
    lines = {PrinterCallback: LinePrinter, ProgressCallback: LineProgress}
    handler.callbacks = [lines[type(one)]() if type(one) in lines else one for one in handler.callbacks]
