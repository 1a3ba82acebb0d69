"""Everything that this package needs of a training loop, for loops without `GRPOTrainer`.

A loop samples with its policy, calls `micro_batches`, for each of them `loss`, then its optimizer, and `end_batch`
once it has used the generation batch. `CreditTrainer` takes the same tensors from TRL's loop, whose methods
`trl_hooks.yaml` lists. Where TRL offers another loop this module is the place to change: nothing below `CreditStep`
knows a loop.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from credit_trl.config import CreditConfig
from credit_trl.contexts.tokens import PrivilegedContext
from credit_trl.rollout.batch import GenerationBatch
from credit_trl.rollout.verdict import Verdict
from credit_trl.training.micro_batches import take_rows, without_padding
from credit_trl.training.step import CreditStep
from credit_trl.trl_compat import pad


class LoopSample(NamedTuple):
    """One rollout. Those of a prompt are `num_generations` neighbours in a generation batch."""

    prompt: Any
    completion_ids: list[int]
    verdict: Verdict
    # (T,) log-probabilities of the completion under the policy that sampled it, if that is an older one.
    logps: Tensor | None = None


def prompt_ids(step: CreditStep, prompt: Any) -> list[int]:
    """Token ids of a prompt, as the policy reads it."""
    return step.context_builder.encode(prompt, PrivilegedContext())


def sample_tensors(step: CreditStep, samples: Sequence[LoopSample]) -> dict[str, Any]:
    """TRL's tensors of the samples: prompts padded on the left, completions on the right."""
    prompts = [torch.tensor(prompt_ids(step, sample.prompt)) for sample in samples]
    completions = [torch.tensor(sample.completion_ids) for sample in samples]
    tensors = {
        "prompt_ids": pad(prompts, padding_side="left"),
        "prompt_mask": pad([torch.ones_like(ids) for ids in prompts], padding_side="left"),
        "completion_ids": pad(completions),
        "completion_mask": pad([torch.ones_like(ids) for ids in completions]),
    }
    if samples[0].logps is not None:
        tensors["old_per_token_logps"] = pad([sample.logps for sample in samples])
    tensors["num_items_in_batch"] = tensors["completion_mask"].sum()
    return {name: tensor.to(step.teacher.device) for name, tensor in tensors.items()}


class CreditLoop:
    """A `CreditStep` with what surrounds it in a loop on one process, with text prompts and without GRPO's part.

    Raises:
        ValueError: `distillation_weight` is not 1.
    """

    def __init__(self, step: CreditStep) -> None:
        if step.config.distillation_weight != 1.0:
            raise ValueError("`CreditLoop` computes the distillation loss alone: set `distillation_weight=1`.")
        self.step = step
        self.config: CreditConfig = step.config
        self.batch_count = 0  # generation batches so far, which seed the contrasts

    def prompt_ids(self, prompt: Any) -> list[int]:
        """Token ids of a prompt, as the policy reads it."""
        return prompt_ids(self.step, prompt)

    def micro_batches(self, samples: Sequence[LoopSample]) -> list[dict[str, Any]]:
        """Score a generation batch, and split it into micro-batches of `per_device_train_batch_size` samples."""
        batch = GenerationBatch(
            rows=[{}] * len(samples),
            prompts=[sample.prompt for sample in samples],
            completion_ids=[sample.completion_ids for sample in samples],
            rewards=[float(sample.verdict) for sample in samples],
            verdict_feedback=[sample.verdict.feedback for sample in samples],
            first=0,
            group_size=self.config.num_generations,
            index=self.batch_count,
        )
        self.batch_count += 1
        tensors = sample_tensors(self.step, samples)
        tensors |= self.step.prepare(batch, tensors)
        rows = torch.arange(len(samples)).split(self.config.per_device_train_batch_size)
        return [without_padding(take_rows(tensors, part.tolist())) for part in rows]

    def loss(self, model: nn.Module, micro_batch: dict[str, Any]) -> Tensor:
        """Loss of a micro-batch; the gradients of the micro-batches of an optimizer step are summed."""
        return self.step.loss(model, micro_batch, self.config.gradient_accumulation_steps).terms.loss

    def end_batch(self) -> None:
        """Update the teacher, if it is an average of the policy, after the updates of a generation batch."""
        if self.config.teacher_model_kind == "ema":
            self.step.teacher.update(self.config.teacher_update_rate)
