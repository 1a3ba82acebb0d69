"""Weights and their updates: NaN and infinities, and changes that the dtype rounds away."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import TrainerCallback

from credit_trl.teacher.sharding import local_part
from credit_trl.training.metrics import Alarms
from credit_trl.training.optional import OptionalEvents

# Stored scores of the teacher. A NaN in them does not always make the loss NaN.
_SCORES = ("teacher_token_logps", "generic_token_logps")
# Share of the weights with a gradient that the first update changes, below which it is an alarm. Of fp32 weights
# nearly all change at a learning rate of 1e-6, of bf16 weights about 1 %.
FEW_CHANGED = 0.2
# Weights of each parameter that are compared.
_SAMPLE = 1024


class NonFiniteError(RuntimeError):
    """Loss, gradient, weights or teacher are not finite. Weights and checkpoints are those of the step before."""


def guarded(loss: Tensor, inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """The loss of a micro-batch with a NaN gradient where it is not finite, and whether it is, on its device.

    A loss is finite if no stored score of the teacher is NaN either, and then unchanged bit for bit. The reduction of
    the gradients makes the NaN of one process the global gradient norm of all, without a collective.
    """
    finite = loss.detach().isfinite().all()
    for name in _SCORES:
        if isinstance(scores := inputs.get(name), Tensor):
            finite = finite & ~(scores.isnan() & inputs["completion_mask"].bool()).any().to(finite.device)
    return loss * torch.where(finite, 1.0, math.nan).to(loss), finite


def nonfinite_weight(model: nn.Module, teacher: Mapping[str, Tensor]) -> str | None:
    """The first weight with NaN or an infinity in the parts that this process holds, in words; None without any.

    `model` is the policy; `teacher` has the teacher's weights, none for a live one.
    """
    for owner, weights in (("policy", dict(model.named_parameters())), ("teacher", teacher)):
        flags = [_is_finite(weight) for weight in weights.values()]  # all are queued before one is read
        for name, flag in zip(weights, flags, strict=True):
            if not flag:
                return f"{owner}'s weight `{name}`"
    return None


def _is_finite(weight: Tensor) -> Bool[Tensor, ""]:
    """Whether the part of a weight that this process holds is finite."""
    part = local_part(weight)
    return (part.float() if part.itemsize == 1 else part).isfinite().all()  # fp8 has no such test


def nonfinite_moment(optimizer: Any) -> str | None:
    """The first number of an optimizer's state that is not finite, in words; None without any, or without a state."""
    for group in getattr(optimizer, "param_groups", ()):
        for weight in group["params"]:
            for name, value in getattr(optimizer, "state", {}).get(weight, {}).items():
                is_number = isinstance(value, Tensor) and value.is_floating_point() and value.itemsize > 1
                if is_number and not local_part(value).isfinite().all():
                    return f"optimizer's `{name}` of a weight of shape {tuple(weight.shape)}"
    return None


def nonfinite_samples(
    token_losses: Float[Tensor, " N"], weights: Float[Tensor, " N"], samples: Int[Tensor, " N"], count: int
) -> Bool[Tensor, " B"]:
    """Which of the `count` samples of a micro-batch have a token with weight whose loss is not finite."""
    is_bad = ~token_losses.isfinite() & (weights != 0)
    return torch.zeros(count, device=is_bad.device).index_add(0, samples, is_bad.float()) > 0


class LossReport(NamedTuple):
    """What the losses of one micro-batch say of its samples."""

    is_finite: Tensor  # scalar
    inputs: Mapping[str, Any]  # its tensors
    nonfinite: Bool[Tensor, " B"] | None  # `nonfinite_samples`; None where only GRPO's loss is computed

    def bad_prompt(self) -> list[int] | None:
        """Token ids of the prompt of the first sample with a loss that is not finite; None without any."""
        inputs = self.inputs
        if self.nonfinite is None or not self.nonfinite.any():
            return None
        sample = int(self.nonfinite.nonzero()[0])
        return inputs["prompt_ids"][sample][inputs["prompt_mask"][sample].bool()].tolist()


def source_of(
    model: nn.Module, teacher: Mapping[str, Tensor], batches: Iterable[Mapping[str, Any]], loss_is_finite: bool
) -> str:
    """Where a gradient norm that is not finite comes from, by what this process holds.

    `batches` are the micro-batches of the generation batch with their stored scores.
    """
    if name := nonfinite_weight(model, teacher):
        return f"the {name}"
    for name in _SCORES:
        if any(isinstance(batch.get(name), Tensor) and batch[name].isnan().any() for batch in batches):
            return f"the teacher's scores (`{name}`)"
    if not loss_is_finite:
        return "the loss of the update, by the policy's logits or scores of probability 0"
    return "the gradient of the update, or another process"


def reduce_gradients_in_fp32(accelerator: Accelerator) -> None:
    """Let FSDP2 reduce and accumulate gradients in fp32. Call it before accelerate wraps the policy.

    accelerate's policy for bf16 computes and reduces in bf16: the error of the accumulated gradient is .27 % (RMS)
    with 4 micro-batches and .50 % with 16. Products of forward and backward stay in bf16. No effect without FSDP.

    Raises:
        ValueError: FSDP has version 1.
    """
    if accelerator.distributed_type != "FSDP":
        return
    plugin = accelerator.state.fsdp_plugin
    if plugin.fsdp_version != 2:
        raise ValueError("FSDP version 1 is not supported: set `fsdp_version: 2` in the accelerate configuration.")
    if plugin.mixed_precision_policy is not None:
        plugin.mixed_precision_policy = replace(plugin.mixed_precision_policy, reduce_dtype=torch.float32)


class _WeightSample(NamedTuple):
    """Elements of a weight before the update."""

    weight: Tensor
    values: Tensor
    has_grad: Bool[Tensor, " n"]


class WeightChange(OptionalEvents, TrainerCallback):
    """Compares a sample of the weights before and after the first update, with one synchronisation.

    An update without a learning rate, as at the start of a warm-up, or without gradients is not compared. Neither are
    those of DeepSpeed, whose optimizer steps in the backward pass, and of fp16, whose loss scale may skip the first.
    """

    def __init__(self, alarms: Alarms, model: nn.Module) -> None:
        self.alarms = alarms
        self._samples: list[_WeightSample] = []
        self._is_done = False
        trained = {weight.dtype for weight in model.parameters() if weight.requires_grad}
        low = trained & {torch.bfloat16, torch.float16}
        names = ", ".join(map(str, low)).replace("torch.", "")
        alarms.raise_if(bool(low), "low_precision", names=names)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._is_done or args.fp16 or args.deepspeed or not any(kwargs["lr_scheduler"].get_last_lr()):
            return
        for weight in kwargs["model"].parameters():
            if weight.grad is not None:
                self._samples.append(_WeightSample(weight, _sample(weight).clone(), _sample(weight.grad) != 0))

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self._samples:
            return
        counts = torch.zeros(2, dtype=torch.long, device=self._samples[0].values.device)
        for sample in self._samples:
            is_changed = (_sample(sample.weight) != sample.values) & sample.has_grad
            counts += torch.stack([is_changed.sum(), sample.has_grad.sum()]).to(counts.device)
        self._samples = []
        changed, total = counts.tolist()
        self._is_done = total > 0
        self.alarms.raise_if(changed < FEW_CHANGED * total, "weights_unchanged", share=changed / max(total, 1))


def _sample(weight: Tensor) -> Tensor:
    """Evenly spaced elements of the part of a weight that this process holds."""
    flat = local_part(weight.detach()).flatten()
    return flat[:: max(1, flat.numel() // _SAMPLE)]
