"""Everything that this package needs of a training loop, for loops without `GRPOTrainer`.

A loop samples with its policy, calls `micro_batches`, for each of them `loss`, then its optimizer, and `end_batch`
once it has used the generation batch. `CreditTrainer` takes the same tensors from TRL's loop, whose methods
`trl_hooks.yaml` lists. Where TRL offers another loop this module is the place to change: nothing below `CreditStep`
knows a loop.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from accelerate.utils import send_to_device
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
    prompts = []
    completions = []
    logps = []
    for sample in samples:
        prompts.append(torch.tensor(prompt_ids(step, sample.prompt)))
        completions.append(torch.tensor(sample.completion_ids))
        logps.append(sample.logps)
    tensors = {}
    tensors["prompt_ids"] = pad(prompts, padding_side="left")
    tensors["prompt_mask"] = pad(list(map(torch.ones_like, prompts)), padding_side="left")
    tensors["completion_ids"] = pad(completions)
    tensors["completion_mask"] = pad(list(map(torch.ones_like, completions)))
    if logps[0] is not None:
        tensors["old_per_token_logps"] = pad(logps)
    tensors["num_items_in_batch"] = tensors["completion_mask"].sum()
    return send_to_device(tensors, step.teacher.device)


def generation_batch(samples: Sequence[LoopSample], group_size: int, index: int) -> GenerationBatch:
    """The samples as the `index`-th generation batch of a process that has all of them."""
    batch = GenerationBatch([], [], [], [], [], first=0, group_size=group_size, index=index)
    for sample in samples:
        batch.rows.append({})
        batch.prompts.append(sample.prompt)
        batch.completion_ids.append(sample.completion_ids)
        batch.rewards.append(float(sample.verdict))
        batch.verdict_feedback.append(sample.verdict.feedback)
    return batch


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
        batch = generation_batch(samples, self.config.num_generations, self.batch_count)
        self.batch_count += 1
        tensors = sample_tensors(self.step, samples)
        tensors |= self.step.prepare(batch, tensors)
        batches = []
        for rows in torch.arange(len(samples)).split(self.config.per_device_train_batch_size):
            batches.append(without_padding(take_rows(tensors, rows.tolist())))
        return batches

    def loss(self, model: nn.Module, micro_batch: dict[str, Any]) -> Tensor:
        """Loss of a micro-batch; the gradients of the micro-batches of an optimizer step are summed."""
        return self.step.loss(model, micro_batch, self.config.gradient_accumulation_steps).terms.loss

    def end_batch(self) -> None:
        """Update the teacher, if it is an average of the policy, after the updates of a generation batch."""
        if self.config.teacher_model_kind == "ema":
            self.step.teacher.update(self.config.teacher_update_rate)
