"""One update (scoring, loss and backward pass) of this project's trainer and of TRL's, on identical batches.

`"credit"` is this project's trainer (teacher, C contrasts, loss, backward), `"sdpo"` TRL's `SDPOTrainer` with
`topk_logits` and a tail bucket (teacher, loss, backward), and `"grpo"` TRL's `GRPOTrainer` (loss, backward).
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from datasets import Dataset
from measure import Sample, measured
from padded import keep_padding
from trl.trainer.utils import split_tensor_dict
from workload import QUESTIONS, Workload, make_tokenizer

Update = Callable[[], None]
MakeUpdate = Callable[[Workload], tuple[Update, torch.nn.Module]]


def build(kind: str, workload: Workload) -> Callable[[dict[str, Any]], Sample]:
    """Load the models in the child process; return a function that measures one update of a changed workload."""
    directory = tempfile.mkdtemp()
    kinds = {"credit": make_credit_update, "sdpo": _sdpo, "grpo": _grpo}
    make_update = kinds[kind](workload, directory)

    def answer(changes: dict[str, Any]) -> Sample:
        update, model = make_update(workload.with_(**changes))
        try:
            with read_tokens(model) as tokens, measured(workload.device) as sample:
                update()
            sample.tokens = tokens | {"valid": _valid(workload.with_(**changes))}
        finally:
            model.zero_grad(set_to_none=True)
        return sample

    return answer


@contextmanager
def read_tokens(model: torch.nn.Module) -> Iterator[dict[str, int]]:
    """Tokens that enter a model's embedding in the block, with gradient and without."""
    tokens = {"update": 0, "no_grad": 0}

    def count(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        tokens["update" if torch.is_grad_enabled() else "no_grad"] += args[0].numel()

    hook = model.get_input_embeddings().register_forward_hook(count)
    try:
        yield tokens
    finally:
        hook.remove()


def _valid(workload: Workload) -> int:
    batch = workload.rollouts()
    return int(batch["prompt_mask"].sum() + batch["completion_mask"].sum())


def _arguments(workload: Workload, directory: str) -> dict[str, Any]:
    return {
        "output_dir": directory,
        "use_cpu": workload.device == "cpu",
        "bf16": False,
        "report_to": [],
        "per_device_train_batch_size": max(workload.batch, 2) // workload.micro_batches,
        "gradient_accumulation_steps": workload.micro_batches,
        "num_generations": 2,
        "loss_type": "grpo",
        "gradient_checkpointing": workload.checkpointing,
        "disable_tqdm": True,
    }


def no_reward(completions: list, **kwargs: Any) -> list[float]:
    return [0.0] * len(completions)


def _dataset() -> Dataset:
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": q}] for q in QUESTIONS]})


def make_credit_update(workload: Workload, directory: str) -> MakeUpdate:
    from credit_trl import CreditConfig, CreditTrainer
    from credit_trl.contexts.tokens import TokenContexts

    config = CreditConfig(
        **_arguments(workload, directory),
        contrastive_source="dataset",
        distillation_topk=workload.topk,
        distillation_tail=workload.tail,
        distillation_kernels=workload.kernels,
        packed=workload.padding == "packed",
    )
    if workload.padding == "kept":
        keep_padding()
    trainer = CreditTrainer(workload.make_model(), no_reward, config, _dataset(), processing_class=make_tokenizer())
    _ready(trainer)

    def make_update(workload: Workload) -> tuple[Update, torch.nn.Module]:
        batch = workload.rollouts()
        contexts = [TokenContexts(teacher, contrasts) for teacher, *contrasts in workload.contexts()]
        # TRL's preparation of a generation batch, whose completions and contexts are given.
        trainer._generate = lambda prompts: _generated(batch)
        trainer._metrics["train"]["completions/clipped_ratio"] = [0.0]  # which it would log
        trainer._build_contexts = lambda generation_batch: contexts
        trainer.num_generations = min(2, workload.batch)
        rows = [trainer.train_dataset[i // 2] for i in range(workload.batch)]

        def update() -> None:
            trainer._buffered_inputs = None
            for trainer._step in range(workload.micro_batches):
                inputs = trainer._prepare_inputs(rows)
                trainer.compute_loss(trainer.model, inputs).backward()

        return update, trainer.model

    return make_update


def _generated(batch: dict[str, torch.Tensor]) -> tuple[Any, ...]:
    """What `GRPOTrainer._generate` returns, for given completions."""
    prompts, completions = (
        [row[mask.bool()].tolist() for row, mask in zip(batch[f"{name}_ids"], batch[f"{name}_mask"], strict=True)]
        for name in ("prompt", "completion")
    )
    texts = [[{"role": "assistant", "content": ""}] for _ in completions]
    return prompts, completions, None, texts, None, {}, None, None


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
    trainer = SDPOTrainer(model_directory, no_reward, config, _dataset(), processing_class=make_tokenizer())
    shutil.rmtree(model_directory)
    _ready(trainer)

    def make_update(workload: Workload) -> tuple[Update, torch.nn.Module]:
        trainer.args.distillation_topk = workload.topk
        batch = workload.rollouts()
        teacher_prompts = torch.tensor([of_sample[0] for of_sample in workload.contexts()], device=workload.device)
        teacher_ids = torch.cat([teacher_prompts, batch["completion_ids"]], dim=1)
        mask = torch.cat([torch.ones_like(teacher_prompts), batch["completion_mask"]], dim=1)
        batch |= {
            "teacher_input_ids": teacher_ids,
            "teacher_attention_mask": mask,
            "self_distillation_mask": torch.ones(workload.batch, device=workload.device),
        }
        return partial(_micro_batches, trainer, batch, workload), trainer.model

    return make_update


def _grpo(workload: Workload, directory: str) -> MakeUpdate:
    from trl import GRPOConfig, GRPOTrainer

    config = GRPOConfig(**_arguments(workload, directory))
    trainer = GRPOTrainer(workload.make_model(), no_reward, config, _dataset(), processing_class=make_tokenizer())
    _ready(trainer)

    def make_update(workload: Workload) -> tuple[Update, torch.nn.Module]:
        batch = workload.rollouts() | {"advantages": torch.linspace(-1, 1, workload.batch, device=workload.device)}
        return partial(_micro_batches, trainer, batch, workload), trainer.model

    return make_update


def _micro_batches(trainer: Any, batch: dict[str, torch.Tensor], workload: Workload) -> None:
    for inputs in split_tensor_dict(batch, workload.micro_batches):
        trainer.compute_loss(trainer.model, inputs).backward()


def _ready(trainer: Any) -> None:
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    trainer.model.to(trainer.accelerator.device).train()
    if trainer.args.gradient_checkpointing:
        trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
