"""Whole steps on a GPU at the shape of Qwen3-0.6B, random weights in bf16, beside TRL's SDPO and GRPO.

    python benchmarks/gpu_step.py --output benchmarks/results/gpu_step.json
    python benchmarks/gpu_step.py --check full      # `CreditTrainer.check` at the shape of Qwen3-8B; also `lora`

A step is everything but generation, whose place random completions take: contexts, scores, loss, backward pass and
AdamW. The trainers have processes of their own, which take turns step by step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench import counted_tokens
from gpu import SHAPES
from measure import Results, Sample, in_turns, trials
from step import FEEDBACK, in_training
from torch import Tensor
from workload import QUESTIONS, Workload, make_tokenizer, provenance

TRIALS = {
    "credit": {"contrastive_coef": 0.1},
    "credit, λ = 0": {"contrastive_coef": 0.0},
    "credit, no Triton": {"contrastive_coef": 0.1, "distillation_kernels": "torch"},
    "sdpo": {},
    "grpo": {},
}
DENSE_BF16 = 989e12  # FLOP/s of an H100 or H200 by the datasheet
ROLLOUTS = 64


def build(name: str, workload: Workload) -> Callable[[int], Sample]:
    """Start training in the child process; return a function that measures a step of a given completion length.

    The sample's tokens are those that models read, and those that are trained.
    """
    options = common_options(workload)
    trainer = (_ours if name.startswith("credit") else _trl)(name, workload, options | TRIALS[name])
    trainer.model.generate = partial(_random_completions, trainer.generation_config)
    measure = in_training(trainer, workload.device)

    def answer(completion: int) -> Sample:
        with counted_tokens() as tokens:
            sample = measure(completion)
        sample.tokens = tokens | {"trained": ROLLOUTS * completion}
        return sample

    return answer


def _random_completions(config: Any, input_ids: Tensor, **kwargs: Any) -> Tensor:
    """Prompts with random completions of the length that the configuration asks for, in place of generation."""
    shape = (len(input_ids), config.max_new_tokens)
    return torch.cat([input_ids, torch.randint(3, 259, shape, device=input_ids.device)], dim=1)


def common_options(workload: Workload) -> dict[str, Any]:
    return {
        "output_dir": tempfile.mkdtemp(),
        "use_cpu": workload.device == "cpu",
        "bf16": workload.device == "cuda",
        "report_to": [],
        "disable_tqdm": True,
        "logging_steps": 1000,
        "save_strategy": "no",
        "max_steps": 1000,
        "learning_rate": 1e-6,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": ROLLOUTS // 8,
        "num_generations": 8,
        "max_completion_length": workload.completion,
        "loss_type": "grpo",
        "gradient_checkpointing": workload.checkpointing,
    }


def _rewards(completions: list, **kwargs: Any) -> list[float]:
    """Rewards that differ in a group, so that GRPO has advantages."""
    return [float(number % 2) for number in range(len(completions))]


def _rows(**columns: Any) -> Any:
    from datasets import Dataset

    prompts = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return Dataset.from_dict({"prompt": prompts} | {name: [value] * len(prompts) for name, value in columns.items()})


def _ours(name: str, workload: Workload, options: dict[str, Any]) -> Any:
    from credit_trl import CreditConfig, CreditTrainer, Verdict

    def verdicts(completions: list, **kwargs: Any) -> list[Verdict]:
        return [Verdict(reward, FEEDBACK) for reward in _rewards(completions)]

    config = CreditConfig(distillation_topk=workload.topk, packed=True, **options)
    return CreditTrainer(workload.make_model(), verdicts, config, _rows(), processing_class=make_tokenizer())


def _trl(name: str, workload: Workload, options: dict[str, Any]) -> Any:
    from trl import GRPOConfig, GRPOTrainer
    from trl.experimental.sdpo import SDPOConfig, SDPOTrainer

    if name == "grpo":
        config = GRPOConfig(**options)
        return GRPOTrainer(workload.make_model(), _rewards, config, _rows(), processing_class=make_tokenizer())
    config = SDPOConfig(
        distillation_mode="topk_logits",
        distillation_topk=workload.topk,
        distillation_add_tail=True,
        distillation_alpha=1.0,
        teacher_model_kind="ema",
        include_environment_feedback=True,
        model_init_kwargs={"dtype": workload.dtype},
        **options,
    )
    folder = tempfile.mkdtemp()
    workload.make_model().save_pretrained(folder)  # SDPOTrainer loads the teacher from the student's path
    rows = _rows(privileged_context=FEEDBACK)
    return SDPOTrainer(folder, _rewards, config, rows, processing_class=make_tokenizer())


def measure(workload: Workload, names: list[str], rounds: int, results: Results) -> dict[str, Any]:
    """Medians of seconds, trained tokens a second and MFU of each trainer; samples are written as they are measured.

    MFU counts 2 FLOP a parameter and token in a forward pass and 4 in a backward pass, without recomputation and
    attention.
    """
    parameters = sum(p.numel() for p in workload.with_(device="meta").make_model().parameters())
    with trials(build, {name: (name, workload) for name in names}) as running:
        in_turns(running, 2, workload.completion)  # warm up
        samples = in_turns(running, rounds, workload.completion, results=results)
    return {"workload": vars(workload), "steps": {name: _summary(of, parameters) for name, of in samples.items()}}


def _summary(samples: list[Sample], parameters: int) -> dict[str, Any]:
    """Medians over the steps of a trainer."""
    seconds = statistics.median(s.seconds for s in samples)
    tokens = samples[0].tokens
    flops = 2 * parameters * (3 * tokens["with gradient"] + tokens["without"])
    return {
        "seconds": seconds,
        "stages": samples[-1].stages,
        "tokens": tokens,
        "trained_tokens_a_second": tokens["trained"] / seconds,
        "mfu": flops / seconds / DENSE_BF16,
        "peak_mb": max(s.peak_mb for s in samples),
    }


def check(kind: str, workload: Workload) -> str:
    """Report of `CreditTrainer.check` with all weights or with an adapter; its checkpoint holds no optimizer."""
    from peft import LoraConfig

    from credit_trl import CreditConfig, CreditTrainer, Verdict
    from credit_trl.training.check_run import check_run

    def verdicts(completions: list, **kwargs: Any) -> list[Verdict]:
        return [Verdict(reward, FEEDBACK) for reward in _rewards(completions)]

    options = common_options(workload) | {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8}
    options |= {"output_dir": tempfile.mkdtemp(dir="/dev/shm"), "save_strategy": "epoch", "save_only_model": True}
    config = CreditConfig(**options, packed=True, max_reprompt_len=workload.teacher_prompt)
    adapter = LoraConfig(r=16, target_modules="all-linear") if kind == "lora" else None
    model, tokenizer = workload.make_model(), make_tokenizer()
    return check_run(CreditTrainer(model, verdicts, config, _rows(), processing_class=tokenizer, peft_config=adapter))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--completion", type=int, default=512)
    parser.add_argument("--trainers", nargs="+", default=list(TRIALS))
    parser.add_argument("--check", choices=["full", "lora"], help="only the check of Qwen3-8B")
    parser.add_argument("--output", type=Path, default=None, help="path of the JSON")
    arguments = parser.parse_args()
    results = Results(arguments.output)
    results.merge(provenance())
    if arguments.check:
        shape = SHAPES["Qwen3-8B"].with_(completion=arguments.completion, teacher_prompt=10_240)
        results.merge({"checks": {arguments.check: check(arguments.check, shape)}})
        print(results.values["checks"][arguments.check])
        return
    workload = SHAPES["Qwen3-0.6B"].with_(completion=arguments.completion, checkpointing=False)
    results.merge(measure(workload, arguments.trainers, arguments.rounds, results))
    print(json.dumps(results.values["steps"], indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
