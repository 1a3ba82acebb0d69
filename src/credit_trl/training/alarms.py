"""Warnings of a run that does not learn what it should, each raised once; `alarms.yaml` has their texts."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

# Teacher entropy above this share of log V is close to uniform.
NEARLY_UNIFORM = 0.9
# Below this student probability of the support the loss ignores most of the student's distribution.
LOW_SUPPORT_MASS = 0.5
# Consecutive generation batches in which the rewards of every group are equal.
FLAT_REWARD_BATCHES = 5
# Root mean square of S_t on accepted tokens as a share of that of ΔV_t on all, below which the credit is not
# input-specific; and the root mean square of ΔV_t in nats above which there is credit at all.
LOW_SPECIFIC_SHARE, SOME_CREDIT = 0.25, 0.1
# Consecutive logs with such credit, or with a lost gradient.
BAD_LOGS = 3
# Mean difference between the log-probabilities of vLLM and of the model, in nats; bf16 kernels differ by about 0.01.
ENGINE_MISMATCH = 0.1
# Share of sampled tokens without a finite log-probability of the engine, above which the engine is at fault.
FEW_BAD_LOGPS = 0.001

# Logged values that are averaged at the start of the run, and for the latest value.
WINDOW = 5
# The latest fidelity or reward below this share of its reference is an alarm.
LOW_SHARE = 0.5
# The latest length above this multiple of its first value is an alarm.
HIGH_RATIO = 1.5
# A change of up to this many standard deviations of a window's mean is noise. It is large because an alarm compares
# every window of a run: of 200 logs of eight problems, rewards without a trend fall below half of their best window.
NOISE = 6.0

# Cause of a warning -> its message.
_MESSAGES: dict[str, str] = yaml.safe_load(Path(__file__).with_name("alarms.yaml").read_text("utf-8"))
# Metric whose drift is an alarm -> cause of the alarm.
_WATCHED = {
    "credit/teacher_fidelity": "drift_fidelity",
    "completions/mean_length": "drift_length",
    "reward": "drift_collapse",
}


class CreditWarning(UserWarning):
    """A sign that the run does not learn what it should."""


class Alarms:
    """Warnings, each raised once a run, where enabled: on the main process only."""

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self.raised: set[str] = set()
        self._in_a_row: dict[str, int] = {}  # by cause

    def raise_if(self, holds: bool, cause: str, times: int = 1, **values: Any) -> None:
        """Raise the warning of a cause of `_MESSAGES`, with the values that it names, if it holds `times` in a row."""
        count = self._in_a_row.get(cause, 0) + 1 if holds else 0
        self._in_a_row = {**self._in_a_row, cause: count}
        if count >= times and self.enabled and cause not in self.raised:
            self.raised.add(cause)
            message = _MESSAGES[cause].format(count=count, **values)
            warnings.warn_explicit(message, CreditWarning, "credit_trl", 0)  # no source line in the output

    def check_contexts(self, share: dict[str, float], frac_skipped: float = 0.0) -> None:
        """Warn by `context_metrics` where no sample has a teacher, none a contrast prompt, or all feedback is dropped.

        `frac_skipped` is the share of samples whose verifier failed, which explains a batch without teacher.
        """
        no_teacher = share["credit/frac_without_teacher"]
        no_contrast = share["credit/frac_without_contrast"]
        dropped = share["credit/frac_feedback_dropped"]
        self.raise_if(no_teacher == 1.0 and frac_skipped == dropped == 0.0, "no_teacher")
        self.raise_if(no_contrast > 0.0 and math.isclose(no_contrast + no_teacher, 1.0), "no_contrast")
        self.raise_if(dropped > 0.0 and share["credit/frac_with_feedback"] == 0.0, "feedback_dropped")

    def check_log(self, metrics: Mapping[str, Sequence[float]], logs: Mapping[str, float], vocabulary: int) -> None:
        """Warn about what is about to be logged: the engine, the teacher, its support, the credit and the gradient.

        The last of the `metrics` since the last log counts. `logs` has `loss` and, in training, `grad_norm`.
        """
        latest = {name: values[-1] for name, values in metrics.items() if values}
        difference = latest.get("sampling/sampling_logp_difference/mean", 0.0)
        self.raise_if(difference > ENGINE_MISMATCH, "engine_mismatch", difference=difference)
        for kind in ("missing", "infinite"):
            share = latest.get(f"sampling/frac_{kind}_logps", 0.0)
            self.raise_if(share > FEW_BAD_LOGPS, f"engine_{kind}", share=share)
        entropy = latest.get("credit/teacher_entropy", 0.0)
        largest = math.log(vocabulary)
        self.raise_if(entropy > NEARLY_UNIFORM * largest, "uniform_teacher", entropy=entropy, largest=largest)
        mass = latest.get("credit/support_mass_student", 1.0)
        self.raise_if(mass < LOW_SUPPORT_MASS, "low_mass", mass=mass)
        specific = latest.get("credit/s_accepted", math.nan)
        credit = math.hypot(*(latest.get(f"credit/delta_v_{moment}", math.nan) for moment in ("mean", "std")))
        if not math.isnan(specific):
            is_generic = credit > SOME_CREDIT and specific < LOW_SPECIFIC_SHARE * credit
            self.raise_if(is_generic, "generic_credit", BAD_LOGS, specific=specific, credit=credit)
        moments = [latest.get(f"credit/advantage_{moment}", 0.0) for moment in ("mean", "std")]
        has_credit = any(abs(moment) > 0.0 for moment in moments)  # not of NaN
        if logs.get("grad_norm") is not None and has_credit and logs.get("loss"):
            self.raise_if(logs["grad_norm"] == 0.0, "lost_gradient", BAD_LOGS)

    def check_drift(self, log_history: Sequence[Mapping[str, Any]], *, frozen_teacher: bool = False) -> None:
        """Compare the last values of a run's logs with its first ones, or its best reward.

        Changes within the noise, by the differences of consecutive logs, are ignored. The fidelity of a frozen teacher
        falls as the policy learns what it shows, since ΔV_t shrinks, and raises no alarm.
        """
        for name, cause in _WATCHED.items():
            values = [row[name] for row in log_history if row.get(name) is not None]
            is_ignored = cause == "drift_fidelity" and frozen_teacher
            if is_ignored or len(values) < 2 * WINDOW:  # first and latest values overlap
                continue
            windows = [sum(values[i : i + WINDOW]) / WINDOW for i in range(len(values) - WINDOW + 1)]
            start = max(windows) if cause == "drift_collapse" else windows[0]
            latest = windows[-1]
            is_drift = latest > HIGH_RATIO * start if cause == "drift_length" else latest < LOW_SHARE * start
            variance = sum((b - a) ** 2 for a, b in pairwise(values)) / (2 * (len(values) - 1))
            is_real = start > 0.0 and abs(latest - start) > NOISE * math.sqrt(variance / WINDOW)
            self.raise_if(is_drift and is_real, cause, start=start, latest=latest)
