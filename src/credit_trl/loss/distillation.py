"""The distillation loss of a micro-batch: scores of the teacher, the student's forward pass, and their loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate import Accelerator
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from credit_trl.config import CreditConfig
from credit_trl.contexts.tokens import CompletionBatch, TokenContexts, context_masks, pack_contexts, unpack_contexts
from credit_trl.loss.head import lm_head
from credit_trl.loss.scores import Scores, SupportConfig, TeacherStates
from credit_trl.loss.scoring import ScoringConfig, gather_states, score_completions, stored_scores
from credit_trl.loss.student import credit_loss
from credit_trl.loss.terms import CreditLoss, LossConfig, LossTokens
from credit_trl.loss.trust_region import TrustRegion
from credit_trl.teacher.causal_lm import completion_states
from credit_trl.teacher.models import Teacher
from credit_trl.teacher.passes import PassConfig
from credit_trl.teacher.sharding import run_in_wrapped_forward


@dataclass(frozen=True)
class MicroBatchLoss:
    """Loss of one micro-batch.

    Args:
        terms: the loss and its per-token values, over the N tokens that carry loss.
        contrasted: (N,), True where the sample has a contrast.
        samples: (N,), index of each token's sample in the micro-batch.
        fidelity: this process's part of the teacher's fidelity: Σ_i w_i mean_t ΔV_t of sample i, with the weights of
            `rollout.batch.success_weights`; NaN where no group is mixed.
        aux_loss: load-balancing loss of a mixture of experts, or None.
    """

    terms: CreditLoss
    contrasted: Bool[Tensor, " N"]
    samples: Int[Tensor, " N"]
    fidelity: Float[Tensor, ""]
    aux_loss: Float[Tensor, ""] | None


@dataclass(frozen=True)
class DistillationLoss:
    """Scores completions under the teacher and forms the student's loss against them.

    Args:
        teacher: π_ref.
        accelerator: the trainer's.
        scoring: how completions are scored.
        loss: how the loss of a token is formed.
        router_loss: whether the load-balancing loss of a mixture of experts is computed.
    """

    teacher: Teacher
    accelerator: Accelerator
    scoring: ScoringConfig
    loss: LossConfig
    router_loss: bool = False

    @classmethod
    def of(
        cls,
        config: CreditConfig,
        teacher: Teacher,
        accelerator: Accelerator,
        support: SupportConfig,
        vocabulary: int,
        temperature: float,
        router_loss: bool,
    ) -> DistillationLoss:
        """The loss of a configuration.

        Args:
            config: the configuration.
            teacher: π_ref.
            accelerator: the trainer's.
            support: tokens that carry the loss.
            vocabulary: V.
            temperature: rollout temperature.
            router_loss: see the class.
        """
        is_mixed = config.teacher_model_kind == "trust_region"
        scoring = ScoringConfig(
            support,
            temperature,
            config.contrastive_baseline,
            PassConfig(config.scoring_batch_tokens, config.scoring_packed),
            config.distillation_kernels,
            config.distillation_chunk_size,
            vocabulary,
            TrustRegion(config.teacher_trust_weight, config.teacher_trust_kl) if is_mixed else None,
        )
        loss = LossConfig(
            support,
            config.contrast_rule,
            config.distillation_alpha,
            config.distillation_is_clip,
            config.distillation_chunk_size,
        )
        return cls(teacher, accelerator, scoring, loss, router_loss)

    def of_base(self, base: Teacher) -> DistillationLoss:
        """The same scores and loss with the initial policy as the teacher."""
        return replace(self, teacher=base, scoring=replace(self.scoring, region=None))

    def score(self, contexts: Sequence[TokenContexts], batch: CompletionBatch) -> dict[str, Tensor]:
        """Tensors that TRL shuffles and splits with a generation batch, batch dimension first.

        Args:
            contexts: prompts of the local samples.
            batch: their completions.

        Returns:
            `teacher_mask` and `contrast_mask` (B,), and the fields of `Scores`; or the contexts, where the support is
            chosen inside the step.
        """
        masks = context_masks(contexts, batch.ids.device)
        if self.scoring.support.in_step:
            return masks | pack_contexts(contexts, batch.ids.device)
        batch = replace(batch, loss_mask=batch.loss_mask & masks["teacher_mask"][:, None])
        return masks | score_completions(self.teacher, contexts, batch, self.scoring)

    def __call__(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        loss_mask: Bool[Tensor, "B T"],
        weights: Float[Tensor, "B T"],
        contrastive_coef: float,
    ) -> MicroBatchLoss:
        """Loss of one micro-batch. Every process must call it, with tokens or without.

        Args:
            model: the student as it is wrapped for distributed training.
            inputs: TRL's micro-batch with the tensors of `score`.
            loss_mask: True on the policy's own tokens; samples without a teacher are masked here.
            weights: weight of each token's loss.
            contrastive_coef: λ.
        """
        mask = loss_mask & inputs["teacher_mask"][:, None]
        contrasted = inputs["contrast_mask"][:, None].expand_as(mask)[mask]
        old_logps = inputs.get("old_per_token_logps")
        tokens = LossTokens(
            inputs["completion_ids"][mask],
            weights[mask],
            contrasted.to(weights.dtype) * contrastive_coef,
            None if old_logps is None else old_logps[mask],
        )
        scores = self._scores(inputs, mask)
        unwrapped = self.accelerator.unwrap_model(model)

        def student_loss(mask: Int[Tensor, "B T"]) -> tuple[Tensor, dict[str, Tensor], Tensor | None]:
            mask = mask.bool()
            with self.accelerator.autocast():
                hidden, aux_loss = completion_states(unwrapped, inputs, router_loss=self.router_loss)
            head = lm_head(unwrapped, self.scoring.temperature, self.scoring.kernels)
            terms = credit_loss(hidden[mask], head, tokens, scores, self.loss)
            return terms.loss, {name: value for name, value in vars(terms).items() if name != "loss"}, aux_loss

        # Inside the wrapper's forward, DDP and FSDP see that backbone and head are used. Forward hooks of
        # `debug="underflow_overflow"` inspect the arguments, and take no bool.
        loss, terms, aux_loss = run_in_wrapped_forward(model, unwrapped, student_loss, mask.long())
        result = CreditLoss(loss=loss, **terms)
        samples = mask.nonzero()[:, 0]
        fidelity = _fidelity(result, inputs.get("success_weights"), samples)
        return MicroBatchLoss(result, contrasted, samples, fidelity, aux_loss)

    def _scores(self, inputs: dict[str, Any], mask: Bool[Tensor, "B T"]) -> Scores | TeacherStates:
        if not self.scoring.support.in_step:
            return stored_scores(inputs, mask)
        batch = CompletionBatch(inputs["completion_ids"], inputs["completion_mask"], mask)
        return gather_states(self.teacher, unpack_contexts(inputs), batch, self.scoring)


def _fidelity(
    terms: CreditLoss, success_weights: Float[Tensor, " B"] | None, samples: Int[Tensor, " N"]
) -> Float[Tensor, ""]:
    """Σ_i w_i mean_t ΔV_t over the local samples; NaN for generation batches in a checkpoint of version 0.1."""
    if success_weights is None:
        return terms.loss.new_full((), torch.nan)
    delta_v = (terms.teacher_token_logps - terms.token_logps).to(success_weights.dtype)
    sums = torch.zeros_like(success_weights).index_add_(0, samples, delta_v)
    return (success_weights * sums / torch.bincount(samples, minlength=len(sums)).clamp(min=1)).sum()


def loss_dtype(model: nn.Module) -> torch.dtype:
    """dtype of token weights and loss: fp32, or fp64 for a model in fp64."""
    return torch.promote_types(model.dtype, torch.float32)
