"""What a run says about its credit: numbers every logging step, and one warning for each thing that looks wrong."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence

import torch
from jaxtyping import Bool
from torch import Tensor

from credit_trl.contexts.tokens import TokenContexts
from credit_trl.loss import CreditLoss

# Teacher entropy above this share of log V carries no information worth distilling.
NEARLY_UNIFORM = 0.9
# Below this student mass on the support the loss looks at a minority of what the student does.
LOW_SUPPORT_MASS = 0.5
# Generation batches in a row in which no group's rewards differ.
FLAT_REWARD_BATCHES = 5
# Mean difference between the log-probabilities of vLLM and of the model, in nats; bf16 kernels differ by about 0.01.
ENGINE_MISMATCH = 0.1


class CreditWarning(UserWarning):
    """Something in the run that usually means that it does not learn what was meant."""


class Alarms:
    """Warns once for each cause.

    Args:
        enabled: on the main process only, so that a cause is reported once a run.

    Attributes:
        raised: the causes that have been reported.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self.raised: set[str] = set()
        self._flat = 0

    def raise_once(self, cause: str, message: str) -> None:
        if self.enabled and cause not in self.raised:
            self.raised.add(cause)
            warnings.warn(message, CreditWarning, stacklevel=3)

    def check_contexts(self, share: dict[str, float]) -> None:
        """`share`: `context_metrics`'s, of the global generation batch."""
        if share["credit/frac_without_teacher"] == 1.0:
            self.raise_once(
                "no_teacher",
                "No sample of this generation batch has a teacher: no rollout succeeded "
                "(`success_reward_threshold`) and no feedback came. Return `Verdict(reward, feedback)` from the "
                "reward function, fill `privileged_context`, or lower the threshold. The batch teaches nothing.",
            )

        if share["credit/frac_without_contrast"] == 1.0:
            self.raise_once(
                "no_contrast",
                "No sample of this generation batch has another question to contrast with, so λ is 0 for all of it. "
                "In an evaluation raise `per_device_eval_batch_size` or lower `num_generations_eval`; in training see "
                "`contrastive_source`.",
            )

    def check_unread(self, is_switched_off: bool, lost_turns: Sequence[int]) -> None:
        """Feedback that no teacher reads: `rollouts.unread_feedback`'s."""
        if is_switched_off:
            self.raise_once(
                "feedback_off",
                "Feedback was given, but `include_environment_feedback=False`, so the teacher does not see it.",
            )
        if lost_turns:
            self.raise_once(
                "lost_turns",
                f"`Verdict.turn_feedback` names turn {lost_turns[0]} of a rollout that has fewer turns, so nobody "
                "reads it. Turns count from 0, one for each answer of the model; an environment that has the "
                "attribute `current_turn` finds the number there while its tools run.",
            )

    def check_rewards(self, all_groups_flat: bool) -> None:
        self._flat = self._flat + 1 if all_groups_flat else 0
        if self._flat >= FLAT_REWARD_BATCHES:
            self.raise_once(
                "flat_reward",
                f"All rollouts of every group got the same reward in {self._flat} generation batches in a row. Check "
                "the verifier on a few completions (`log_completions=True`), or the difficulty of the prompts.",
            )

    def check_engine(self, metrics: Mapping[str, Sequence[float]]) -> None:
        """`metrics`: TRL's, by name; those of vLLM are there where its importance ratio is computed."""
        differences = metrics.get("sampling/sampling_logp_difference/mean")
        if differences and differences[-1] > ENGINE_MISMATCH:
            self.raise_once(
                "engine_mismatch",
                f"vLLM and the model give the sampled tokens log-probabilities that differ by {differences[-1]:.2f} "
                "nats on average (`sampling/sampling_logp_difference/mean`). Check that the engine got the policy's "
                "weights, that both compute in the same precision, and that a server runs with `--logprobs-mode "
                "processed_logprobs`.",
            )

    def check_tokens(self, metrics: dict[str, float], vocabulary: int) -> None:
        """`metrics`: `token_metrics`'s."""
        if metrics.get("credit/teacher_entropy", 0.0) > NEARLY_UNIFORM * math.log(vocabulary):
            self.raise_once(
                "uniform_teacher",
                f"The teacher is nearly uniform (entropy {metrics['credit/teacher_entropy']:.2f} of at most "
                f"{math.log(vocabulary):.2f} nats): its weights or its context are not what you think.",
            )
        if metrics.get("credit/support_mass_student", 1.0) < LOW_SUPPORT_MASS:
            self.raise_once(
                "low_mass",
                f"The support holds {metrics['credit/support_mass_student']:.2f} of the student's probability. Raise "
                "`distillation_topk`, or use `distillation_support='student_topk'` or `'full'`.",
            )
        if metrics.get("credit/frac_gated") == 1.0:
            self.raise_once(
                "gate_shut",
                "No position of this batch exceeds `contrastive_gate`, so nothing is contrasted. Lower it: "
                "`credit/frac_gated` logs the share of positions below it.",
            )

    def check_gradient(self, logs: Mapping[str, float], metrics: Mapping[str, Sequence[float]]) -> float:
        """Whether the step that is logged had a loss on tokens with an advantage, and no gradient at all.

        Args:
            logs: `loss` and `grad_norm`, the norm of the last step.
            metrics: this trainer's, by name; the last entry is that of the last step's last micro-batch.

        Returns:
            1.0 where the gradient was lost, else 0.0; NaN where no step is logged, or its tokens had no loss.
        """
        moments = [(metrics.get(f"credit/advantage_{m}") or [math.nan])[-1] for m in ("mean", "std")]
        if logs.get("grad_norm") is None or math.isnan(moments[0]) or not logs.get("loss"):
            return math.nan
        is_lost = logs["grad_norm"] == 0.0 and any(moments)
        if is_lost:
            self.raise_once(
                "lost_gradient",
                "The loss is not 0 and its gradient is exactly 0, so nothing is learnt: something between the trained "
                "weights and the loss stops gradients. Check that the forward pass uses the weights that train "
                "(`target_modules`), and that a quantised base passes gradients on this device.",
            )
        return float(is_lost)


def context_counts(built: Sequence[TokenContexts], *, wants_contrast: bool) -> Tensor:
    """(6,) counts of local samples, to be summed over processes for `context_metrics`.

    Args:
        built: the contexts of the local samples.
        wants_contrast: λ is not 0; a sample with a teacher and no other question then counts as without contrast.
    """
    kinds = torch.tensor(
        [
            (
                c.ids is not None and c.privileged.demonstration is not None,
                c.ids is not None and (c.privileged.feedback is not None or c.privileged.turns is not None),
                c.ids is None,
                c.ids is not None and wants_contrast and len(c.ids) == 1,
                c.cut,
                True,
            )
            for c in built
        ],
        dtype=torch.float32,
    )
    return kinds.sum(dim=0)


def context_metrics(counts: Tensor) -> dict[str, float]:
    """Shares of samples of the global batch, from summed `context_counts`."""
    *kinds, total = counts.tolist()
    names = ("with_demonstration", "with_feedback", "without_teacher", "without_contrast", "context_cut")
    return {f"credit/frac_{name}": count / total for name, count in zip(names, kinds, strict=True)}


def token_metrics(
    terms: CreditLoss, contrasted: Bool[Tensor, " N"], reduce: Callable[[Tensor], Tensor]
) -> dict[str, float]:
    """Means over the tokens of all processes, at the sampled tokens y_t, in nats.

    Args:
        terms: of the N local tokens that carry loss; N may be 0.
        contrasted: (N,), where the sample had a contrast. The others do not count in S, Ĝ, the share of gated
            positions and the divergence to the teacher.
        reduce: sums a vector over processes. It is called once by every process.

    Returns:
        `credit/…`; NaN (which TRL leaves out of a log's mean) where no token counts. `credit/contrasted_tokens` is
        their number.
    """
    f, generic, student = terms.teacher_token_logps, terms.generic_token_logps, terms.token_logps
    per_token = {
        "delta_v_mean": f - student,
        "advantage": terms.advantages,
        "kl_to_target": terms.kl_to_target,
        "support_mass_student": terms.student_mass,
        "support_mass_teacher": terms.teacher_mass,
        "teacher_entropy": terms.teacher_entropy,
        "student_entropy": terms.entropy,
        "distillation_loss": terms.token_loss,
    }
    per_contrast = {
        "s_mean": f - generic,
        "generic_mean": generic,
        "frac_gated": (terms.contrastive_coef == 0).to(f.dtype),
        "kl_to_teacher": terms.kl_to_teacher,
    }
    per_contrast = {name: values[contrasted] for name, values in per_contrast.items()}
    dtype = torch.float32 if f.device.type == "mps" else torch.float64
    sums = [x.to(dtype).sum() for x in (*per_token.values(), *per_contrast.values())]
    squares = [x.to(dtype).pow(2).sum() for x in (terms.advantages, per_contrast["s_mean"])]
    counts = [torch.tensor(len(f), dtype=dtype, device=f.device), contrasted.to(dtype).sum()]
    *totals, square, specific_square, tokens, contrasts = reduce(torch.stack([*sums, *squares, *counts])).tolist()
    names = [f"credit/{name}" for name in (*per_token, *per_contrast)]
    divisors = [tokens] * len(per_token) + [contrasts] * len(per_contrast)
    metrics = {name: _ratio(total, count) for name, total, count in zip(names, totals, divisors, strict=True)}
    metrics["credit/advantage_mean"] = metrics.pop("credit/advantage")
    metrics["credit/advantage_std"] = _std(metrics["credit/advantage_mean"], _ratio(square, tokens))
    metrics["credit/s_std"] = _std(metrics["credit/s_mean"], _ratio(specific_square, contrasts))
    metrics["credit/contrasted_tokens"] = contrasts
    return metrics


def _ratio(total: float, count: float) -> float:
    return total / count if count else math.nan


def _std(mean: float, mean_of_squares: float) -> float:
    return math.sqrt(max(mean_of_squares - mean * mean, 0.0)) if not math.isnan(mean) else math.nan
