"""Training metrics and one-time warnings."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from accelerate.utils import gather_object
from jaxtyping import Bool, Float
from torch import Tensor

from credit_trl.config import CreditConfig
from credit_trl.contexts.tokens import TokenContexts
from credit_trl.loss.terms import MicroBatchLoss, engine_difference
from credit_trl.rollout.batch import GenerationBatch, is_successful

# Teacher entropy above this share of log V is close to uniform.
NEARLY_UNIFORM = 0.9
# Below this student probability of the support the loss ignores most of the student's distribution.
LOW_SUPPORT_MASS = 0.5
# Consecutive generation batches in which the rewards of every group are equal.
FLAT_REWARD_BATCHES = 5
# Tokens that the teacher gives at least this probability, in nats, are accepted.
ACCEPTED = math.log(0.5)
# Root mean square of S_t on accepted tokens as a share of that of ΔV_t on all, below which the credit is not
# input-specific; and the root mean square of ΔV_t in nats above which there is credit at all.
LOW_SPECIFIC_SHARE, SOME_CREDIT = 0.25, 0.1
# Consecutive logs with such credit.
GENERIC_LOGS = 3
# Mean difference between the log-probabilities of vLLM and of the model, in nats; bf16 kernels differ by about 0.01.
ENGINE_MISMATCH = 0.1
# Share of sampled tokens without a finite log-probability of the engine, above which the engine is at fault.
FEW_BAD_LOGPS = 0.001

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
    "flat_reward": "The rewards of every group were equal in {batches} generation batches in a row, {mean:.2f} on "
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
    "{specific:.3f} and {credit:.3f} nats), in {logs} logs in a row: the feedback makes the same tokens "
    "likely under any prompt, so λ lowers the reward of the answer itself. Return feedback that is read together with "
    "the prompt, such as a letter, a position or a failing check, instead of the answer; or set `contrastive_coef=0`.",
    "lost_gradient": "The loss is not 0 and its gradient is exactly 0: an operation between the trained weights and "
    "the loss blocks gradients. Check that the forward pass uses the weights that train (`target_modules`), and that "
    "a quantised base passes gradients on this device.",
} | {
    f"engine_{kind}": f"The engine's log-probabilities of {{share:.1%}} of the sampled tokens are {kind} "
    f"(`sampling/frac_{kind}_logps`), so these tokens have no ratio, or its bound. Check the engine's weights and "
    "precision, and that it returns log-probabilities."
    for kind in ("missing", "infinite")
}


class CreditWarning(UserWarning):
    """A sign that the run does not learn what it should."""


class Alarms:
    """Warnings, each raised once a run, where enabled: on the main process only."""

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self.raised: set[str] = set()
        self._flat = 0
        self._generic = 0

    def raise_once(self, cause: str, message: str) -> None:
        if self.enabled and cause not in self.raised:
            self.raised.add(cause)
            warnings.warn_explicit(message, CreditWarning, "credit_trl", 0)  # no source line in the output

    def raise_if(self, holds: bool, cause: str, **values: Any) -> None:
        """Raise the warning of a cause of `_MESSAGES`, with the values that its message names."""
        if holds:
            self.raise_once(cause, _MESSAGES[cause].format(**values))

    def check_contexts(self, share: dict[str, float], frac_skipped: float = 0.0) -> None:
        """Warn where no sample has a teacher, none has a contrast prompt, or all feedback is dropped.

        Args:
            share: result of `context_metrics`.
            frac_skipped: share of the samples whose verifier failed, which explains a batch without teacher.
        """
        no_teacher = share["credit/frac_without_teacher"]
        no_contrast = share["credit/frac_without_contrast"]
        dropped = share["credit/frac_feedback_dropped"]
        self.raise_if(no_teacher == 1.0 and frac_skipped == dropped == 0.0, "no_teacher")
        self.raise_if(no_contrast > 0.0 and math.isclose(no_contrast + no_teacher, 1.0), "no_contrast")
        self.raise_if(dropped > 0.0 and share["credit/frac_with_feedback"] == 0.0, "feedback_dropped")

    def check_rewards(self, all_groups_flat: bool, mean: float) -> None:
        """Warn where the rewards of every group are equal in several generation batches in a row; `mean` is theirs."""
        self._flat = self._flat + 1 if all_groups_flat else 0
        self.raise_if(self._flat >= FLAT_REWARD_BATCHES, "flat_reward", batches=self._flat, mean=mean)

    def check_engine(self, metrics: Mapping[str, Sequence[float]]) -> None:
        """Warn where vLLM's log-probabilities differ from the model's, if TRL's `metrics` have them."""
        difference = (metrics.get("sampling/sampling_logp_difference/mean") or [0.0])[-1]
        self.raise_if(difference > ENGINE_MISMATCH, "engine_mismatch", difference=difference)
        for kind in ("missing", "infinite"):
            share = metrics.get(f"sampling/frac_{kind}_logps", [0.0])[-1]
            self.raise_if(share > FEW_BAD_LOGPS, f"engine_{kind}", share=share)

    def check_tokens(self, metrics: dict[str, float], vocabulary: int) -> None:
        """Warn about a teacher close to uniform, a support with little probability, and generic credit in a log."""
        entropy = metrics.get("credit/teacher_entropy", 0.0)
        largest = math.log(vocabulary)
        self.raise_if(entropy > NEARLY_UNIFORM * largest, "uniform_teacher", entropy=entropy, largest=largest)
        mass = metrics.get("credit/support_mass_student", 1.0)
        self.raise_if(mass < LOW_SUPPORT_MASS, "low_mass", mass=mass)
        specific = metrics.get("credit/s_accepted", math.nan)
        credit = math.hypot(*(metrics.get(f"credit/delta_v_{moment}", math.nan) for moment in ("mean", "std")))
        if not math.isnan(specific):
            is_generic = credit > SOME_CREDIT and specific < LOW_SPECIFIC_SHARE * credit
            self._generic = self._generic + 1 if is_generic else 0
        values = {"specific": specific, "credit": credit, "logs": self._generic}
        self.raise_if(self._generic >= GENERIC_LOGS, "generic_credit", **values)

    def check_gradient(self, logs: Mapping[str, float], last: Mapping[str, float]) -> float:
        """Warn where the loss of tokens with an advantage has a gradient of exactly 0.

        Args:
            logs: `loss` and `grad_norm`, the norm of the last step.
            last: metrics of the last micro-batch.

        Returns:
            1.0 where the gradient is lost, else 0.0; NaN where no step is logged or its tokens had no loss.
        """
        moments = [last.get(f"credit/advantage_{moment}", math.nan) for moment in ("mean", "std")]
        if logs.get("grad_norm") is None or math.isnan(moments[0]) or not logs.get("loss"):
            return math.nan
        is_lost = logs["grad_norm"] == 0.0 and any(moments)
        self.raise_if(is_lost, "lost_gradient")
        return float(is_lost)


def context_metrics(
    contexts: Sequence[TokenContexts], wants_contrast: bool, reduce: Callable[[Tensor], Tensor]
) -> dict[str, float]:
    """Shares of samples of the global generation batch, `credit/frac_…`.

    Args:
        contexts: contexts of the local samples.
        wants_contrast: λ is not 0: a sample with a teacher and no contrast prompt then counts as without contrast.
        reduce: sums a vector over processes. Every process calls it once.
    """
    taught = [c for c in contexts if c.teacher is not None]
    counts = {
        "with_demonstration": sum(c.privileged.demonstration is not None for c in taught),
        "with_feedback": sum(c.privileged.feedback is not None or c.privileged.turns is not None for c in taught),
        "without_teacher": len(contexts) - len(taught),
        "without_contrast": sum(wants_contrast and not c.contrasts for c in taught),
        "context_cut": sum(c.cut for c in contexts),
        "feedback_dropped": sum(c.feedback_dropped for c in contexts),
    }
    *shares, total = reduce(torch.tensor([*counts.values(), len(contexts)], dtype=torch.float32)).tolist()
    return {f"credit/frac_{name}": count / total for name, count in zip(counts, shares, strict=True)}


# Not defined for `distillation_support="sampled"`: one token is no distribution.
_NOT_SAMPLED = {
    f"credit/{name}" for name in ("kl_to_target", "kl_to_teacher", "support_mass_student", "support_mass_teacher")
}


def token_sums(loss: MicroBatchLoss) -> dict[str, Float[Tensor, " 2"]]:
    """Sum and count of each metric over the N local tokens of a micro-batch that carry loss; N may be 0.

    A standard deviation or root mean square has the sum of squares. Where the loss uses what a vLLM engine reported,
    TRL's means of it are among them, and the median ratio of the micro-batch. Nothing waits for the device.
    """
    terms, contrasted = loss.terms, loss.contrasted
    f, generic = terms.teacher_token_logps, terms.generic_token_logps
    dtype = torch.float32 if f.device.type == "mps" else torch.float64
    delta_v = f - terms.token_logps
    # Not `values[contrasted]`, which waits for the device.
    specific = torch.where(contrasted, f - generic, 0.0)
    accepted = contrasted & (f > ACCEPTED)
    one = f.new_ones((), dtype=dtype)
    tokens = len(f)
    contrasts = contrasted.sum()
    values: dict[str, tuple[Tensor, Tensor | int]] = {
        "credit/delta_v_mean": (delta_v, tokens),
        "credit/delta_v_std": (delta_v.to(dtype).pow(2), tokens),
        "credit/advantage_mean": (terms.advantages, tokens),
        "credit/advantage_std": (terms.advantages.to(dtype).pow(2), tokens),
        "credit/kl_to_target": (terms.kl_to_target, tokens),
        "credit/support_mass_student": (terms.student_mass, tokens),
        "credit/support_mass_teacher": (terms.teacher_mass, tokens),
        "credit/teacher_entropy": (terms.teacher_entropy, tokens),
        "credit/distillation_loss": (terms.token_loss, tokens),
        "entropy": (terms.entropy, tokens),
        "credit/s_mean": (specific, contrasts),
        "credit/s_std": (specific.to(dtype).pow(2), contrasts),
        "credit/s_accepted": (torch.where(accepted, specific, 0.0).to(dtype).pow(2), accepted.sum()),
        "credit/generic_mean": (torch.where(contrasted, generic, 0.0), contrasts),
        "credit/kl_to_teacher": (torch.where(contrasted, terms.kl_to_teacher, 0.0), contrasts),
        "credit/teacher_fidelity": (loss.fidelity.nan_to_num(), ~loss.fidelity.isnan()),
        "credit/padding_factor": (one * loss.read, loss.valid),
    }
    if loss.engine_logps is not None:
        difference = engine_difference(terms.policy_logps, loss.engine_logps).abs()
        values |= {
            "sampling/importance_sampling_ratio/mean": (terms.ratio, tokens),
            "sampling/importance_sampling_ratio/median": (terms.ratio.median().nan_to_num(), int(tokens > 0)),
            "sampling/sampling_logp_difference/mean": (difference, tokens),
            "sampling/frac_missing_logps": (loss.engine_logps.isnan(), tokens),
            "sampling/frac_infinite_logps": (loss.engine_logps.isinf(), tokens),
        }
    return {name: torch.stack([x.to(dtype).sum(), one * count]) for name, (x, count) in values.items()}


def token_means(sums: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Means, standard deviations and the root mean square of `token_sums`, in nats; NaN where no token counts."""
    means = {name: total / count if count else math.nan for name, (total, count) in sums.items()}
    means["credit/s_accepted"] = math.sqrt(means["credit/s_accepted"])
    for name in ("credit/advantage", "credit/delta_v", "credit/s"):
        variance = means[f"{name}_std"] - means[f"{name}_mean"] ** 2
        means[f"{name}_std"] = 0.0 if variance <= 0.0 else math.sqrt(variance)  # NaN stays NaN
    return means


class TokenMetrics:
    """Metrics of the credit at the sampled tokens of all micro-batches since the last log.

    They are added up on the device, and read once a log. A mean of the micro-batches' means would give tokens of
    short completions more weight, which share a micro-batch.

    Args:
        config: of the run.
        reduce: sums a tensor over processes. Every process calls it once for each log.
    """

    def __init__(self, config: CreditConfig, reduce: Callable[[Tensor], Tensor]) -> None:
        self._dropped = set(_NOT_SAMPLED if config.distillation_support == "sampled" else ())
        if config.distillation_weight < 1.0:  # GRPO logs its own
            self._dropped.add("entropy")
        self._reduce = reduce
        self._names: list[str] = []
        self._sums: dict[str, Float[Tensor, "2 m 2"]] = {}  # mode -> sums of all micro-batches, and of the last

    def add(self, mode: str, loss: MicroBatchLoss) -> None:
        """Add a micro-batch of `"train"` or `"eval"`."""
        sums = token_sums(loss)
        self._names = list(sums)
        last = torch.stack(list(sums.values()))
        total = last + self._sums[mode][0] if mode in self._sums else last
        self._sums[mode] = torch.stack([total, last])

    def read(self, mode: str) -> list[dict[str, float]]:
        """Metrics of all micro-batches since the last call, and of the last one; both empty without any."""
        if mode not in self._sums:
            return [{}, {}]
        sums = self._reduce(self._sums.pop(mode)).tolist()
        means = [token_means(dict(zip(self._names, rows, strict=True))) for rows in sums]
        return [{name: value for name, value in of.items() if name not in self._dropped} for of in means]


def teacher_success_weights(
    batch: GenerationBatch, contexts: Sequence[TokenContexts], mask: Bool[Tensor, "B T"], threshold: float
) -> tuple[Float[Tensor, " B"], int, int]:
    """Weights of the local samples, and the numbers of mixed groups and of samples with a teacher and with loss.

    The weights w give Σ_i w_i m_i = mean of m over successes − mean over failures, averaged over mixed groups. A group
    is mixed where it has successes and failures among its samples with a teacher, with loss and with a reward; other
    samples have weight 0. All weights are NaN where no group is mixed. Every process must call it.

    Args:
        mask: True on the policy's own tokens.
    """
    has_loss = mask.any(dim=1).tolist()
    is_scored = gather_object([c.teacher is not None and loss for c, loss in zip(contexts, has_loss, strict=True)])
    successful = is_successful(batch.rewards, threshold)
    has_reward = [not math.isnan(reward) for reward in batch.rewards]
    weights = [0.0] * len(is_scored)
    mixed = 0
    for start in range(0, len(is_scored), batch.group_size):
        end = min(start + batch.group_size, len(is_scored))
        group = [i for i in range(start, end) if is_scored[i] and has_reward[i]]
        count = sum(successful[i] for i in group)
        if 0 < count < len(group):
            mixed += 1
            for i in group:
                weights[i] = 1.0 / count if successful[i] else -1.0 / (len(group) - count)
    local = [weights[i] / mixed if mixed else math.nan for i in batch.indices]
    return torch.tensor(local, device=mask.device), mixed, sum(is_scored)


def drop_undefined(metrics: MutableMapping[str, Sequence[float]]) -> None:
    """Remove metrics without a finite value, which loggers would show as NaN or None."""
    for name, values in list(metrics.items()):
        if not any(value is not None and math.isfinite(value) for value in values):
            del metrics[name]
