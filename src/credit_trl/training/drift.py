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
_LENGTH = "completions/mean_length"
_TRUNCATED = "completions/clipped_ratio"
_REWARD = "reward"


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
        for name in (_FIDELITY, _LENGTH, _TRUNCATED, _REWARD):
            self.history[name] = _finite([entry[name] for entry in log_history if name in entry])

    def observe(self, metrics: Mapping[str, Sequence[float]]) -> None:
        """Add the means of the metrics that are about to be logged: lists of values since the last log, by name."""
        moved = {}
        for name, values in self.history.items():
            logged = _finite(metrics.get(name, ()))
            values += [sum(logged) / len(logged)] if logged else []
            moved[name] = bool(logged) and len(values) >= 2 * WINDOW  # first and latest values are disjoint
        if moved[_FIDELITY] and not self.frozen_teacher:
            self._check_fidelity(self.history[_FIDELITY])
        if moved[_LENGTH]:
            self._check_length("mean length of completions", self.history[_LENGTH], 0.0)
        if moved[_TRUNCATED]:
            self._check_length("share of truncated completions", self.history[_TRUNCATED], FEW_TRUNCATED)
        if moved[_REWARD]:
            self._check_reward(self.history[_REWARD])

    def _check_fidelity(self, values: Sequence[float]) -> None:
        first, latest = _ends(values)
        if _has_fallen(values, first):
            self.alarms.raise_once(
                "drift_fidelity",
                f"The teacher's fidelity (`{_FIDELITY}`) fell from {first:.3f} to {latest:.3f}: with the feedback the "
                "teacher prefers successful over failed completions less than before. An averaged teacher follows a "
                "policy that unlearned to read feedback. Lower `teacher_update_rate` or the learning rate, or set "
                "`teacher_model_kind='base'`.",
            )

    def _check_length(self, name: str, values: Sequence[float], floor: float) -> None:
        first, latest = _ends(values)
        if latest > HIGH_RATIO * max(first, floor) and not _is_noise(values, latest - first):
            self.alarms.raise_once(
                "drift_length",
                f"The {name} grew from {first:.3g} to {latest:.3g}. Read some completions (`log_completions=True`): "
                "filler that is likely under any prompt is rewarded by self-distillation; a larger "
                "`contrastive_coef` subtracts it. Otherwise raise `max_completion_length`.",
            )

    def _check_reward(self, values: Sequence[float]) -> None:
        best = max(sum(values[i : i + WINDOW]) / WINDOW for i in range(len(values) - WINDOW + 1))
        if _has_fallen(values, best):
            self.alarms.raise_once(
                "drift_collapse",
                f"The mean reward fell from {best:.3f}, its best, to {_ends(values)[1]:.3f}. Resume from a checkpoint "
                "before the fall with a lower learning rate, or see docs/troubleshooting.md.",
            )


def _ends(values: Sequence[float]) -> tuple[float, float]:
    """Means of the first and of the latest values."""
    return sum(values[:WINDOW]) / WINDOW, sum(values[-WINDOW:]) / WINDOW


def _has_fallen(values: Sequence[float], reference: float) -> bool:
    latest = _ends(values)[1]
    return reference > 0.0 and latest < LOW_SHARE * reference and not _is_noise(values, reference - latest)


def _is_noise(values: Sequence[float], change: float) -> bool:
    """Whether a difference of two windows may be noise, by the differences of consecutive values."""
    variance = sum((b - a) ** 2 for a, b in pairwise(values)) / (2 * (len(values) - 1))
    return abs(change) <= NOISE * math.sqrt(variance / WINDOW)


def _finite(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]
