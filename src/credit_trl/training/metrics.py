"""Metrics of the credit that a run logs, and warnings of a run that does not learn what it should."""

import math
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import yaml
from accelerate.utils import gather_object
from jaxtyping import Bool, Float, Int
from torch import Tensor

from credit_trl import objective
from credit_trl.config import CreditConfig
from credit_trl.contexts.tokens import TokenContexts
from credit_trl.loss.credit_loss import MicroBatchLoss, engine_difference
from credit_trl.rollout.batch import GenerationBatch, is_successful

# Tokens that the teacher gives at least this probability, in nats, are accepted.
ACCEPTED = math.log(0.5)


def context_metrics(
    contexts: Sequence[TokenContexts], wants_contrast: bool, reduce: Callable[[Tensor], Tensor]
) -> dict[str, float]:
    """Shares of samples of the global generation batch, `credit/frac_…`, from the contexts of the local samples.

    `reduce` sums a vector over processes; every process calls it once. With `wants_contrast` (λ is not 0) samples with
    a teacher and no contrast prompt count as without contrast.
    """
    names = "with_demonstration with_feedback without_teacher without_contrast context_cut feedback_dropped".split()
    counts = Counter(dict.fromkeys(names, 0))
    for sample in contexts:
        counts["context_cut"] += sample.cut
        counts["feedback_dropped"] += sample.feedback_dropped
        if sample.teacher is None:
            counts["without_teacher"] += 1
            continue
        privileged = sample.privileged
        counts["with_demonstration"] += privileged.demonstration is not None
        counts["with_feedback"] += privileged.feedback is not None or privileged.turns is not None
        counts["without_contrast"] += wants_contrast and not sample.contrasts
    local = [counts[name] for name in names]
    *totals, samples = reduce(torch.tensor([*local, len(contexts)], dtype=torch.float32)).tolist()
    return {f"credit/frac_{name}": total / samples for name, total in zip(names, totals, strict=True)}


# Not defined for `distillation_support="sampled"`: one token is no distribution.
_NOT_SAMPLED = {
    "credit/kl_to_target",
    "credit/kl_to_teacher",
    "credit/support_mass_student",
    "credit/support_mass_teacher",
}


def token_sums(
    loss: MicroBatchLoss, functions: Mapping[str, Callable[[MicroBatchLoss], Float[Tensor, " N"]]]
) -> dict[str, Float[Tensor, " 2"]]:
    """Sum and count of each metric over the N local tokens of a micro-batch that carry loss; N may be 0.

    A standard deviation or root mean square has the sum of squares. Where the loss uses what a vLLM engine reported,
    TRL's means of it are among them, and the median ratio of the micro-batch. Nothing waits for the device.
    """
    terms = loss.terms
    f = terms.teacher_token_logps
    generic = terms.generic_token_logps
    specific = objective.specific_part(f, generic)
    contrasted = loss.contrasted
    accepted = contrasted & (f > ACCEPTED)
    everywhere = torch.ones_like(contrasted)
    dtype = torch.float32 if f.device.type == "mps" else torch.float64
    sums = _Sums(f.new_ones((), dtype=dtype))
    sums.add_moments("credit/delta_v", objective.self_distillation_reward(f, terms.token_logps), everywhere)
    sums.add_moments("credit/advantage", terms.advantages, everywhere)
    sums.add("credit/kl_to_target", terms.kl_to_target, everywhere)
    sums.add("credit/support_mass_student", terms.student_mass, everywhere)
    sums.add("credit/support_mass_teacher", terms.teacher_mass, everywhere)
    sums.add("credit/teacher_entropy", terms.teacher_entropy, everywhere)
    sums.add("credit/distillation_loss", terms.token_loss, everywhere)
    sums.add("entropy", terms.entropy, everywhere)
    sums.add_moments("credit/s", specific, contrasted)
    sums.add("credit/s_accepted", specific, accepted, power=2)
    sums.add("credit/generic_mean", generic, contrasted)
    sums.add("credit/kl_to_teacher", terms.kl_to_teacher, contrasted)
    sums.add("credit/teacher_fidelity", loss.fidelity, ~loss.fidelity.isnan())
    sums.add_total("credit/padding_factor", loss.tokens_read, loss.valid)
    if loss.engine_logps is not None:
        difference = engine_difference(terms.policy_logps, loss.engine_logps).abs()
        median = terms.ratio.median()
        sums.add("sampling/importance_sampling_ratio/mean", terms.ratio, everywhere)
        sums.add("sampling/importance_sampling_ratio/median", median, ~median.isnan())
        sums.add("sampling/sampling_logp_difference/mean", difference, everywhere)
        sums.add("sampling/frac_missing_logps", loss.engine_logps.isnan(), everywhere)
        sums.add("sampling/frac_infinite_logps", loss.engine_logps.isinf(), everywhere)
    for name, function in functions.items():
        sums.add(name, function(loss).detach(), everywhere)
    return sums.by_name


class _Sums:
    """Sum and count of each metric, with the dtype and device of `unit`."""

    def __init__(self, unit: Float[Tensor, ""]) -> None:
        self.unit = unit
        self.by_name: dict[str, Float[Tensor, " 2"]] = {}

    def add(self, name: str, values: Tensor, counts: Bool[Tensor, "..."], power: int = 1) -> None:
        """The sum of a power of the values where `counts` is True. Not by an index, which waits for the device."""
        powers = values.to(self.unit.dtype).pow(power)
        self.add_total(name, torch.where(counts, powers, 0.0).sum(), counts.sum())

    def add_moments(self, name: str, values: Tensor, counts: Bool[Tensor, "..."]) -> None:
        """The sums for mean and standard deviation."""
        self.add(f"{name}_mean", values, counts)
        self.add(f"{name}_std", values, counts, power=2)

    def add_total(self, name: str, total: Tensor | int, count: Tensor | int) -> None:
        self.by_name[name] = torch.stack([self.unit * total, self.unit * count])


class TokenMetrics:
    """Metrics of the credit at the sampled tokens of all micro-batches since the last log.

    They are added up on the device, and read once a log. A mean of the micro-batches' means would give tokens of
    short completions more weight, which share a micro-batch. `reduce` sums a tensor over processes; every process
    calls it once for each log.

    Attributes:
        functions: name -> function from a `MicroBatchLoss` to a value (N,) for each token that carries loss. The mean
            over tokens is logged by that name. Empty at first.
    """

    def __init__(self, config: CreditConfig, reduce: Callable[[Tensor], Tensor]) -> None:
        self._dropped = set(_NOT_SAMPLED if config.distillation_support == "sampled" else ())
        if config.distillation_weight < 1.0:  # GRPO logs its own
            self._dropped.add("entropy")
        self._reduce = reduce
        self.functions: dict[str, Callable[[MicroBatchLoss], Float[Tensor, " N"]]] = {}
        self._names: list[str] = []
        self._sums: dict[str, Float[Tensor, "m 2"]] = {}  # by mode

    def add(self, mode: str, loss: MicroBatchLoss) -> None:
        """Add a micro-batch of `"train"` or `"eval"`."""
        sums = token_sums(loss, self.functions)
        self._names = list(sums)
        added = torch.stack(list(sums.values()))
        self._sums[mode] = self._sums[mode] + added if mode in self._sums else added

    def read(self, mode: str) -> dict[str, float]:
        """Means, standard deviations and the root mean square of the micro-batches since the last call, in nats.

        A value is NaN where no token counts for it. Empty without any micro-batch.
        """
        if mode not in self._sums:
            return {}
        totals, counts = self._reduce(self._sums.pop(mode)).unbind(dim=1)
        means = dict(zip(self._names, (totals / counts).tolist(), strict=True))  # NaN without a token
        means["credit/s_accepted"] = math.sqrt(means["credit/s_accepted"])
        for name in ("credit/advantage", "credit/delta_v", "credit/s"):
            variance = means[f"{name}_std"] - means[f"{name}_mean"] ** 2
            means[f"{name}_std"] = 0.0 if variance <= 0.0 else math.sqrt(variance)  # NaN stays NaN
        return {name: value for name, value in means.items() if name not in self._dropped}


class SuccessWeights(NamedTuple):
    """Weights of the local samples in the teacher's fidelity, and what they rest on in all processes."""

    weights: Float[Tensor, " B"]
    mixed_groups: int
    scored: int  # samples with a teacher and with loss


def teacher_success_weights(
    batch: GenerationBatch, contexts: Sequence[TokenContexts], mask: Bool[Tensor, "B T"], threshold: float | None
) -> SuccessWeights:
    """Weights of successes and failures, by which ΔV_t gives the teacher's fidelity.

    The weights w give Σ_i w_i m_i = mean of m over successes − mean over failures, averaged over mixed groups. A group
    is mixed where it has successes and failures among its samples with a teacher, with loss and with a reward; other
    samples have weight 0. All weights are NaN where no group is mixed. `mask` is True on the policy's own tokens.
    Every process must call it.
    """
    has_loss = mask.any(dim=1).tolist()
    is_usable = [sample.teacher is not None and loss for sample, loss in zip(contexts, has_loss, strict=True)]
    is_scored = np.array(gather_object(is_usable))
    rewards = np.array(batch.rewards)
    is_success = np.array(is_successful(batch.rewards, threshold)).reshape(-1, batch.group_size)
    counts = (is_scored & ~np.isnan(rewards)).reshape(-1, batch.group_size)
    successes = (counts & is_success).sum(axis=1, keepdims=True)
    failures = (counts & ~is_success).sum(axis=1, keepdims=True)
    is_mixed = (successes > 0) & (failures > 0)
    mixed = int(is_mixed.sum())
    weights = np.full(len(rewards), math.nan)
    if mixed:
        signed = np.where(is_success, 1 / np.maximum(successes, 1), -1 / np.maximum(failures, 1))
        weights = (signed * (counts & is_mixed) / mixed).reshape(-1)
    local = weights[batch.first : batch.first + len(contexts)]
    return SuccessWeights(torch.tensor(local.tolist(), device=mask.device), mixed, int(is_scored.sum()))


def micro_batch_fidelity(
    success_weights: Float[Tensor, " B"] | None,
    mask: Bool[Tensor, "B T"],
    samples: Int[Tensor, " N"],
    delta_v: Float[Tensor, " N"],
) -> Float[Tensor, ""]:
    """Σ_i w_i mean_t ΔV_t of a micro-batch: its part of the teacher's fidelity; NaN where no group is mixed.

    Args:
        success_weights: w, of `teacher_success_weights`; None in a loss without them.
        mask: the N tokens that carry loss.
        samples: index of each token's sample.
    """
    if success_weights is None:
        return delta_v.new_full((), math.nan)
    token_weights = (success_weights / mask.sum(dim=1).clamp(min=1))[samples]
    fidelity = (token_weights * delta_v).sum()
    return torch.where(success_weights.isnan().any(), math.nan, fidelity)


def drop_undefined(metrics: MutableMapping[str, Sequence[float]]) -> None:
    """Remove metrics without a finite value, which loggers would show as NaN or None."""
    for name, values in list(metrics.items()):
        defined = [value for value in values if value is not None]
        if not np.isfinite(defined).any():
            del metrics[name]


# Teacher entropy above this share of log V is close to uniform.
NEARLY_UNIFORM = 0.9
# Below this student probability of the support the loss ignores most of the student's distribution.
LOW_SUPPORT_MASS = 0.5
# Root mean square of S_t on accepted tokens as a share of that of ΔV_t on all, below which the credit is not
# input-specific; and the root mean square of ΔV_t in nats above which there is credit at all.
LOW_SPECIFIC_SHARE, SOME_CREDIT = 0.25, 0.1
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

# Mixed groups and logs over which a fidelity below zero is an alarm; of the first logs of a run only, since a frozen
# teacher prefers successes less than a policy that has learned them.
MIN_GROUPS, MIN_LOGS, FIRST_LOGS = 16, 3, 2 * WINDOW
# Standard errors by which it lies below zero.
HARM_ERRORS = 2.0

# Cause of a warning -> its message.
_MESSAGES: dict[str, str] = yaml.safe_load(Path(__file__).with_name("alarms.yaml").read_text("utf-8"))
# Cause -> consecutive generation batches or logs in which it must hold; of the other causes one.
TIMES = {"flat_reward": 5, "generic_credit": 3, "lost_gradient": 3}
# Metric whose drift is an alarm -> cause of the alarm.
_WATCHED = {
    "credit/teacher_fidelity": "drift_fidelity",
    "completions/mean_length": "drift_length",
    "reward": "drift_collapse",
}


def harmful_feedback(log_history: Sequence[Mapping[str, Any]]) -> str | None:
    """Message where feedback makes the teacher prefer failures at the start of a run; None where it does not.

    The fidelity is averaged over mixed groups, with the standard error of the logs' weighted mean.
    """
    values = []
    counts = []
    for row in log_history:
        if row.get("credit/teacher_fidelity") is not None and row.get("credit/fidelity_groups") is not None:
            values.append(row["credit/teacher_fidelity"])
            counts.append(row["credit/fidelity_groups"])
    fidelity = np.array(values[:FIRST_LOGS])
    weights = np.array(counts[:FIRST_LOGS])
    groups = weights.sum()
    if len(fidelity) < MIN_LOGS or groups < MIN_GROUPS:
        return None
    mean = np.average(fidelity, weights=weights)
    error = np.linalg.norm(weights * (fidelity - mean)) / groups
    if mean + HARM_ERRORS * error >= 0.0:
        return None
    return _MESSAGES["harmful_feedback"].format(mean=mean, groups=groups, logs=len(fidelity))


def _root_mean_square(values: Mapping[str, float], name: str) -> float:
    """By the logged mean and standard deviation; NaN without them."""
    return math.hypot(values.get(f"{name}_mean", math.nan), values.get(f"{name}_std", math.nan))


class CreditWarning(UserWarning):
    """A sign that the run does not learn what it should."""


class Alarms:
    """Warnings, each raised once a run, where enabled: on the main process only.

    `record` is called with the cause and the message of each.
    """

    def __init__(self, enabled: bool = True, record: Callable[[str, str], None] | None = None) -> None:
        self.enabled = enabled
        self._record = record
        self.raised: set[str] = set()
        self._in_a_row: dict[str, int] = {}  # by cause

    def raise_if(self, holds: bool, cause: str, **values: Any) -> None:
        """Raise the warning of a cause of `_MESSAGES`, with the values that it names, if it holds `TIMES` in a row."""
        count = self._in_a_row.get(cause, 0) + 1 if holds else 0
        self._in_a_row = {**self._in_a_row, cause: count}
        if count >= TIMES.get(cause, 1) and self.enabled and cause not in self.raised:
            self.raised.add(cause)
            message = values.get("message") or _MESSAGES[cause].format(count=count, **values)
            if self._record is not None:
                self._record(cause, message)
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
        credit = _root_mean_square(latest, "credit/delta_v")
        if not math.isnan(specific):
            is_generic = credit > SOME_CREDIT and specific < LOW_SPECIFIC_SHARE * credit
            self.raise_if(is_generic, "generic_credit", specific=specific, credit=credit)
        has_credit = _root_mean_square(latest, "credit/advantage") > 0.0  # not of NaN
        if logs.get("grad_norm") is not None and has_credit and logs.get("loss"):
            self.raise_if(logs["grad_norm"] == 0.0, "lost_gradient")

    def check_drift(self, log_history: Sequence[Mapping[str, Any]], *, frozen_teacher: bool = False) -> None:
        """Compare the last values of a run's logs with its first ones, or its best reward.

        Changes within the noise, by the differences of consecutive logs, are ignored. The fidelity of a frozen teacher
        falls as the policy learns what it shows, since ΔV_t shrinks, and raises no alarm unless it starts below zero.
        """
        message = harmful_feedback(log_history)
        self.raise_if(message is not None, "harmful_feedback", message=message)
        for name, cause in _WATCHED.items():
            is_ignored = cause == "drift_fidelity" and frozen_teacher
            values = np.array([row[name] for row in log_history if row.get(name) is not None])
            if is_ignored or len(values) < 2 * WINDOW:  # first and latest values overlap
                continue
            windows = np.convolve(values, np.full(WINDOW, 1 / WINDOW), mode="valid")
            start = windows.max() if cause == "drift_collapse" else windows[0]
            latest = windows[-1]
            is_drift = latest > HIGH_RATIO * start if cause == "drift_length" else latest < LOW_SHARE * start
            noise = NOISE * np.sqrt(np.square(np.diff(values)).mean() / 2 / WINDOW)
            is_real = start > 0.0 and abs(latest - start) > noise
            self.raise_if(is_drift and is_real, cause, start=start, latest=latest)
