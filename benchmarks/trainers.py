"""Trainers to compare: this project's (`credit`), TRL's SDPO (`sdpo`) and TRL's GRPO (`grpo`)."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl import GRPOConfig, GRPOTrainer
from trl.experimental.sdpo import SDPOConfig, SDPOTrainer
from workload import Workload, make_tokenizer

from credit_trl import CreditConfig, CreditTrainer, Verdict

FEEDBACK = "The result is off by three. Compute the product step by step and check the last digit."
QUESTIONS = [f"What is {i} times {i + 3}?" for i in range(40)]


def all_wrong(completions: list[Any], **columns: Any) -> list[Verdict]:
    """Rewards of 0, so that no completion is a demonstration."""
    return [Verdict(0.0, FEEDBACK) for _ in completions]


def half_right(completions: list[Any], **columns: Any) -> list[Verdict]:
    """Rewards that differ in a group, so that GRPO has advantages."""
    return [Verdict(float(number % 2), FEEDBACK) for number in range(len(completions))]


def options_of(workload: Workload) -> dict[str, Any]:
    """Options of all trainers for a workload; nothing is reported or saved."""
    return {
        "output_dir": tempfile.mkdtemp(),
        "use_cpu": workload.device == "cpu",
        "bf16": False,
        "report_to": [],
        "disable_tqdm": True,
        "logging_steps": 1000,
        "save_strategy": "no",
        "max_steps": 1000,
        "per_device_train_batch_size": max(workload.batch, 2) // workload.micro_batches,
        "gradient_accumulation_steps": workload.micro_batches,
        "num_generations": max(workload.group, 2),
        "max_completion_length": workload.completion,
        "loss_type": "grpo",
        "gradient_checkpointing": workload.checkpointing,
    }


def make_trainer(
    kind: str,
    make_model: Callable[[], PreTrainedModel],
    tokenizer: PreTrainedTokenizerBase,
    rows: Dataset,
    verdicts: Callable[..., list[Verdict]],
    options: dict[str, Any],
    own: dict[str, Any],
) -> CreditTrainer | GRPOTrainer | SDPOTrainer:
    """A trainer of a kind, `credit`, `sdpo` or `grpo`.

    Args:
        kind: the trainer.
        make_model: makes the student.
        tokenizer: its tokenizer.
        rows: data set.
        verdicts: reward function. TRL's trainers read its rewards, and SDPO the feedback for an empty response.
        options: options that all three trainers have.
        own: further options of the kind.
    """
    with tempfile.TemporaryDirectory() as folder:
        model = make_model()
        if kind == "sdpo" or options.get("use_vllm"):  # SDPO's teacher and vLLM load the student from its path
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            model.name_or_path = folder
        if kind == "credit":
            config = CreditConfig(**options, **own)
            return CreditTrainer(model, verdicts, config, rows, processing_class=tokenizer)

        def rewards(completions: list[Any], **columns: Any) -> list[float]:
            return [float(verdict) for verdict in verdicts(completions, **columns)]

        if kind == "grpo":
            return GRPOTrainer(model, rewards, GRPOConfig(**options, **own), rows, processing_class=tokenizer)
        empty = [[{"role": "assistant", "content": ""}]] * len(rows)
        feedback = [verdict.feedback for verdict in verdicts(empty, **rows.to_dict())]
        config = SDPOConfig(
            distillation_mode="topk_logits",
            distillation_add_tail=True,
            include_environment_feedback=True,
            model_init_kwargs={"dtype": str(model.dtype).removeprefix("torch.")},
            **options,
            **own,
        )
        del model
        rows = rows.add_column("privileged_context", feedback)
        return SDPOTrainer(folder, rewards, config, rows, processing_class=tokenizer)


def workload_trainer(
    kind: str,
    workload: Workload,
    verdicts: Callable[..., list[Verdict]],
    options: dict[str, Any] | None = None,
    of_credit: dict[str, Any] | None = None,
) -> CreditTrainer | GRPOTrainer | SDPOTrainer:
    """A trainer of a workload's random model on questions, with further options of all kinds and of CREDIT."""
    own: dict[str, dict[str, Any]] = {
        "credit": {
            "distillation_topk": workload.topk,
            "distillation_tail": workload.tail,
            "packed": workload.padding == "packed",
            **(of_credit or {}),
        },
        "sdpo": {"distillation_topk": workload.topk, "teacher_model_kind": "ema"},
        "grpo": {},
    }
    options = options_of(workload) | (options or {})
    rows = Dataset.from_dict({"prompt": [[{"role": "user", "content": question}] for question in QUESTIONS]})
    return make_trainer(kind, workload.make_model, make_tokenizer(), rows, verdicts, options, own[kind])
