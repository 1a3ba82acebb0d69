"""Training metrics and one-time warnings."""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, MutableMapping, Sequence

import torch
from accelerate.utils import gather_object
from jaxtyping import Bool, Float
from torch import Tensor

from credit_trl.config import CreditConfig
from credit_trl.contexts.tokens import TokenContexts
from credit_trl.loss.terms import MicroBatchLoss
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
# Consecutive micro-batches with such credit.
GENERIC_BATCHES = 10
# Mean difference between the log-probabilities of vLLM and of the model, in nats; bf16 kernels differ by about 0.01.
ENGINE_MISMATCH = 0.1

# Share of sampled tokens without a finite log-probability of the engine, above which the engine is at fault.
FEW_BAD_LOGPS = 0.001


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

    def check_contexts(self, share: dict[str, float], frac_skipped: float = 0.0) -> None:
        """Warn where no sample has a teacher, none has a contrast prompt, or all feedback is dropped.

        Args:
            share: result of `context_metrics`.
            frac_skipped: share of the samples whose verifier failed, which explains a batch without teacher.
        """
        has_other_cause = frac_skipped > 0.0 or share["credit/frac_feedback_dropped"] > 0.0
        if share["credit/frac_without_teacher"] == 1.0 and not has_other_cause:
            self.raise_once(
                "no_teacher",
                "No sample of this generation batch has a teacher, so its loss is 0: no rollout reached "
                "`success_reward_threshold` and there is no feedback. Return `Verdict(reward, feedback)` from the "
                "reward function, fill the column `privileged_context`, or lower the threshold.",
            )

        without = share["credit/frac_without_contrast"]
        if without > 0.0 and math.isclose(without + share["credit/frac_without_teacher"], 1.0):
            self.raise_once(
                "no_contrast",
                "No sample with a teacher of this generation batch has a contrast prompt, so λ is 0. In evaluation "
                "raise `per_device_eval_batch_size` or lower `num_generations_eval`; in training see "
                "`contrastive_source`.",
            )

        if share["credit/frac_feedback_dropped"] > 0.0 and share["credit/frac_with_feedback"] == 0.0:
            self.raise_once(
                "feedback_dropped",
                "No feedback of this generation batch fits `max_reprompt_len`: all of it was dropped "
                "(`credit/frac_feedback_dropped`). Increase it above the longest prompt, or return shorter feedback.",
            )

    def check_loss_tokens(self, has_teacher: bool, scored: int) -> None:
        """Warn where samples of a generation batch have a teacher and none of their tokens has a loss.

        Args:
            has_teacher: whether a sample of this process has a teacher.
            scored: samples of all processes with a teacher and tokens that carry loss.
        """
        if has_teacher and not scored:
            self.raise_once(
                "no_tokens",
                "No token of this generation batch has a loss, although samples have a teacher: "
                "`mask_truncated_completions` masks completions that reach `max_completion_length`, and "
                "`on_verifier_error='skip'` those without a verdict.",
            )

    def check_positions(self, longest: int, positions: int | None) -> None:
        """Warn where a sequence of the teacher exceeds the positions that the model was trained with."""
        if positions is not None and longest > positions:
            self.raise_once(
                "positions",
                f"The teacher reads up to {longest} tokens, and the model has `max_position_embeddings={positions}`. "
                "Lower `max_reprompt_len` or `max_completion_length`, or use a model with a longer context.",
            )

    def check_ignored_feedback(self, is_ignored: bool, missing_turns: Sequence[int]) -> None:
        """Warn about feedback that no teacher reads, see `contexts.privileged.ignored_feedback`."""
        if is_ignored:
            self.raise_once(
                "feedback_off",
                "The reward functions return feedback, but `include_environment_feedback=False` ignores it. Set it to "
                "True.",
            )
        if missing_turns:
            self.raise_once(
                "lost_turns",
                f"`Verdict.turn_feedback` has feedback on turn {missing_turns[0]} of a rollout with fewer "
                "turns; it is ignored. Turns count from 0, one for each answer of the model. An environment with the "
                "attribute `current_turn` is given the number while its tools run.",
            )

    def check_rewards(self, all_groups_flat: bool, mean: float) -> None:
        """Warn where the rewards of every group are equal in several generation batches in a row; `mean` is theirs."""
        self._flat = self._flat + 1 if all_groups_flat else 0
        if self._flat >= FLAT_REWARD_BATCHES:
            self.raise_once(
                "flat_reward",
                f"The rewards of every group were equal in {self._flat} generation batches in a row, {mean:.2f} on "
                "average in the last. The model solves all of these prompts or none, or the verifier does not tell "
                "completions apart: look at a few with `log_completions=True`.",
            )

    def check_engine(self, metrics: Mapping[str, Sequence[float]]) -> None:
        """Warn where vLLM's log-probabilities differ from the model's, if TRL's `metrics` have them."""
        differences = metrics.get("sampling/sampling_logp_difference/mean")
        if differences and differences[-1] > ENGINE_MISMATCH:
            self.raise_once(
                "engine_mismatch",
                f"The log-probabilities of the sampled tokens under vLLM and under the model differ "
                f"by {differences[-1]:.2f} nats on average (`sampling/sampling_logp_difference/mean`). Check that "
                "the engine has the policy's weights, that both compute in the same precision, and that a server runs "
                "with `--logprobs-mode processed_logprobs`.",
            )
        for kind in ("missing", "infinite"):
            share = metrics.get(f"sampling/frac_{kind}_logps", [0.0])[-1]
            if share > FEW_BAD_LOGPS:
                self.raise_once(
                    f"engine_{kind}",
                    f"The engine's log-probabilities of {share:.1%} of the sampled tokens are {kind} "
                    f"(`sampling/frac_{kind}_logps`), so these tokens have no ratio, or its bound. "
                    "Check the engine's weights and precision, and that it returns log-probabilities.",
                )

    def check_tokens(self, metrics: dict[str, float], vocabulary: int) -> None:
        """Warn about a teacher close to uniform, a support with little probability, and credit
        that is not input-specific, by the metrics of `token_means`.
        """
        if metrics.get("credit/teacher_entropy", 0.0) > NEARLY_UNIFORM * math.log(vocabulary):
            self.raise_once(
                "uniform_teacher",
                f"The teacher is nearly uniform (entropy {metrics['credit/teacher_entropy']:.2f} of at most "
                f"{math.log(vocabulary):.2f} nats). Check its weights and its prompt.",
            )
        if metrics.get("credit/support_mass_student", 1.0) < LOW_SUPPORT_MASS:
            self.raise_once(
                "low_mass",
                f"The support holds {metrics['credit/support_mass_student']:.2f} of the student's probability. "
                "Increase `distillation_topk`.",
            )
        specific = metrics.get("credit/s_accepted", math.nan)
        credit = math.hypot(*(metrics.get(f"credit/delta_v_{moment}", math.nan) for moment in ("mean", "std")))
        if not math.isnan(specific):
            is_generic = credit > SOME_CREDIT and specific < LOW_SPECIFIC_SHARE * credit
            self._generic = self._generic + 1 if is_generic else 0
        if self._generic >= GENERIC_BATCHES:
            self.raise_once(
                "generic_credit",
                f"S_t is near zero on the tokens that the teacher accepts while ΔV_t is not (root mean squares "
                f"{specific:.3f} and {credit:.3f} nats), in {self._generic} micro-batches in a row: the feedback "
                "makes the same tokens likely under any prompt, so λ lowers the reward of the answer itself. Return "
                "feedback that is read together with the prompt, such as a letter, a position or a failing check, "
                "instead of the answer; or set `contrastive_coef=0`.",
            )

    def check_gradient(self, logs: Mapping[str, float], metrics: Mapping[str, Sequence[float]]) -> float:
        """Warn where the loss of tokens with an advantage has a gradient of exactly 0.

        Args:
            logs: `loss` and `grad_norm`, the norm of the last step.
            metrics: metrics of the trainer; the last entry is that of the last micro-batch.

        Returns:
            1.0 where the gradient is lost, else 0.0; NaN where no step is logged or its tokens had no loss.
        """
        moments = [(metrics.get(f"credit/advantage_{m}") or [math.nan])[-1] for m in ("mean", "std")]
        if logs.get("grad_norm") is None or math.isnan(moments[0]) or not logs.get("loss"):
            return math.nan
        is_lost = logs["grad_norm"] == 0.0 and any(moments)
        if is_lost:
            self.raise_once(
                "lost_gradient",
                "The loss is not 0 and its gradient is exactly 0: an operation between the trained weights and "
                "the loss blocks gradients. Check that the forward pass uses the weights that train "
                "(`target_modules`), and that a quantised base passes gradients on this device.",
            )
        return float(is_lost)


_CONTEXT_SHARES = (
    *("with_demonstration", "with_feedback", "without_teacher", "without_contrast"),
    *("context_cut", "feedback_dropped"),
)


def context_metrics(
    contexts: Sequence[TokenContexts], wants_contrast: bool, reduce: Callable[[Tensor], Tensor]
) -> dict[str, float]:
    """Shares of samples of the global generation batch, `credit/frac_…` of `_CONTEXT_SHARES`.

    Args:
        contexts: contexts of the local samples.
        wants_contrast: λ is not 0: a sample with a teacher and no contrast prompt then counts as without contrast.
        reduce: sums a vector over processes. Every process calls it once.
    """
    counts = torch.tensor(
        [
            (
                c.teacher is not None and c.privileged.demonstration is not None,
                c.teacher is not None and (c.privileged.feedback is not None or c.privileged.turns is not None),
                c.teacher is None,
                c.teacher is not None and wants_contrast and not c.contrasts,
                c.cut,
                c.feedback_dropped,
                True,
            )
            for c in contexts
        ],
        dtype=torch.float32,
    )
    *shares, total = reduce(counts.sum(dim=0)).tolist()
    return {f"credit/frac_{name}": count / total for name, count in zip(_CONTEXT_SHARES, shares, strict=True)}


# Means over all tokens, and over those with a contrast, in the order of `token_sums`.
_PER_TOKEN = (
    *("delta_v_mean", "advantage_mean", "kl_to_target", "support_mass_student", "support_mass_teacher"),
    *("teacher_entropy", "entropy", "distillation_loss"),
)
_PER_CONTRAST = ("s_mean", "generic_mean", "kl_to_teacher")
# Not defined for `distillation_support="sampled"`: one token is no distribution.
_NOT_SAMPLED = ("kl_to_target", "kl_to_teacher", "support_mass_student", "support_mass_teacher")


def token_sums(loss: MicroBatchLoss, reduce: Callable[[Tensor], Tensor]) -> list[float]:
    """Sums over the tokens of all processes that carry loss, and numbers of tokens, for `token_means`.

    Those of several micro-batches add up, except the teacher's fidelity, the first. Tokens without a contrast do not
    count in S_t, Ĝ_t and the divergence to the teacher.

    Args:
        loss: the loss of the N local tokens; N may be 0.
        reduce: sums a vector over processes. Every process calls it once.
    """
    terms, contrasted = loss.terms, loss.contrasted
    f, generic, student = terms.teacher_token_logps, terms.generic_token_logps, terms.token_logps
    per_token = (
        *(f - student, terms.advantages, terms.kl_to_target, terms.student_mass, terms.teacher_mass),
        *(terms.teacher_entropy, terms.entropy, terms.token_loss),
    )
    per_contrast = (f - generic, generic, terms.kl_to_teacher)
    # Not `values[contrasted]`, which waits for the device.
    per_contrast = [torch.where(contrasted, values, 0.0) for values in per_contrast]
    dtype = torch.float32 if f.device.type == "mps" else torch.float64
    sums = [x.to(dtype).sum() for x in (*per_token, *per_contrast)]
    squares = [x.to(dtype).pow(2).sum() for x in (terms.advantages, f - student, per_contrast[0])]
    accepted = contrasted & (f > ACCEPTED)
    squares.append(torch.where(accepted, f - generic, 0.0).to(dtype).pow(2).sum())
    counts = [f.new_full((), count, dtype=dtype) for count in (len(f), loss.read, loss.valid)]
    counts += [contrasted.to(dtype).sum(), accepted.to(dtype).sum()]
    return reduce(torch.stack([loss.fidelity.to(dtype), *sums, *squares, *counts])).tolist()


def token_means(sums: Sequence[float], is_sampled: bool) -> tuple[dict[str, float], float]:
    """Means and standard deviations at the sampled tokens, in nats, from `token_sums`.

    Returns:
        `credit/…`, NaN where no token counts, which TRL ignores in the mean of a log; and the student's entropy.
    """
    names = (*_PER_TOKEN, *_PER_CONTRAST)
    fidelity, *totals = sums[: 1 + len(names)]
    square, delta_square, specific_square, accepted_square = sums[1 + len(names) : -5]
    tokens, read, valid, contrasts, accepts = sums[-5:]
    divisors = [tokens] * len(_PER_TOKEN) + [contrasts] * len(_PER_CONTRAST)
    means = {name: _ratio(total, count) for name, total, count in zip(names, totals, divisors, strict=True)}
    entropy = means.pop("entropy")
    means["advantage_std"] = _std(means["advantage_mean"], _ratio(square, tokens))
    means["delta_v_std"] = _std(means["delta_v_mean"], _ratio(delta_square, tokens))
    means["s_std"] = _std(means["s_mean"], _ratio(specific_square, contrasts))
    means["s_accepted"] = math.sqrt(_ratio(accepted_square, accepts))
    means["teacher_fidelity"] = fidelity
    means["padding_factor"] = _ratio(read, valid)
    dropped = _NOT_SAMPLED if is_sampled else ()
    return {f"credit/{name}": value for name, value in means.items() if name not in dropped}, entropy


def mean_over_tokens(micro_batches: Sequence[Sequence[float]], is_sampled: bool) -> tuple[dict[str, float], float]:
    """`token_means` over the tokens of several micro-batches, from the `token_sums` of each.

    A mean of the micro-batches' means would give tokens of short completions more weight, which share a micro-batch.
    The teacher's fidelity is no mean over tokens and is dropped.
    """
    means, entropy = token_means([sum(column) for column in zip(*micro_batches, strict=True)], is_sampled)
    del means["credit/teacher_fidelity"]
    return means, entropy


def engine_metrics(loss: MicroBatchLoss, gather: Callable[[Tensor], Tensor]) -> dict[str, float]:
    """TRL's metrics of the vLLM engine, where the loss corrects for it; else none.

    Over the tokens that carry loss, and a ratio of a whole completion counts once for each of its tokens.

    Args:
        loss: the loss of the N local tokens; N may be 0.
        gather: concatenates a tensor over processes. Every process calls it once.
    """
    if loss.engine is None:
        return {}
    ratio, difference = loss.terms.ratio, loss.engine.difference(loss.terms.policy_logps).abs()
    lowest = -torch.cat([-ratio, ratio.new_full((1,), -math.inf)]).max()
    highest = [torch.cat([x, x.new_full((1,), -math.inf)]).max() for x in (ratio, difference)]
    missing = loss.engine.logps.isnan().sum()
    infinite = loss.engine.logps.isinf().sum()
    sums = (ratio.sum(), difference.sum(), ratio.new_full((), len(ratio)), missing, infinite)
    local = torch.stack([lowest, *highest, *(value.to(ratio) for value in sums)])
    columns = list(zip(*gather(local[None]).tolist(), strict=True))
    tokens = sum(columns[5])
    values = {
        "importance_sampling_ratio/min": min(columns[0]),
        "importance_sampling_ratio/mean": _ratio(sum(columns[3]), tokens),
        "importance_sampling_ratio/max": max(columns[1]),
        "sampling_logp_difference/mean": _ratio(sum(columns[4]), tokens),
        "sampling_logp_difference/max": max(columns[2]),
        "frac_missing_logps": _ratio(sum(columns[6]), tokens),
        "frac_infinite_logps": _ratio(sum(columns[7]), tokens),
    }
    return {f"sampling/{name}": value for name, value in values.items() if math.isfinite(value)}


class TokenMetrics:
    """Metrics of the credit at the sampled tokens, of each micro-batch and over all of them since the last log.

    Args:
        config: of the run.
        reduce: sums a vector over processes. Every process calls it once for each micro-batch.
        gather: concatenates a tensor over processes, likewise.
    """

    def __init__(
        self, config: CreditConfig, reduce: Callable[[Tensor], Tensor], gather: Callable[[Tensor], Tensor]
    ) -> None:
        self._is_sampled = config.distillation_support == "sampled"
        self._logs_entropy = config.distillation_weight == 1.0  # otherwise GRPO logs its own
        self._reduce = reduce
        self._gather = gather
        self._sums: dict[str, list[list[float]]] = defaultdict(list)

    def add(self, mode: str, loss: MicroBatchLoss) -> dict[str, float]:
        """Metrics of a micro-batch of `"train"` or `"eval"`."""
        sums = token_sums(loss, self._reduce)
        self._sums[mode].append(sums)
        return token_means(sums, self._is_sampled)[0] | engine_metrics(loss, self._gather)

    def mean(self, mode: str) -> dict[str, float]:
        """Means over the tokens of all micro-batches since the last call; empty without any."""
        micro_batches = self._sums.pop(mode, None)
        if micro_batches is None:
            return {}
        metrics, entropy = mean_over_tokens(micro_batches, self._is_sampled)
        return metrics | {"entropy": entropy} if self._logs_entropy else metrics


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


def _ratio(total: float, count: float) -> float:
    return total / count if count else math.nan


def _std(mean: float, mean_of_squares: float) -> float:
    return math.sqrt(max(mean_of_squares - mean * mean, 0.0)) if not math.isnan(mean) else math.nan
