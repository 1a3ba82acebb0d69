"""One update (scoring, loss and backward pass) of this project's trainer and of TRL's, on identical batches.

`"credit"` is this project's trainer (teacher, C contrasts, loss, backward), `"sdpo"` TRL's `SDPOTrainer` with
`topk_logits` and a tail bucket (teacher, loss, backward), and `"grpo"` TRL's `GRPOTrainer` (loss, backward).
`"mixture"` is this project's trainer at `distillation_weight=0.5`, and `"own grpo"` at 0, without a teacher.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from measure import Sample, counted_tokens, measured
from padded import padding_kept
from trainers import all_wrong, workload_trainer
from trl.trainer.utils import split_tensor_dict
from workload import Workload

from credit_trl.contexts.tokens import TokenContexts

Update = Callable[[], None]
# Kinds that are this project's trainer -> `distillation_weight`.
WEIGHTS = {"credit": 1.0, "mixture": 0.5, "own grpo": 0.0}


def build(kind: str, workload: Workload) -> Callable[[dict[str, Any]], Sample]:
    """Load the models in the child process; return a function that measures one update of a changed workload."""
    trainer = update_trainer(kind, workload)

    def answer(changes: dict[str, Any]) -> Sample:
        changed = workload.with_(**changes)
        update = make_update(kind, trainer, changed)
        try:
            with counted_tokens(trainer.model) as tokens, measured(workload.device) as sample:
                update()
        finally:
            trainer.model.zero_grad(set_to_none=True)
        batch = changed.rollouts()
        sample.tokens = tokens | {"valid": int(batch["prompt_mask"].sum() + batch["completion_mask"].sum())}
        return sample

    return answer


def update_trainer(kind: str, workload: Workload) -> Any:
    """The trainer of a kind for a workload, as `train` would have prepared it."""
    if kind == "credit" and workload.padding == "kept":
        padding_kept()
    of_credit = {"contrastive_source": "dataset", "distillation_weight": WEIGHTS.get(kind)}
    trainer = workload_trainer("credit" if kind in WEIGHTS else kind, workload, all_wrong, of_credit=of_credit)
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    trainer.model.to(trainer.accelerator.device).train()
    if trainer.args.gradient_checkpointing:
        trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
    return trainer


def make_update(kind: str, trainer: Any, workload: Workload) -> Update:
    """A function that makes one update on the workload's batch."""
    batch = workload.rollouts()
    if kind in WEIGHTS:
        return _credit_update(trainer, batch, workload)
    if kind == "grpo":
        batch["advantages"] = torch.linspace(-1, 1, workload.batch, device=workload.device)
    else:
        teacher_prompts = torch.tensor([of_sample[0] for of_sample in workload.contexts()], device=workload.device)
        teacher_mask = torch.ones_like(teacher_prompts)
        batch |= {
            "teacher_input_ids": torch.cat([teacher_prompts, batch["completion_ids"]], dim=1),
            "teacher_attention_mask": torch.cat([teacher_mask, batch["completion_mask"]], dim=1),
            "self_distillation_mask": torch.ones(workload.batch, device=workload.device),
        }
    return partial(_micro_batches, trainer, batch, workload.micro_batches)


def _micro_batches(trainer: Any, batch: dict[str, torch.Tensor], count: int) -> None:
    for inputs in split_tensor_dict(batch, count):
        trainer.compute_loss(trainer.model, inputs).backward()


def _credit_update(trainer: Any, batch: dict[str, torch.Tensor], workload: Workload) -> Update:
    """TRL's preparation of a generation batch, whose completions and contexts are given, and its micro-batches."""
    contexts = [TokenContexts(teacher, contrasts) for teacher, *contrasts in workload.contexts()]
    trainer._generate = lambda prompts: _generated(batch)
    trainer._metrics["train"]["completions/clipped_ratio"] = [0.0]  # which TRL would log
    trainer._build_contexts = lambda generation_batch: contexts
    trainer.num_generations = min(2, workload.batch)
    rows = [trainer.train_dataset[i // 2] for i in range(workload.batch)]

    def update() -> None:
        trainer._buffered_inputs = None
        for trainer._step in range(workload.micro_batches):
            inputs = trainer._prepare_inputs(rows)
            trainer.compute_loss(trainer.model, inputs).backward()

    return update


def _generated(batch: dict[str, torch.Tensor]) -> tuple[Any, ...]:
    """What `GRPOTrainer._generate` returns, for given completions."""
    prompts, completions = (
        [row[mask.bool()].tolist() for row, mask in zip(batch[f"{name}_ids"], batch[f"{name}_mask"], strict=True)]
        for name in ("prompt", "completion")
    )
    texts = [[{"role": "assistant", "content": ""}] for _ in completions]
    return prompts, completions, None, texts, None, {}, None, None
