"""Warnings of a run that does not learn what it should, each raised once."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

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

_FIX = (
    "Load the model in fp32 (`dtype=torch.float32`) and keep `bf16=True`, which computes in bf16 and keeps fp32 "
    "weights, or raise `learning_rate`."
)
# Cause of a warning -> its message.
_MESSAGES = {
    "no_teacher": "No sample of this generation batch has a teacher, so its loss is 0: no rollout reached "
    "`success_reward_threshold` and there is no feedback. Return `Verdict(reward, feedback)` from the reward "
    "function, fill the column `privileged_context`, or lower the threshold.",
    "no_contrast": "No sample with a teacher of this generation batch has a contrast prompt, so λ is 0. In evaluation "
    "raise `per_device_eval_batch_size` or lower `num_generations_eval`; in training see `contrastive_source`.",
    "feedback_dropped": "No feedback of this generation batch fits `max_reprompt_len`: all of it was dropped "
    "(`credit/frac_feedback_dropped`). Increase it above the longest prompt, or return shorter feedback.",
    "no_tokens": "No token of this generation batch has a loss, although samples have a teacher: "
    "`mask_truncated_completions` masks completions that reach `max_completion_length`, and "
    "`on_verifier_error='skip'` those without a verdict.",
    "positions": "The teacher reads up to {longest} tokens, and the model has `max_position_embeddings={positions}`. "
    "Lower `max_reprompt_len` or `max_completion_length`, or use a model with a longer context.",
    "feedback_off": "The reward functions return feedback, but `include_environment_feedback=False` ignores it. Set "
    "it to True.",
    "lost_turns": "`Verdict.turn_feedback` has feedback on turn {turn} of a rollout with fewer turns; it is ignored. "
    "Turns count from 0, one for each answer of the model. An environment with the attribute `current_turn` is given "
    "the number while its tools run.",
    "low_precision": f"The trained weights are {{names}}, which rounds small updates away. {_FIX}",
    "weights_unchanged": "The first update changed {share:.1%} of the trained weights that have a gradient: the "
    f"others were rounded back. {_FIX}",
    "prompt_ends": "The first prompt of `{name}` ends in the token {last}, at which generation ends, so that "
    "completions begin after the end of a text. Set the tokenizer's `add_eos_token=False`, or use a chat template "
    "with a generation prompt.",
    "ordinary_end": "Generation ends at {text!r}, which is ordinary text. Set a special token: the `eos_token` of "
    "the tokenizer and the `eos_token_id` of the model's `generation_config`.",
    "truncated": "{share:.0%} of the completions of a generation batch were cut at `max_completion_length`.{unknown} "
    "Increase `max_completion_length`, or ask for shorter answers.",
    "not_packed": "`packed=True` has no effect: {reason}. Micro-batches are padded to their longest sample "
    "(`credit/padding_factor`).",
    "nothing_to_do": "The checkpoint is of step {step}, and this run ends after step {last}, so there is nothing to "
    "do. Raise `max_steps` or `num_train_epochs`.",
    "flat_reward": "The rewards of every group were equal in {count} generation batches in a row, {mean:.2f} on "
    "average in the last. The model solves all of these prompts or none, or the verifier does not tell completions "
    "apart: look at a few with `log_completions=True`.",
    "engine_mismatch": "The log-probabilities of the sampled tokens under vLLM and under the model differ by "
    "{difference:.2f} nats on average (`sampling/sampling_logp_difference/mean`). Check that the engine has the "
    "policy's weights, that both compute in the same precision, and that a server runs with `--logprobs-mode "
    "processed_logprobs`.",
    "uniform_teacher": "The teacher is nearly uniform (entropy {entropy:.2f} of at most {largest:.2f} nats). Check "
    "its weights and its prompt.",
    "low_mass": "The support holds {mass:.2f} of the student's probability. Increase `distillation_topk`.",
    "generic_credit": "S_t is near zero on the tokens that the teacher accepts while ΔV_t is not (root mean squares "
    "{specific:.3f} and {credit:.3f} nats), in {count} logs in a row: the feedback makes the same tokens "
    "likely under any prompt, so λ lowers the reward of the answer itself. Return feedback that is read together with "
    "the prompt, such as a letter, a position or a failing check, instead of the answer; or set `contrastive_coef=0`.",
    "lost_gradient": "The loss is not 0 and its gradient is exactly 0, in {count} logs in a row: an operation between "
    "the trained weights and the loss blocks gradients. Check that the forward pass uses the weights that train "
    "(`target_modules`), and that a quantised base passes gradients on this device.",
    "drift_fidelity": "The teacher's fidelity (`credit/teacher_fidelity`) fell from {start:.3f} to {latest:.3f}: with "
    "the feedback the teacher prefers successful over failed completions less than before. An averaged teacher "
    "follows a policy that unlearned to read feedback. Set `teacher_model_kind='base'`, or lower the learning rate.",
    "drift_length": "The mean length of completions grew from {start:.3g} to {latest:.3g}. Read some completions "
    "(`log_completions=True`): filler that is likely under any prompt is rewarded by self-distillation; a larger "
    "`contrastive_coef` subtracts it. Otherwise raise `max_completion_length`.",
    "drift_collapse": "The mean reward fell from {start:.3f}, its best, to {latest:.3f}. Resume from a checkpoint "
    "before the fall with a lower learning rate, or see docs/troubleshooting.md.",
} | {
    f"engine_{kind}": f"The engine's log-probabilities of {{share:.1%}} of the sampled tokens are {kind} "
    f"(`sampling/frac_{kind}_logps`), which have no ratio, or its bound. Check weights and precision of the engine."
    for kind in ("missing", "infinite")
}
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

        Changes within the noise of consecutive logs are ignored. The fidelity of a frozen teacher falls as the policy
        learns what it shows, since ΔV_t shrinks, and raises no alarm.
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
            is_real = start > 0.0 and abs(latest - start) > _noise(values)
            self.raise_if(is_drift and is_real, cause, start=start, latest=latest)


def _noise(values: Sequence[float]) -> float:
    """Difference of two windows that may be noise, by the differences of consecutive values."""
    variance = sum((b - a) ** 2 for a, b in pairwise(values)) / (2 * (len(values) - 1))
    return NOISE * math.sqrt(variance / WINDOW)
