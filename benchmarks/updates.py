"""One update (scoring, loss and backward pass) of this project's trainer and of TRL's, on identical batches.

`"credit"` is this project's trainer (teacher, C contrasts, loss, backward), `"sdpo"` TRL's `SDPOTrainer` with
`topk_logits` and a tail bucket (teacher, loss, backward), `"grpo"` TRL's `GRPOTrainer` (loss, backward).
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from datasets import Dataset
from measure import Sample, measured
from workload import QUESTIONS, Workload, make_tokenizer

Update = Callable[[], None]
MakeUpdate = Callable[[Workload], tuple[Update, torch.nn.Module]]


def build(kind: str, workload: Workload) -> Callable[[dict[str, Any]], Sample]:
    """Load the models in the child process; return a function that measures one update of a changed workload."""
    directory = tempfile.mkdtemp()
    make_update = {"credit": _credit, "sdpo": _sdpo, "grpo": _grpo}[kind](workload, directory)

    def answer(changes: dict[str, Any]) -> Sample:
        update, model = make_update(workload.with_(**changes))
        try:
            with measured(workload.device) as sample:
                update()
        finally:
            model.zero_grad(set_to_none=True)
        return sample

    return answer


def _arguments(workload: Workload, directory: str) -> dict[str, Any]:
    return {
        "output_dir": directory,
        "use_cpu": workload.device == "cpu",
        "bf16": False,
        "report_to": [],
        "per_device_train_batch_size": 2,
        "num_generations": 2,
        "loss_type": "grpo",
        "gradient_checkpointing": workload.checkpointing,
        "disable_tqdm": True,
    }


def _no_reward(completions: list, **kwargs: Any) -> list[float]:
    return [0.0] * len(completions)


def _dataset() -> Dataset:
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": q}] for q in QUESTIONS]})


def _credit(workload: Workload, directory: str) -> MakeUpdate:
    from credit_trl import CreditConfig, CreditTrainer
    from credit_trl.contexts.tokens import TokenContexts

    config = CreditConfig(
        **_arguments(workload, directory),
        contrastive_source="dataset",
        distillation_topk=workload.topk,
        distillation_tail=workload.tail,
        distillation_kernels=workload.kernels,
    )
    trainer = CreditTrainer(workload.make_model(), _no_reward, config, _dataset(), processing_class=make_tokenizer())
    _ready(trainer)

    def make_update(workload: Workload) -> tuple[Update, torch.nn.Module]:
        of = trainer.distillation
        support = replace(of.scoring.support, topk=workload.topk)
        scoring, loss = replace(of.scoring, support=support), replace(of.loss, support=support)
        trainer.distillation = replace(of, scoring=scoring, loss=loss)
        batch = workload.rollouts()
        contexts = [TokenContexts(teacher, contrasts) for teacher, *contrasts in workload.contexts()]

        def update() -> None:
            inputs = batch | trainer._score(batch, contexts)
            trainer.compute_loss(trainer.model, inputs).backward()

        return update, trainer.model

    return make_update


def _sdpo(workload: Workload, directory: str) -> MakeUpdate:
    from trl.experimental.sdpo import SDPOConfig, SDPOTrainer

    config = SDPOConfig(
        **_arguments(workload, directory),
        distillation_mode="topk_logits",
        distillation_topk=workload.topk,
        distillation_add_tail=True,
        distillation_alpha=1.0,
        teacher_model_kind="ema",
        model_init_kwargs={"dtype": workload.dtype},
    )
    # SDPOTrainer loads the teacher from the path of the student.
    model_directory = f"{directory}/model"
    workload.make_model().save_pretrained(model_directory)
    trainer = SDPOTrainer(model_directory, _no_reward, config, _dataset(), processing_class=make_tokenizer())
    shutil.rmtree(model_directory)
    _ready(trainer)

    def make_update(workload: Workload) -> tuple[Update, torch.nn.Module]:
        trainer.args.distillation_topk = workload.topk
        batch = workload.rollouts()
        teacher_prompts = torch.tensor([of_sample[0] for of_sample in workload.contexts()], device=workload.device)
        teacher_ids = torch.cat([teacher_prompts, batch["completion_ids"]], dim=1)
        batch |= {
            "teacher_input_ids": teacher_ids,
            "teacher_attention_mask": torch.ones_like(teacher_ids),
            "self_distillation_mask": torch.ones(workload.batch, device=workload.device),
        }
        return lambda: trainer.compute_loss(trainer.model, batch).backward(), trainer.model

    return make_update


def _grpo(workload: Workload, directory: str) -> MakeUpdate:
    from trl import GRPOConfig, GRPOTrainer

    config = GRPOConfig(**_arguments(workload, directory))
    trainer = GRPOTrainer(workload.make_model(), _no_reward, config, _dataset(), processing_class=make_tokenizer())
    _ready(trainer)

    def make_update(workload: Workload) -> tuple[Update, torch.nn.Module]:
        batch = workload.rollouts() | {"advantages": torch.linspace(-1, 1, workload.batch, device=workload.device)}
        return lambda: trainer.compute_loss(trainer.model, batch).backward(), trainer.model

    return make_update


def _ready(trainer: Any) -> None:
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.to(trainer.accelerator.device).train()
    if trainer.args.gradient_checkpointing:
        trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
