"""What trackio, W&B and TensorBoard show of the credit: one group of curves before all others, and rollouts.

transformers prefixes every metric with `train/` or `eval/`, so the credit stands among dozens of others. The same
values are sent once more as a group of their own, which sorts first in all three.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers.integrations import TensorBoardCallback

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


def send_credit(trainer: Any, logs: Mapping[str, Any]) -> None:
    """Send S_t, ΔV_t, R_t and the teacher's fidelity of a training log to the dashboards of a trainer.

    Args:
        trainer: its `report_to` names the dashboards; their callbacks have opened them.
        logs: the log, which may lack some of them.
    """
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
    """Send rollouts to trackio's traces: prompt, completion and feedback as messages, the rest as metadata.

    Args:
        rollouts: rows of TRL's table of completions.
    """
    if "trackio" not in trainer.args.report_to:
        return
    import trackio

    traces = []
    for row in rollouts:
        rest = dict(row)
        turns = [(role, rest.pop(name, None)) for role, name in _TURNS.items()]
        parts = [[{"role": role, "content": own}] if isinstance(own, str) else own or [] for role, own in turns]
        traces.append(trackio.Trace([message for part in parts for message in part], rest))
    trackio.log({"rollouts": traces}, step=trainer.state.global_step)
