"""Metrics of the credit that a run logs."""

from __future__ import annotations

import math
from collections.abc import Callable, MutableMapping, Sequence

import torch
from accelerate.utils import gather_object
from jaxtyping import Bool, Float
from torch import Tensor

from credit_trl.config import CreditConfig
from credit_trl.contexts.tokens import TokenContexts
from credit_trl.loss.terms import MicroBatchLoss, engine_difference
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


class TokenMetrics:
    """Metrics of the credit at the sampled tokens of all micro-batches since the last log.

    They are added up on the device, and read once a log. A mean of the micro-batches' means would give tokens of
    short completions more weight, which share a micro-batch. `reduce` sums a tensor over processes; every process
    calls it once for each log.
    """

    def __init__(self, config: CreditConfig, reduce: Callable[[Tensor], Tensor]) -> None:
        self._dropped = set(_NOT_SAMPLED if config.distillation_support == "sampled" else ())
        if config.distillation_weight < 1.0:  # GRPO logs its own
            self._dropped.add("entropy")
        self._reduce = reduce
        self._names: list[str] = []
        self._sums: dict[str, Float[Tensor, "m 2"]] = {}  # by mode

    def add(self, mode: str, loss: MicroBatchLoss) -> None:
        """Add a micro-batch of `"train"` or `"eval"`."""
        sums = token_sums(loss)
        self._names = list(sums)
        added = torch.stack(list(sums.values()))
        self._sums[mode] = self._sums[mode] + added if mode in self._sums else added

    def read(self, mode: str) -> dict[str, float]:
        """Means, standard deviations and the root mean square of the micro-batches since the last call, in nats.

        A value is NaN where no token counts for it. Empty without any micro-batch.
        """
        if mode not in self._sums:
            return {}
        sums = zip(self._names, self._reduce(self._sums.pop(mode)).tolist(), strict=True)
        means = {name: total / count if count else math.nan for name, (total, count) in sums}
        means["credit/s_accepted"] = math.sqrt(means["credit/s_accepted"])
        for name in ("credit/advantage", "credit/delta_v", "credit/s"):
            variance = means[f"{name}_std"] - means[f"{name}_mean"] ** 2
            means[f"{name}_std"] = 0.0 if variance <= 0.0 else math.sqrt(variance)  # NaN stays NaN
        return {name: value for name, value in means.items() if name not in self._dropped}


def teacher_success_weights(
    batch: GenerationBatch, contexts: Sequence[TokenContexts], mask: Bool[Tensor, "B T"], threshold: float
) -> tuple[Float[Tensor, " B"], int, int]:
    """Weights of the local samples, and the numbers of mixed groups and of samples with a teacher and with loss.

    The weights w give Σ_i w_i m_i = mean of m over successes − mean over failures, averaged over mixed groups. A group
    is mixed where it has successes and failures among its samples with a teacher, with loss and with a reward; other
    samples have weight 0. All weights are NaN where no group is mixed. `mask` is True on the policy's own tokens.
    Every process must call it.
    """
    has_loss = mask.any(dim=1).tolist()
    is_scored = gather_object([c.teacher is not None and loss for c, loss in zip(contexts, has_loss, strict=True)])
    successful = is_successful(batch.rewards, threshold)
    counts = [scored and not math.isnan(reward) for scored, reward in zip(is_scored, batch.rewards, strict=True)]
    weights = [0.0] * len(is_scored)
    mixed = 0
    for start in range(0, len(is_scored), batch.group_size):
        group = [i for i in range(len(is_scored))[start : start + batch.group_size] if counts[i]]
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
