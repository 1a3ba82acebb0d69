"""Micro-batches with little padding, and no pass of the policy that is not needed.

TRL pads a generation batch to its longest sample, shuffles it and splits it. Here each micro-batch is cut to its own
longest prompt and completion, and the samples of one optimizer step are exchanged between its micro-batches so that
these are even. The gradient is that of the same samples. The arranged batch is the one that a checkpoint stores. With
`update_batch_tokens` a micro-batch is computed in parts, each with its own forward and backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields, replace
from typing import Any

import torch
from accelerate.utils import DistributedType
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from credit_trl.loss.correction import EngineCorrection
from credit_trl.loss.distillation import DistillationLoss, MicroBatchLoss
from credit_trl.loss.scores import Scores
from credit_trl.loss.weights import Reduction
from credit_trl.rollout.batch import loss_mask
from credit_trl.teacher.packing import SHORTEST_SHARED, cannot_pack, enable_packing, shares_beginnings
from credit_trl.training.checkpoints import ResumableTrainer
from credit_trl.training.metrics import Alarms
from credit_trl.training.timing import StageClock

# TRL's tensors (B, T, …), and this package's.
_COMPLETION_FIELDS = {
    "completion_ids",
    "completion_mask",
    "tool_mask",
    "old_per_token_logps",
    "ref_per_token_logps",
    "sampling_per_token_logps",
    "importance_sampling_ratio",
    "advantages",  # (B,), or (B, T) where tokens are weighted
    "loss_weights",
    *(f.name for f in fields(Scores)),
}
# Loss types with a divisor that depends on which samples share a micro-batch.
_DIVIDED_BY_MICRO_BATCH = ("bnpo",)


def arrange(batches: Sequence[dict[str, Any]], window: int, packed: bool) -> list[dict[str, Any]]:
    """Micro-batches of a generation batch, evened and trimmed.

    Args:
        batches: TRL's micro-batches, all of the same number of samples.
        window: number of consecutive micro-batches between which samples may be exchanged.
        packed: the forward pass reads no padding, so that the totals are evened instead of the longest.
    """
    arranged = []
    for start in range(0, len(batches), window):
        inside = batches[start : start + window]
        merged = {name: _join([batch[name] for batch in inside]) for name in inside[0]}
        lengths = (merged["prompt_mask"].sum(dim=1) + merged["completion_mask"].sum(dim=1)).tolist()
        rows = even_groups(lengths, len(inside), packed) if len(inside) > 1 else [list(range(len(lengths)))]
        arranged += [trim({name: _take(values, own) for name, values in merged.items()}) for own in rows]
    return arranged


def even_groups(lengths: Sequence[int], count: int, by_total: bool) -> list[list[int]]:
    """Divide samples into groups of equal size, longest first.

    Args:
        lengths: tokens of each sample; a multiple of `count` samples.
        by_total: even the totals of the groups, each sample going to the group with the fewest tokens; else each group
            holds samples of similar length.
    """
    size = len(lengths) // count
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    if not by_total:
        return [order[i : i + size] for i in range(0, len(order), size)]
    groups: list[list[int]] = [[] for _ in range(count)]
    for sample in order:
        open_groups = (group for group in groups if len(group) < size)
        min(open_groups, key=lambda group: sum(lengths[i] for i in group)).append(sample)
    return groups


def cut_rows(rows: list[int], tokens_of: Callable[[list[int]], int], budget: int, count: int = 1) -> list[list[int]]:
    """Cut rows into consecutive parts of at most `budget` tokens, and into at least `count` where there are as many.

    The largest part is cut in two until all are small enough. A part has at least one row, whatever its tokens.

    Args:
        tokens_of: tokens that a pass over some rows reads.
    """
    parts = [rows]
    while len(parts) < len(rows):
        i = max((i for i, part in enumerate(parts) if len(part) > 1), key=lambda i: tokens_of(parts[i]))
        part = parts[i]
        if len(parts) >= count and tokens_of(part) <= budget:
            break
        middle = min(range(1, len(part)), key=lambda cut: max(tokens_of(part[:cut]), tokens_of(part[cut:])))
        parts[i : i + 1] = [part[:middle], part[middle:]]
    return parts


def trim(batch: dict[str, Any]) -> dict[str, Any]:
    """A micro-batch without the columns that are padding in all of its rows; at least one column is kept."""
    prompt = max(int(batch["prompt_mask"].any(dim=0).sum()), 1)
    used = batch["completion_mask"].any(dim=0).nonzero()
    completion = int(used[-1]) + 1 if len(used) else 1
    trimmed = dict(batch)
    for name, values in batch.items():
        if values is None:
            continue
        if name in ("prompt_ids", "prompt_mask"):
            trimmed[name] = values[:, -prompt:].contiguous()
        elif name in _COMPLETION_FIELDS and values.ndim > 1:
            trimmed[name] = values[:, :completion].contiguous()
    return trimmed


def _join(parts: list[Any]) -> Any:
    if isinstance(parts[0], Tensor):
        return parts[0] if parts[0].ndim == 0 or len(parts) == 1 else torch.cat(parts)
    return None if parts[0] is None else [value for part in parts for value in part]


def _take(values: Any, rows: list[int]) -> Any:
    if values is None or (isinstance(values, Tensor) and values.ndim == 0):
        return values
    return values[rows] if isinstance(values, Tensor) else [values[i] for i in rows]


@contextmanager
def _without_autocast_cache() -> Iterator[None]:
    """Keep no copies of the weights in the dtype of autocast after the layer that reads them.

    TRL's trainer computes the loss under autocast, which keeps them until the loss of all parts is formed. With
    recomputed activations (gradient checkpointing) nothing else needs them: each part reads a weight once.
    """
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


class UnpaddedTrainer(ResumableTrainer):
    """TRL's GRPO trainer with micro-batches of little padding; TRL's own batches at `distillation_weight=0`.

    The subclass sets `alarms`, `clock` and, unless it is None, `distillation`.
    """

    distillation: DistillationLoss | None = None
    alarms: Alarms
    clock: StageClock

    def _prepare_inputs(self, generation_batch: dict[str, Any]) -> dict[str, Any]:
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        if self.distillation is None:
            return inputs
        if not self.model.training:
            return trim(inputs)
        if self._buffered_inputs is not before:
            self._buffered_inputs = arrange(self._buffered_inputs, self._exchange_window, self.distillation.packed)
            inputs = self._buffered_inputs[self._step % self.args.steps_per_generation]
        return inputs

    @property
    def _exchange_window(self) -> int:
        """Micro-batches of a generation batch that belong to one optimizer step; 1 where they must not be changed."""
        accumulated, generated = self.args.gradient_accumulation_steps, self.args.steps_per_generation
        aligned = generated % accumulated == 0 or accumulated % generated == 0
        if not aligned or self.loss_type in _DIVIDED_BY_MICRO_BATCH or self.aux_loss_enabled or self._averages_entropy:
            return 1
        return min(accumulated, generated)

    @property
    def _averages_entropy(self) -> bool:
        """Whether GRPO's part of the loss has an entropy bonus or quantile, which TRL takes over a micro-batch."""
        args = self.args
        has_bonus = args.entropy_coef != 0.0 or args.use_adaptive_entropy
        return self.args.distillation_weight < 1.0 and (has_bonus or args.top_entropy_quantile < 1.0)

    def _reduction(self) -> Reduction:
        train = self.model.training  # an evaluation batch is neither split nor accumulated
        return Reduction(
            self.loss_type,
            accumulation=self.current_gradient_accumulation_steps if train else 1.0,
            max_completion_length=self.max_completion_length,
            num_processes=self.accelerator.num_processes,
            steps_per_generation=self.args.steps_per_generation if train else 1,
        )

    def _without_padding(self, loss: DistillationLoss) -> DistillationLoss:
        """The loss with this trainer's layout of the student's passes and its correction for the engine."""
        in_parts = self.args.update_batch_tokens is not None
        terms = replace(
            loss.loss,
            correction=self._engine_correction(),
            adds_to_grad=in_parts and self.accelerator.distributed_type == DistributedType.NO,
        )
        return replace(loss, loss=terms, packed=self._enable_packing())

    def _enable_packing(self) -> bool:
        """Whether the policy reads packed rows; warns where `packed` is ignored."""
        if not self.args.packed:
            return False
        if reason := cannot_pack(self.model):
            self.alarms.raise_once(
                "not_packed",
                f"`packed=True` has no effect: {reason}. Micro-batches are padded to their longest sample "
                "(`credit/padding_factor`).",
            )
            return False
        enable_packing(self.model)
        return True

    # ------------------------------------------------------------------ parts of a micro-batch

    def _micro_batch_loss(
        self, model: nn.Module, inputs: dict[str, Any], weights: Float[Tensor, "B T"]
    ) -> MicroBatchLoss:
        """The loss of a micro-batch, in parts of `update_batch_tokens`.

        In training the gradients of all parts but the last are formed here, so that the activations of one part are
        held at a time. The loss that is returned has the value of all and the gradient of the last.
        """
        assert self.distillation is not None
        budget, coefficient = self.args.update_batch_tokens, self.args.contrastive_coef
        if budget is None:
            return self.distillation(model, inputs, loss_mask(inputs), weights, coefficient)
        parts, losses = self._parts(inputs, budget), []
        for i, rows in enumerate(parts):
            part = trim({name: _take(values, rows) for name, values in (inputs | {"loss_weights": weights}).items()})
            is_last = i == len(parts) - 1
            without_sync = not is_last and isinstance(model, DistributedDataParallel)
            with model.no_sync() if without_sync else nullcontext(), _without_autocast_cache():
                loss = self.distillation(model, part, loss_mask(part), part["loss_weights"], coefficient)
                if not is_last and torch.is_grad_enabled():
                    self.accelerator.backward(loss.terms.loss)
                    loss.terms.loss = loss.terms.loss.detach()
            losses.append(loss)
        return MicroBatchLoss.joined(losses, [torch.tensor(rows, device=weights.device) for rows in parts])

    def _parts(self, inputs: dict[str, Any], budget: int) -> list[list[int]]:
        """Rows of each part, the same number on every process. Rollouts of a prompt that is read once are together."""
        prompts, completions = (inputs[f"{name}_mask"].sum(dim=1).tolist() for name in ("prompt", "completion"))
        rows, packed, prompt_of = list(range(len(prompts))), self.distillation.packed, list(range(len(prompts)))
        if not packed:
            rows.sort(key=lambda i: prompts[i] + completions[i], reverse=True)  # not where `arrange` had one window
        elif shares_beginnings(self.accelerator.unwrap_model(self.model)):
            ids = list(map(tuple, inputs["prompt_ids"].tolist()))
            prompt_of = [ids.index(ids[i]) if prompts[i] >= SHORTEST_SHARED else i for i in rows]
            rows.sort(key=prompt_of.__getitem__)

        def tokens_of(part: list[int]) -> int:
            if not packed:
                return len(part) * max(prompts[i] + completions[i] for i in part)
            return sum(completions[i] for i in part) + sum(prompts[i] for i in {prompt_of[i] for i in part})

        needed = len(cut_rows(rows, tokens_of, budget))
        if self.accelerator.num_processes > 1:
            counts = self.accelerator.gather(torch.tensor([needed], device=self.accelerator.device))
            needed = int(counts.max())
        return cut_rows(rows, tokens_of, budget, needed)

    # ------------------------------------------------------------------ log-probabilities at rollout time

    def _engine_correction(self) -> EngineCorrection | None:
        """The importance correction for vLLM, where the loss can form it from its own log-probabilities.

        One optimizer step then uses the whole generation batch, so that the policy of the step is that of the rollout.
        TRL's correction, which costs a forward pass, is turned off.
        """
        aligned = self.args.gradient_accumulation_steps % (self.args.steps_per_generation * self.num_iterations) == 0
        wanted = self.use_vllm and self.vllm_importance_sampling_correction
        if not (wanted and aligned and self.args.distillation_weight == 1.0):
            return None
        self.vllm_importance_sampling_correction = False
        return EngineCorrection(
            self.vllm_importance_sampling_mode,
            self.vllm_importance_sampling_clip_min,
            self.vllm_importance_sampling_clip_max,
        )

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Log-probabilities of the policy at rollout time without padding; other calls go to TRL's method."""
        is_plain = not any(value is not None and value is not False for value in kwargs.values())
        is_old = model is self.model and not torch.is_grad_enabled() and is_plain
        if self.distillation is None or not is_old:
            return super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, batch_size, **kwargs
            )
        corrects = self.use_vllm and self.vllm_importance_sampling_correction
        if self.args.distillation_weight == 1.0 and self.args.distillation_is_clip is None and not corrects:
            return None, None, None  # nothing reads them
        prompt = input_ids.shape[1] - logits_to_keep
        batch = {
            "prompt_ids": input_ids[:, :prompt],
            "prompt_mask": attention_mask[:, :prompt],
            "completion_ids": input_ids[:, prompt:],
            "completion_mask": attention_mask[:, prompt:],
        }
        lengths, size = attention_mask.sum(dim=1).tolist(), batch_size or len(input_ids)
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        logps = None
        with self.clock.stage("old_logps"):
            for start in range(0, len(order), size):
                rows = order[start : start + size]
                part = self.distillation.policy_logps(model, {name: x[rows] for name, x in batch.items()})
                logps = part.new_zeros(len(order), logits_to_keep) if logps is None else logps
                logps[rows] = part
        return logps, None, None
