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
from credit_trl.contexts.tokens import CompletionBatch, TokenContexts, context_masks
from credit_trl.loss.correction import EngineTokens
from credit_trl.loss.head import choose_kernels, lm_head
from credit_trl.loss.projection import token_logps
from credit_trl.loss.scores import SupportConfig
from credit_trl.loss.scoring import ScoringConfig, score_completions, stored_scores
from credit_trl.loss.student import credit_loss
from credit_trl.loss.terms import CreditLoss, LossConfig, LossTokens
from credit_trl.teacher.models import Teacher
from credit_trl.teacher.passes import PassConfig
from credit_trl.teacher.policy_pass import Sequences, policy_states
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
        read, valid: tokens of the student's forward pass, with padding and without.
        engine: log-probabilities that the engine reported, where the loss corrects for it.
    """

    terms: CreditLoss
    contrasted: Bool[Tensor, " N"]
    samples: Int[Tensor, " N"]
    fidelity: Float[Tensor, ""]
    aux_loss: Float[Tensor, ""] | None
    read: int = 0
    valid: int = 0
    engine: EngineTokens | None = None

    @classmethod
    def joined(cls, parts: Sequence[MicroBatchLoss], rows: Sequence[Int[Tensor, " B_k"]]) -> MicroBatchLoss:
        """The loss of a micro-batch from those of its parts, without a router's.

        Args:
            rows: samples of each part, as indices into the micro-batch.
        """
        samples = torch.cat([of[part.samples] for part, of in zip(parts, rows, strict=True)])
        engine = None
        if parts[0].engine is not None:
            logps = torch.cat([part.engine.logps for part in parts])
            engine = EngineTokens(logps, samples, sum(map(len, rows)))
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


@dataclass(frozen=True)
class DistillationLoss:
    """Scores completions under the teacher π_ref and forms the student's loss against them.

    Args:
        router_loss: whether the load-balancing loss of a mixture of experts is computed.
        packed: whether the student reads packed rows, see `teacher.packing`.
    """

    teacher: Teacher
    accelerator: Accelerator
    scoring: ScoringConfig
    loss: LossConfig
    router_loss: bool = False
    packed: bool = False

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
        """The loss of a configuration, for a policy with `vocabulary` tokens and the rollout's `temperature`."""
        scoring = ScoringConfig(
            support,
            temperature,
            PassConfig(config.scoring_batch_tokens, config.packed),
            choose_kernels("auto", accelerator.device),
            None,
            vocabulary,
        )
        loss = LossConfig(
            support,
            config.contrastive_form,
            config.distillation_alpha,
            config.distillation_is_clip,
        )
        return cls(teacher, accelerator, scoring, loss, router_loss)

    def score(self, contexts: Sequence[TokenContexts], batch: CompletionBatch) -> dict[str, Tensor]:
        """Tensors that TRL shuffles and splits with a generation batch, batch dimension first.

        Returns:
            `teacher_mask` and `contrast_mask` (B,), and the fields of `Scores`.
        """
        masks = context_masks(contexts, batch.ids.device)
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
            contrastive_coef: λ.
        """
        mask = loss_mask & inputs["teacher_mask"][:, None]
        sequences = Sequences.of(inputs, mask)
        contrasted = inputs["contrast_mask"][sequences.rows]
        old_logps = inputs.get("old_per_token_logps")
        tokens = LossTokens(
            sequences.pick(inputs["completion_ids"]),
            sequences.pick(weights),
            contrasted.to(weights.dtype) * contrastive_coef,
            None if old_logps is None else sequences.pick(old_logps),
            self._engine(inputs, sequences),
        )
        scores = stored_scores(inputs, sequences.pick)
        unwrapped = self.accelerator.unwrap_model(model)

        def student_loss(_: Int[Tensor, " N"]) -> tuple[Tensor, dict[str, Tensor], int, Tensor | None]:
            with self.accelerator.autocast():
                states = policy_states(unwrapped, sequences, packed=self.packed, router_loss=self.router_loss)
            head = lm_head(unwrapped, self.scoring.temperature, self.scoring.kernels)
            terms = credit_loss(states.hidden, head, tokens, scores, self.loss)
            others = {name: value for name, value in vars(terms).items() if name != "loss"}
            return terms.loss, others, states.read, states.aux_loss

        # Inside the wrapper's forward, DDP and FSDP see that backbone and head are used.
        loss, terms, read, aux_loss = run_in_wrapped_forward(model, unwrapped, student_loss, sequences.chosen)
        result = CreditLoss(loss=loss, **terms)
        fidelity = _fidelity(result, inputs.get("success_weights"), sequences.rows, mask)
        valid = sum(sequences.lengths)
        return MicroBatchLoss(result, contrasted, sequences.rows, fidelity, aux_loss, read, valid, tokens.engine)

    def _engine(self, inputs: dict[str, Any], sequences: Sequences) -> EngineTokens | None:
        if self.loss.correction is None or "sampling_per_token_logps" not in inputs:
            return None
        logps = sequences.pick(inputs["sampling_per_token_logps"])
        return EngineTokens(logps, sequences.rows, len(sequences.lengths))

    @torch.no_grad()
    def policy_logps(self, model: nn.Module, inputs: dict[str, Any]) -> Float[Tensor, "B T"]:
        """Log-probabilities of the completion tokens under the policy; 0 on padding. Every process must call it."""
        mask = inputs["completion_mask"].bool()
        sequences, unwrapped = Sequences.of(inputs, mask), self.accelerator.unwrap_model(model)
        ids = sequences.pick(inputs["completion_ids"]).unsqueeze(-1)

        def sampled_logps(_: Int[Tensor, " N"]) -> Tensor:
            with self.accelerator.autocast():
                states = policy_states(unwrapped, sequences, packed=self.packed)
            head = lm_head(unwrapped, self.scoring.temperature, self.scoring.kernels).gathered().detached()
            return token_logps(head, states.hidden, ids, self.loss.chunk_size)

        logps = run_in_wrapped_forward(model, unwrapped, sampled_logps, sequences.chosen)
        return logps.new_zeros(mask.numel()).index_put_((sequences.chosen,), logps).view_as(mask)


def _fidelity(
    terms: CreditLoss,
    success_weights: Float[Tensor, " B"] | None,
    samples: Int[Tensor, " N"],
    mask: Bool[Tensor, "B T"],
) -> Float[Tensor, ""]:
    """Σ_i w_i mean_t ΔV_t over the local samples; NaN for generation batches in a checkpoint of version 0.1."""
    if success_weights is None:
        return terms.loss.new_full((), torch.nan)
    delta_v = (terms.teacher_token_logps - terms.token_logps).to(success_weights.dtype)
    sums = torch.zeros_like(success_weights).index_add_(0, samples, delta_v)
    return (success_weights * sums / mask.sum(dim=1).clamp(min=1)).sum()


def loss_dtype(model: nn.Module) -> torch.dtype:
    """dtype of token weights and loss: fp32, or fp64 for a model in fp64."""
    return torch.promote_types(model.dtype, torch.float32)
