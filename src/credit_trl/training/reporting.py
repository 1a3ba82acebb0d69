"""What a run leaves: `run.json`, `log.jsonl`, a console line a log, seconds of its stages, its completions."""

from __future__ import annotations

import json
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from transformers.trainer_callback import CallbackHandler

from credit_trl.contexts.tokens import TokenContexts
from credit_trl.rollout.batch import GenerationBatch, loss_mask
from credit_trl.teacher.sharding import full_shape
from credit_trl.training import run_directory as files
from credit_trl.training.drift import DriftAlarms
from credit_trl.training.resuming import stored_options
from credit_trl.training.run_data import store_rows

logger = logging.getLogger(__name__)


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


class RunLog(TrainerCallback):
    """Writes `run.json` and `log.jsonl` into the output directory, for any `report_to`.

    Every `CreditTrainer` has one, `trainer.run_log`. A resumed run first removes the lines after the step of its
    checkpoint and sets later checkpoints aside; a run that starts from the beginning first sets aside an earlier one.
    `segments` in `run.json` has an entry for each step from which the run went on with other options of the objective.
    `facts` are further fields of `run.json`, such as the task; `rows` are data sets for `store_rows`. Alarms and clock
    go on from what the run has logged.
    """

    def __init__(self, drift: DriftAlarms, clock: StageClock) -> None:
        self.drift = drift
        self.clock = clock
        self.facts: dict[str, Any] = {}
        self.rows: dict[str, Any] = {}
        self._unwritten: list[dict[str, Any]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.drift.restore(state.log_history)
        self.clock.start(state.global_step)
        if state.global_step >= state.max_steps:
            self.drift.alarms.raise_once(
                "nothing_to_do",
                f"The checkpoint is of step {state.global_step}, and this run ends after step {state.max_steps}, so "
                "there is nothing to do. Raise `max_steps` or `num_train_epochs`.",
            )
        if not state.is_world_process_zero:
            return
        folder = Path(args.output_dir)
        model = kwargs["model"]
        name = getattr(model, "name_or_path", "")
        files.set_aside(folder, state.global_step, name)
        path = folder / files.RUN_FILE
        store_rows(folder, self.facts["data"], self.rows)
        options = stored_options(args, model)
        segments = files.read_json(path).get("segments", []) if path.is_file() else []
        if not segments or segments[-1]["options"] != options:
            segments.append({"step": state.global_step, "options": options})
        run = {
            "config": args.to_dict(),
            "seed": args.seed,
            "model": name or type(model).__name__,
            "parameters": sum(full_shape(p).numel() for p in model.parameters()),
            "segments": segments,
            **self.facts,
        }
        files.write_json(path, json.loads(json.dumps(run, default=str)))
        files.keep_up_to(folder / files.LOG_FILE, state.global_step)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        if not state.is_world_process_zero or not logs:
            return
        path = Path(args.output_dir) / files.LOG_FILE
        self._unwritten.append({"step": state.global_step, **logs})
        try:
            files.append_lines(path, *self._unwritten)
            self._unwritten.clear()
        except OSError as error:
            logger.warning(
                f"{path} could not be written ({error}). {len(self._unwritten)} logs wait for the next try."
            )


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


def add_run_callbacks(trainer: Any) -> None:
    """Add the callbacks that installed packages give to every run: of this one, token maps and the report."""
    for entry in entry_points(group="credit_trl.callbacks"):
        for callback in entry.load()(trainer):
            trainer.add_callback(callback)


def add_completion_columns(
    table: dict[str, Any],
    output: Mapping[str, Tensor],
    batch: GenerationBatch,
    contexts: Sequence[TokenContexts] | None,
    decode: Callable[[list[list[int]]], list[str]],
) -> None:
    """Add feedback, teacher prompt and the mean of S_t to TRL's table of completions.

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
