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

    step = trainer.state.global_step
    trackio.log({"rollouts": [trackio.Trace(_messages(row), _metadata(row)) for row in rollouts]}, step=step)


def _messages(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    prompt, completion = row["prompt"], row["completion"]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    messages += [{"role": "assistant", "content": completion}] if isinstance(completion, str) else list(completion)
    feedback = row.get("feedback")
    return messages if feedback is None else [*messages, {"role": "feedback", "content": feedback}]


def _metadata(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in ("prompt", "completion", "feedback")}
