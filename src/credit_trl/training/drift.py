"""Alarms for metrics that drift from their first values, and stopping a run on one of them."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from transformers import TrainerCallback

from credit_trl.training.metrics import Alarms

logger = logging.getLogger(__name__)

StopCause = Literal["fidelity", "collapse", "length"]

# Logged values in the window at the start of the run, and in the latest one.
WINDOW = 5
# The latest fidelity or reward below this share of its reference is an alarm.
LOW_SHARE = 0.5
# The latest length or share of truncated completions above this multiple of its first value is an alarm.
HIGH_RATIO = 1.5
# Shares of truncated completions below this one are no drift.
FEW_TRUNCATED = 0.1


@dataclass
class Window:
    """First and latest values of one logged metric.

    Args:
        values: finite values, in order.
    """

    values: list[float] = field(default_factory=list)

    def add(self, value: float) -> bool:
        """Add a value if it is finite; whether first and latest window are now disjoint."""
        if math.isfinite(value):
            self.values.append(value)
        return math.isfinite(value) and len(self.values) >= 2 * WINDOW

    @property
    def first(self) -> float:
        """Mean of the first values."""
        return sum(self.values[:WINDOW]) / WINDOW

    @property
    def latest(self) -> float:
        """Mean of the latest values."""
        return sum(self.values[-WINDOW:]) / WINDOW

    @property
    def best(self) -> float:
        """Highest mean of consecutive values."""
        return max(sum(self.values[i : i + WINDOW]) / WINDOW for i in range(len(self.values) - WINDOW + 1))


class DriftAlarms:
    """Compares logged metrics with their first values. Values are global, so every process finds the same causes.

    Args:
        alarms: raises the warnings.

    Attributes:
        causes: causes that have been found, with their message.
    """

    def __init__(self, alarms: Alarms) -> None:
        self.alarms = alarms
        self.causes: dict[StopCause, str] = {}
        self._windows = {
            name: Window()
            for name in ("credit/teacher_fidelity", "completions/mean_length", "completions/clipped_ratio", "reward")
        }

    def observe(self, metrics: Mapping[str, Sequence[float]]) -> None:
        """Add the means of the metrics that are about to be logged.

        Args:
            metrics: lists of values since the last log, by name.
        """
        ready = {name for name, window in self._windows.items() if window.add(_mean(metrics.get(name, ())))}
        fidelity, length, truncated, reward = self._windows.values()
        if (
            "credit/teacher_fidelity" in ready
            and fidelity.first > 0.0
            and fidelity.latest < LOW_SHARE * fidelity.first
        ):
            self._raise(
                "fidelity",
                f"The teacher's fidelity (`credit/teacher_fidelity`) fell from {fidelity.first:.3f} to "
                f"{fidelity.latest:.3f}: with the feedback the teacher prefers successful over failed completions "
                "less than before. An averaged teacher follows a policy that unlearned to read feedback. Lower "
                "`teacher_update_rate` or the learning rate, or set `teacher_model_kind='base'`.",
            )
        if "completions/mean_length" in ready and length.latest > HIGH_RATIO * length.first:
            self._raise("length", _length_message("mean length of completions", length))
        floor = max(truncated.first, FEW_TRUNCATED) if truncated.values else math.inf
        if "completions/clipped_ratio" in ready and truncated.latest > HIGH_RATIO * floor:
            self._raise("length", _length_message("share of truncated completions", truncated))
        if "reward" in ready and reward.best > 0.0 and reward.latest < LOW_SHARE * reward.best:
            self._raise(
                "collapse",
                f"The mean reward fell from {reward.best:.3f}, its best, to {reward.latest:.3f}. Resume from a "
                "checkpoint before the fall with a lower learning rate, or see docs/troubleshooting.md.",
            )

    def _raise(self, cause: StopCause, message: str) -> None:
        self.causes.setdefault(cause, message)
        self.alarms.raise_once(f"drift_{cause}", message)


class StopOnDrift(TrainerCallback):
    """Saves a checkpoint and ends the run once a cause has been found.

    Args:
        drift: the alarms of the run.
        causes: causes that end it.
    """

    def __init__(self, drift: DriftAlarms, causes: Sequence[StopCause]) -> None:
        self.drift = drift
        self.causes = tuple(causes)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for cause in self.causes:
            if cause in self.drift.causes:
                logger.warning(
                    f"`credit_stop_on={cause!r}` ends the run at step {state.global_step} and saves a checkpoint. "
                    f"{self.drift.causes[cause]}"
                )
                control.should_training_stop = control.should_save = True
                return


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan


def _length_message(name: str, window: Window) -> str:
    return (
        f"The {name} grew from {window.first:.3g} to {window.latest:.3g}. Read some completions "
        "(`log_completions=True`): filler that is likely under any prompt is rewarded by self-distillation; a larger "
        "`contrastive_coef` subtracts it. Otherwise raise `max_completion_length`."
    )
