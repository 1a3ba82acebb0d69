"""What a run's logs show: one line a log on the console, and in dashboards the credit before all other curves.

transformers prefixes every metric with `train/` or `eval/`, so the credit stands among dozens of others in trackio,
W&B and TensorBoard. The same values are sent once more as a group of their own, which sorts first in all three.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from accelerate.state import AcceleratorState
from tqdm.auto import tqdm
from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from transformers.integrations import TensorBoardCallback
from transformers.trainer_callback import CallbackHandler

from credit_trl.teacher.sharding import wrapping

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

GROUP = "CREDIT"
# Name in the group -> name in the log.
CREDIT = {
    "S_t": "credit/s_mean",
    "ΔV_t": "credit/delta_v_mean",
    "R_t": "credit/advantage_mean",
    "fidelity": "credit/teacher_fidelity",
}
# Role of a message in a trace -> column of the table of completions.
_TURNS = {"user": "prompt", "assistant": "completion", "feedback": "feedback"}


def log_line(logs: Mapping[str, Any], step: int, last_step: int) -> str:
    """One line for a training or evaluation log: step, the `COLUMNS` that it has, and seconds by stage.

    A log without any of these columns, such as that of avg@k, is shown with all its numbers.
    """
    is_eval = any(name.startswith("eval_") for name in logs)
    values = {name.removeprefix("eval_"): value for name, value in logs.items() if isinstance(value, int | float)}
    parts = [f"{column} {values[name]:7.3f}" for name, column in COLUMNS.items() if name in values]
    parts = parts or _number_words(values)
    stages = []
    for name, value in values.items():
        if name.startswith(_SECONDS):
            stages.append(f"{name.removeprefix(_SECONDS)} {value:.1f}")
    if stages:
        parts.append(f"seconds {' '.join(stages)}")
    start = f"{'eval at ' if is_eval else ''}step {step:{len(str(last_step))}}/{last_step}"
    return "  ".join([start, *parts])


def _number_words(values: Mapping[str, float]) -> list[str]:
    """Names and numbers in words: bounds stand in brackets behind their score, and spaces for underscores."""
    parts = []
    for name, value in values.items():
        is_bound = name.endswith(("_low", "_high")) and name.rpartition("_")[0] in values
        if is_bound or name in ("epoch", "total_flos"):
            continue
        text = f"{name.replace('_', ' ')} {value:.4g}"
        low = values.get(f"{name}_low")
        high = values.get(f"{name}_high")
        if low is not None and high is not None:
            text += f" [{low:.4g}, {high:.4g}]"
        parts.append(text)
    return parts


class LogLines(PrinterCallback):
    """Prints one line a log, above a progress bar if there is one, in place of transformers' dictionaries.

    With several processes the first line is how the model is wrapped, as accelerate may ignore a configuration: with
    FSDP2 and `use_cpu` it is DDP.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero and args.world_size > 1:
            tqdm.write(f"{args.world_size} processes on {args.device.type}, {wrapping(AcceleratorState())}")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and logs:
            tqdm.write(log_line(logs, state.global_step, state.max_steps))


class _SilentProgress(ProgressCallback):
    """transformers' progress bar, which prints no logs."""

    on_log = TrainerCallback.on_log


def print_lines(handler: CallbackHandler) -> None:
    """Replace transformers' callbacks that print dictionaries. The progress table of notebooks stays."""
    printed = [handler.pop_callback(kind) for kind in (PrinterCallback, ProgressCallback)]
    if any(printed):
        handler.add_callback(LogLines)
    if printed[1]:
        handler.add_callback(_SilentProgress)


def send_credit(trainer: Any, logs: Mapping[str, Any]) -> None:
    """Send what a log has of S_t, ΔV_t, R_t and fidelity to the dashboards of `report_to`, which are open."""
    values = {f"{GROUP}/{title}": logs[name] for title, name in CREDIT.items() if logs.get(name) is not None}
    step = trainer.state.global_step
    if not values:
        return
    if "trackio" in trainer.args.report_to:
        import trackio

        trackio.log(values | {"train/global_step": step}, step=step)
    if "wandb" in trainer.args.report_to:
        import wandb

        if wandb.run is not None:
            wandb.log(values | {"train/global_step": step})
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, TensorBoardCallback) and callback.tb_writer is not None:
            for name, value in values.items():
                callback.tb_writer.add_scalar(name, value, step)


def send_rollouts(trainer: Any, rollouts: Sequence[Mapping[str, Any]]) -> None:
    """Send rows of TRL's table of completions to trackio's traces: texts as messages, the rest as metadata."""
    if "trackio" not in trainer.args.report_to:
        return
    import trackio

    traces = []
    for row in rollouts:
        metadata = dict(row)
        messages: list[dict[str, Any]] = []
        for role, name in _TURNS.items():
            content = metadata.pop(name, None) or []
            messages += [{"role": role, "content": content}] if isinstance(content, str) else content
        traces.append(trackio.Trace(messages, metadata))
    trackio.log({"rollouts": traces}, step=trainer.state.global_step)
