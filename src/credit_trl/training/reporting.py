"""What a run leaves for its reader: one console line a log, seconds of its stages, the table of completions."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from accelerate.utils import gather_object
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from transformers.trainer_callback import CallbackHandler

from credit_trl.contexts.tokens import TokenContexts
from credit_trl.rollout.batch import GenerationBatch, loss_mask
from credit_trl.training.drift import DriftAlarms

# Column of the console line -> names in the log, the first that is there; GRPO logs `kl` with a reference model.
FIELDS = {
    "reward": ("reward",),
    "length": ("completions/mean_length",),
    "s": ("credit/s_mean",),
    "ΔV": ("credit/delta_v_mean",),
    "generic": ("credit/generic_mean",),
    "kl": ("credit/kl_to_target", "kl"),
}
_SECONDS = "credit/seconds_"


def log_line(logs: Mapping[str, Any], step: int, last_step: int, seconds_left: float = math.nan) -> str:
    """One line for a training or evaluation log: step, the columns of `FIELDS`, seconds by stage and the time left.

    A log without any of these columns, such as that of avg@k, is shown with all its numbers.

    Args:
        logs: what the trainer logs. Names of an evaluation begin with `eval_`.
        seconds_left: estimate for the rest of the run; NaN where there is none.
    """
    is_eval = any(name.startswith("eval_") for name in logs)
    values = {name.removeprefix("eval_"): value for name, value in logs.items() if isinstance(value, int | float)}
    parts = [f"{'eval at ' if is_eval else ''}step {step:{len(str(last_step))}}/{last_step}"]
    for column, names in FIELDS.items():
        found = [values[name] for name in names if name in values]
        if found:
            parts.append(f"{column} {found[0]:{'6.1f' if column == 'length' else '7.3f'}}")
    if len(parts) == 1:
        parts += [f"{name} {value:.4g}" for name, value in values.items() if name not in ("epoch", "total_flos")]
    stages = {name.removeprefix(_SECONDS): value for name, value in values.items() if name.startswith(_SECONDS)}
    if stages:
        parts.append("seconds " + " ".join(f"{name} {seconds:.1f}" for name, seconds in stages.items()))
    if not math.isnan(seconds_left):
        parts.append(f"left {timedelta(seconds=round(seconds_left))}")
    return "  ".join(parts)


def text_block(parts: Mapping[str, Any]) -> str:
    """Titled texts or messages for the console, with control characters written as `⟨U+001B⟩`."""
    lines = []
    for title, text in parts.items():
        if isinstance(text, list):
            text = "\n".join(f"{one.get('role')}: {one.get('content')}" for one in text)
        lines += [f"--- {title}", escape_controls(str(text))]
    return "\n".join(lines)


def escape_controls(text: str) -> str:
    """The text with control and formatting characters, except ends of lines, written as `⟨U+001B⟩`."""
    return "".join(one if one.isprintable() or one == "\n" else f"⟨U+{ord(one):04X}⟩" for one in text)


def print_completions(logs: Mapping[str, Any], step: int, count: int | None) -> None:
    """Print the first `count` rollouts (None: one) of TRL's table of completions, each as a block of titled texts.

    TRL's own table has a column for each of these texts, and so four letters a row on a console of 80.
    """
    columns = {"prompt": logs["prompt"], "completion": logs["completion"], **logs["rewards"]}
    columns |= {"advantage": logs["advantages"], **logs["extra"]}
    for sample in range(min(1 if count is None else count, len(logs["prompt"]))):
        row = {name: values[sample] for name, values in columns.items()}
        numbers = {name: value for name, value in row.items() if isinstance(value, int | float)}
        title = "  ".join([f"step {step}", *(f"{name} {value:.3g}" for name, value in numbers.items())])
        tqdm.write(f"--- {title}\n{text_block({name: row[name] for name in row if name not in numbers})}\n---")


class LogLines(TrainerCallback):
    """Prints one line a log, above a progress bar if there is one."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._started = time.monotonic()
        self._first_step = state.global_step

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or not logs:
            return
        left = math.nan
        done = state.global_step - getattr(self, "_first_step", state.global_step)
        if "loss" in logs and done > 0:
            left = (state.max_steps - state.global_step) * (time.monotonic() - self._started) / done
        tqdm.write(log_line(logs, state.global_step, state.max_steps, left))


class _SilentProgress(ProgressCallback):
    """transformers' progress bar, which prints no logs."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        pass


def print_lines(handler: CallbackHandler) -> None:
    """Replace transformers' callbacks that print dictionaries. The progress table of notebooks stays."""
    replaced = {PrinterCallback: LogLines, ProgressCallback: _SilentProgress}
    has_bar = any(type(one) is ProgressCallback for one in handler.callbacks)
    handler.callbacks = [replaced[type(one)]() if type(one) in replaced else one for one in handler.callbacks]
    if has_bar:
        handler.add_callback(LogLines)


class StageClock:
    """Accumulates wall-clock seconds by stage. The time of a stage inside another counts for the inner one only.

    A stage is timed if `counts` returns True when it ends.
    """

    def __init__(self, counts: Callable[[], bool] = lambda: True) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._counts = counts
        self._step = 0

    def start(self, step: int) -> None:
        """Count steps from this one, at which a run begins or resumes."""
        self._step = step

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the duration of the block to a stage."""
        before, started = sum(self.seconds.values()), time.perf_counter()
        try:
            yield
        finally:
            if self._counts():
                inside = sum(self.seconds.values()) - before
                self.seconds[name] += time.perf_counter() - started - inside

    def report(self, step: int) -> dict[str, float]:
        """Return `credit/seconds_<stage>`, means per optimizer step since the last report, and reset the clock."""
        steps = max(step - self._step, 1)
        means = {f"credit/seconds_{name}": seconds / steps for name, seconds in self.seconds.items()}
        self.seconds.clear()
        self._step = step
        return means


class ContinueReports(TrainerCallback):
    """Lets alarms and clock of a resumed run go on from what it has logged."""

    def __init__(self, drift: DriftAlarms, clock: StageClock) -> None:
        self.drift = drift
        self.clock = clock

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.drift.restore(state.log_history)
        self.clock.start(state.global_step)


def add_completion_columns(
    table: dict[str, Any],
    output: Mapping[str, Tensor],
    batch: GenerationBatch,
    contexts: Sequence[TokenContexts] | None,
    decode: Callable[[list[list[int]]], list[str]],
) -> None:
    """Add feedback, teacher prompt and the mean of S_t to TRL's table of completions (`log_completions`).

    S_t is 0 for samples without a contrast. Every process must call it.

    Args:
        table: the trainer's `_logs["extra"]`: deques by column.
        output: tensors (B, T) of the generation batch with the stored scores.
        contexts: contexts of the local samples; None without a distillation loss.
        decode: token ids to texts with their special tokens.
    """
    columns: dict[str, list[Any]] = {"feedback": batch.feedback}
    if contexts is not None:
        mask = loss_mask(output) & output["contrast_mask"][:, None]
        specific = (output["teacher_token_logps"] - output["generic_token_logps"]) * mask
        columns["teacher_prompt"] = decode([one.teacher or [] for one in contexts])
        columns["s_mean"] = (specific.sum(dim=1) / mask.sum(dim=1).clamp(min=1)).tolist()
    for name, values in columns.items():
        table[name].extend(gather_object(values))
