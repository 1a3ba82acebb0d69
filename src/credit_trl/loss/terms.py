"""Values that travel with the loss: its configuration, the tokens that carry it, and its terms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from credit_trl.loss.correction import EngineTokens, clipped_ratio
from credit_trl.loss.scores import SupportConfig
from credit_trl.objective import Form


@dataclass(frozen=True)
class LossConfig:
    """How the loss of a token is formed.

    Args:
        form: see `objective.credit_target`.
        alpha: see `objective.distillation_loss`; `"sampled"` takes 1 only, its loss is `−sg[R_t] log π_θ(y_t)`.
        is_clip: upper bound on the detached ratio `exp(log π_θ − old)` that multiplies the loss of a token; None for
            no ratio.
        adds_to_grad: form the gradient in the backward pass and add that of the head to its `.grad`, where this exists
            in the dtype of the sum. It takes another projection, and no memory for a second gradient of the head. For
            `backward` on one process only: `torch.autograd.grad` and gradient hooks of the head see nothing of it.

    Raises:
        ValueError: alpha is outside [0, 1], or not 1 for `"sampled"`.
    """

    support: SupportConfig = field(default_factory=SupportConfig)
    form: Form = "subtract"
    alpha: float = 1.0
    is_clip: float | None = None
    adds_to_grad: bool = False

    def __post_init__(self) -> None:
        if not 0.0 <= self.alpha <= 1.0 or (self.support.kind == "sampled" and self.alpha != 1.0):
            raise ValueError(
                f"alpha must lie in [0, 1], and be 1 for support 'sampled'; got {self.alpha} for "
                f"{self.support.kind!r}."
            )


@dataclass(frozen=True)
class LossTokens:
    """N sampled tokens that carry loss, indexable by chunk.

    Args:
        ids: (N,), the sampled tokens.
        weights: (N,), weight of each token's loss, without gradient; a token of weight 0 contributes nothing, whatever
            its scores.
        contrastive_coef: (N,), λ; 0 where the sample has no contrast.
        old_logps: (N,), log-probabilities of the sampled tokens at rollout time; None when on-policy.
        engine: what the engine reported of the tokens, where the policy that sampled them is the present one; None
            for no correction.
        normalizer, entropy: (N,), of the student over the vocabulary, where a loss within the support needs them.
        correction: (N,), ratio of a whole completion against the engine.
    """

    ids: Int[Tensor, " N"]
    weights: Float[Tensor, " N"]
    contrastive_coef: Float[Tensor, " N"]
    old_logps: Float[Tensor, " N"] | None = None
    engine: EngineTokens | None = None
    normalizer: Float[Tensor, " N"] | None = None
    entropy: Float[Tensor, " N"] | None = None
    correction: Float[Tensor, " N"] | None = None

    def __getitem__(self, rows: slice) -> LossTokens:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return LossTokens(**{name: None if x is None else x[rows] for name, x in values.items()})

    def to(self, dtype: torch.dtype) -> LossTokens:
        """The tokens with weights, λ and log-probabilities in a dtype."""
        old_logps = None if self.old_logps is None else self.old_logps.to(dtype)
        weights = self.weights.to(dtype)
        return replace(self, weights=weights, contrastive_coef=self.contrastive_coef.to(dtype), old_logps=old_logps)

    def ratio(self, logps: Float[Tensor, " N"], config: LossConfig) -> Float[Tensor, " N"]:
        """Factor of each token's loss: importance ratio and correction for the engine."""
        ratio = clipped_ratio(logps, self.old_logps, config.is_clip)
        if self.correction is not None:
            return ratio * self.correction
        return ratio if self.engine is None else ratio * self.engine.ratio(logps)


@dataclass
class CreditLoss:
    """The loss and per-token values for logging; all but `loss` are detached.

    With `"renormalize"` some values are conditional on the support, see `credit_trl.loss`.

    Args:
        loss: scalar, `Σ_n weight_n · ratio_n · ℓ_n`, differentiable once.
        token_loss: (N,), ℓ_n in nats, without weight and ratio.
        token_logps: (N,), log π_θ of the sampled token.
        entropy: (N,), entropy of the student, nats.
        kl_to_target: (N,), `KL(p ‖ softmax(a))` over the buckets, nats; for `"sampled"` its one-sample estimate −R_t.
        kl_to_teacher: (N,), `KL(softmax(a) ‖ f)` over the buckets, nats; 0 for `"sampled"`.
        student_mass: (N,), probability of the support under the student; NaN where its normaliser is not computed.
        teacher_mass: (N,), the same under the teacher.
        teacher_token_logps: (N,), f at the sampled token.
        generic_token_logps: (N,), Ĝ at the sampled token.
        teacher_entropy: (N,), entropy of the teacher, nats.
        advantages: (N,), R_t at the sampled token.
        ratio: (N,), importance ratio, that of the engine's correction included; ones where there is none.
        policy_logps: (N,), log π_θ of the sampled token over the whole vocabulary; NaN where the normaliser is not
            computed.
    """

    loss: Float[Tensor, ""]
    token_loss: Float[Tensor, " N"]
    token_logps: Float[Tensor, " N"]
    entropy: Float[Tensor, " N"]
    kl_to_target: Float[Tensor, " N"]
    kl_to_teacher: Float[Tensor, " N"]
    student_mass: Float[Tensor, " N"]
    teacher_mass: Float[Tensor, " N"]
    teacher_token_logps: Float[Tensor, " N"]
    generic_token_logps: Float[Tensor, " N"]
    teacher_entropy: Float[Tensor, " N"]
    advantages: Float[Tensor, " N"]
    ratio: Float[Tensor, " N"]
    policy_logps: Float[Tensor, " N"]

    @classmethod
    def joined(cls, parts: Sequence[CreditLoss]) -> CreditLoss:
        """The sum of the losses, and the values of their tokens one after the other."""
        names = [f.name for f in fields(cls) if f.name != "loss"]
        values = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
        return cls(loss=torch.stack([part.loss for part in parts]).sum(), **values)


@dataclass(frozen=True)
class MicroBatchLoss:
    """Loss of one micro-batch.

    Args:
        terms: the loss and its per-token values, over the N tokens that carry loss.
        contrasted: (N,), True where the sample has a contrast.
        samples: (N,), index of each token's sample in the micro-batch.
        fidelity: this process's part of the teacher's fidelity: Σ_i w_i mean_t ΔV_t of sample i, with the weights of
            `training.metrics.success_weights`; NaN where no group is mixed.
        aux_loss: load-balancing loss of a mixture of experts, or None.
        read, valid: tokens of the student's forward pass, with padding and without.
        engine: log-probabilities that the engine reported, where the loss corrects for it.
    """

    terms: CreditLoss
    contrasted: Bool[Tensor, " N"]
    samples: Int[Tensor, " N"]
    fidelity: Float[Tensor, ""]
    aux_loss: Float[Tensor, ""] | None
    read: int
    valid: int
    engine: EngineTokens | None

    @classmethod
    def joined(cls, parts: Sequence[MicroBatchLoss], rows: Sequence[Int[Tensor, " B_k"]]) -> MicroBatchLoss:
        """The loss of a micro-batch from those of its parts, without a router's.

        Args:
            rows: samples of each part, as indices into the micro-batch.
        """
        samples = torch.cat([of[part.samples] for part, of in zip(parts, rows, strict=True)])
        engines = [part.engine for part in parts if part.engine is not None]
        engine = _join_engines(engines, samples, sum(map(len, rows))) if engines else None
        return cls(
            CreditLoss.joined([part.terms for part in parts]),
            torch.cat([part.contrasted for part in parts]),
            samples,
            torch.stack([part.fidelity for part in parts]).sum(),
            None,
            sum(part.read for part in parts),
            sum(part.valid for part in parts),
            engine,
        )


def _join_engines(parts: Sequence[EngineTokens], rows: Int[Tensor, " N"], samples: int) -> EngineTokens:
    """What the engine reported of the tokens of all parts; `rows` are their completions, of `samples`."""
    return replace(parts[0], logps=torch.cat([part.logps for part in parts]), rows=rows, samples=samples)
