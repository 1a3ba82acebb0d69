"""Alarms for a reward, a length of completions or a fidelity of the teacher that drifts from its first values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from credit_trl.training.metrics import Alarms

# Logged values that are averaged at the start of the run, and for the latest value.
WINDOW = 5
# The latest fidelity or reward below this share of its reference is an alarm.
LOW_SHARE = 0.5
# The latest length or share of truncated completions above this multiple of its first value is an alarm.
HIGH_RATIO = 1.5
# Shares of truncated completions below this one are no drift.
FEW_TRUNCATED = 0.1
# A change of up to this many standard deviations of a window's mean is noise. It is large because an alarm compares
# every window of a run: of 200 logs of eight problems, rewards without a trend fall below half of their best window.
NOISE = 6.0

_FIDELITY = "credit/teacher_fidelity"
_REWARD = "reward"
_TRUNCATED = "completions/clipped_ratio"
_GREW = (
    "grew from {start:.3g} to {latest:.3g}. Read some completions (`log_completions=True`): filler that is likely "
    "under any prompt is rewarded by self-distillation; a larger `contrastive_coef` subtracts it. Otherwise raise "
    "`max_completion_length`."
)
# Metric -> cause of its alarm and message.
_WATCHED = {
    _FIDELITY: (
        "drift_fidelity",
        "The teacher's fidelity (`credit/teacher_fidelity`) fell from {start:.3f} to {latest:.3f}: with the feedback "
        "the teacher prefers successful over failed completions less than before. An averaged teacher follows a "
        "policy that unlearned to read feedback. Lower `teacher_update_rate` or the learning rate, or set "
        "`teacher_model_kind='base'`.",
    ),
    "completions/mean_length": ("drift_length", f"The mean length of completions {_GREW}"),
    _TRUNCATED: ("drift_length", f"The share of truncated completions {_GREW}"),
    _REWARD: (
        "drift_collapse",
        "The mean reward fell from {start:.3f}, its best, to {latest:.3f}. Resume from a checkpoint before the fall "
        "with a lower learning rate, or see docs/troubleshooting.md.",
    ),
}


class DriftAlarms:
    """Compares logged metrics with their first values, and ignores changes within the noise of consecutive logs.

    Values are global, so every process finds the same drift. The fidelity of a frozen teacher falls as the policy
    learns what it shows, since ΔV_t shrinks, and raises no alarm.
    """

    def __init__(self, alarms: Alarms, *, frozen_teacher: bool = False) -> None:
        self.alarms = alarms
        self.frozen_teacher = frozen_teacher
        self.history: dict[str, list[float]] = {}
        self.restore(())

    def restore(self, log_history: Sequence[Mapping[str, Any]]) -> None:
        """Start with the values that a run logged before it was resumed, without alarms."""
        for name in _WATCHED:
            self.history[name] = _finite([entry.get(name) for entry in log_history])

    def observe(self, metrics: Mapping[str, Sequence[float]]) -> None:
        """Add the means of the metrics that are about to be logged: lists of values since the last log, by name."""
        for name, (cause, message) in _WATCHED.items():
            values = self.history[name]
            logged = _finite(metrics.get(name, ()))
            if not logged:
                continue
            values.append(sum(logged) / len(logged))
            is_ignored = name == _FIDELITY and self.frozen_teacher
            if is_ignored or len(values) < 2 * WINDOW:  # first and latest values overlap
                continue
            windows = [sum(values[i : i + WINDOW]) / WINDOW for i in range(len(values) - WINDOW + 1)]
            start = max(windows) if name == _REWARD else windows[0]
            latest = windows[-1]
            if name in (_FIDELITY, _REWARD):
                is_drift = start > 0.0 and latest < LOW_SHARE * start
            else:
                is_drift = latest > HIGH_RATIO * (max(start, FEW_TRUNCATED) if name == _TRUNCATED else start)
            if is_drift and abs(latest - start) > _noise(values):
                self.alarms.raise_once(cause, message.format(start=start, latest=latest))


def _noise(values: Sequence[float]) -> float:
    """Difference of two windows that may be noise, by the differences of consecutive values."""
    variance = sum((b - a) ** 2 for a, b in pairwise(values)) / (2 * (len(values) - 1))
    return NOISE * math.sqrt(variance / WINDOW)


def _finite(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]
