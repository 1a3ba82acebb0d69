"""Alarms for metrics that drift from their first values."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from credit_trl.training.metrics import Alarms

# Logged values in the window at the start of the run, and in the latest one.
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

_OBSERVED = (
    "credit/teacher_fidelity",
    "completions/mean_length",
    "completions/clipped_ratio",
    "reward",
)


class Window:
    """First and latest of the finite values of one logged metric."""

    def __init__(self) -> None:
        self.values: list[float] = []

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

    def is_noise(self, change: float) -> bool:
        """Whether a difference of two windows may be noise, by the differences of consecutive values."""
        variance = sum((b - a) ** 2 for a, b in pairwise(self.values)) / (2 * (len(self.values) - 1))
        return abs(change) <= NOISE * math.sqrt(variance / WINDOW)


class DriftAlarms:
    """Compares logged metrics with their first values, and ignores changes within the noise of consecutive logs.

    Values are global, so every process finds the same `causes`.

    The fidelity of a frozen teacher falls as the policy learns what it shows, since ΔV_t shrinks, and raises no alarm.
    """

    def __init__(self, alarms: Alarms, *, frozen_teacher: bool = False) -> None:
        self.alarms = alarms
        self.frozen_teacher = frozen_teacher
        self.causes: dict[str, str] = {}
        self._windows: dict[str, Window] = defaultdict(Window)

    def restore(self, log_history: Sequence[Mapping[str, Any]]) -> None:
        """Start with the values that a run logged before it was resumed, without alarms."""
        self.causes.clear()
        for name in _OBSERVED:
            self._windows[name] = Window()
            for entry in log_history:
                self._windows[name].add(_mean([entry[name]] if name in entry else ()))

    def observe(self, metrics: Mapping[str, Sequence[float]]) -> None:
        """Add the means of the metrics that are about to be logged: lists of values since the last log, by name."""

        def ready(name: str) -> Window | None:
            """The metric's window with its new value, once its first and latest values are disjoint."""
            return window if (window := self._windows[name]).add(_mean(metrics.get(name, ()))) else None

        fidelity, length, truncated, reward = map(ready, _OBSERVED)
        if fidelity and _has_fallen(fidelity, fidelity.first) and not self.frozen_teacher:
            self._raise(
                "fidelity",
                f"The teacher's fidelity (`credit/teacher_fidelity`) fell from {fidelity.first:.3f} to "
                f"{fidelity.latest:.3f}: with the feedback the teacher prefers successful over failed completions "
                f"less than before. {_UNREAD}",
            )
        if length and _has_grown(length, HIGH_RATIO * length.first):
            self._raise("length", _length_message("mean length of completions", length))
        if truncated and _has_grown(truncated, HIGH_RATIO * max(truncated.first, FEW_TRUNCATED)):
            self._raise("length", _length_message("share of truncated completions", truncated))
        if reward and _has_fallen(reward, reward.best):
            self._raise(
                "collapse",
                f"The mean reward fell from {reward.best:.3f}, its best, to {reward.latest:.3f}. Resume from a "
                "checkpoint before the fall with a lower learning rate, or see docs/troubleshooting.md.",
            )

    def _raise(self, cause: str, message: str) -> None:
        self.causes.setdefault(cause, message)
        self.alarms.raise_once(f"drift_{cause}", message)


_UNREAD = (
    "An averaged teacher follows a policy that unlearned to read feedback. Lower `teacher_update_rate` or the "
    "learning rate, or set `teacher_model_kind='base'`."
)


def _has_fallen(window: Window, reference: float) -> bool:
    is_low = reference > 0.0 and window.latest < LOW_SHARE * reference
    return is_low and not window.is_noise(reference - window.latest)


def _has_grown(window: Window, limit: float) -> bool:
    return window.latest > limit and not window.is_noise(window.latest - window.first)


def diversity_message(history: Sequence[Mapping[str, Any]]) -> str | None:
    """Message where pass@k fell while avg@k rose since the first evaluation, or None.

    The fall must exceed half of avg@k's 95 % interval, below which it is noise of the prompts. `history` has the
    evaluations in the order of their steps; those with another k than the last are ignored.
    """
    last = history[-1]
    first = next(row for row in history if row["k"] == last["k"])
    noise = (last["high"] - last["low"]) / 2
    if not (last["score"] > first["score"] and last["pass_at_k"] < first["pass_at_k"] - noise):
        return None
    k = last["k"]
    return (
        f"pass@{k} fell from {first['pass_at_k']:.3f} (step {first['step']}) to {last['pass_at_k']:.3f} (step "
        f"{last['step']}), while avg@{k} rose from {first['score']:.3f} to {last['score']:.3f}: the policy loses "
        "answers that it could sample before. Stop at the step with the best trade, or lower the learning rate."
    )


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan


def _length_message(name: str, window: Window) -> str:
    return (
        f"The {name} grew from {window.first:.3g} to {window.latest:.3g}. Read some completions "
        "(`log_completions=True`): filler that is likely under any prompt is rewarded by self-distillation; a larger "
        "`contrastive_coef` subtracts it. Otherwise raise `max_completion_length`."
    )
