"""One process of a run on prompts with images, of which some processes have none."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset

from credit_trl import CreditConfig, CreditTrainer, Verdict
from distributed import jobs
from tiny import QUIET
from vlm import build_vlm, rows


def fixed_rollouts(prompts, trainer):
    """Completions that depend on the prompt alone."""
    ids = list(trainer._tokenize_prompts(prompts)[0])
    answers = [trainer._tokenizer(prompt[-1]["content"][-1]["text"])["input_ids"][-3:] for prompt in prompts]
    return {"prompt_ids": ids, "completion_ids": answers, "logprobs": None}


def verdicts(completions, answer, **kwargs):
    return [Verdict(float(i % 2), f"It is {a}.") for i, a in enumerate(answer)]


def run(folder: str, rank: int, processes: int, port: int, limit: float, options: dict[str, Any]) -> None:
    """Write `weights_<rank>.pt` after two steps on two prompts, the first without images."""
    out = Path(folder)
    jobs.begin(out, rank, limit)
    if processes > 1:
        jobs.join(rank, processes, port)
    model, processor = build_vlm("Qwen2_5_VL")
    fixed = {"num_generations": 2, "per_device_train_batch_size": 4 // processes, "max_steps": 2, "optim": "sgd"}
    fixed |= {"learning_rate": 0.1, "max_grad_norm": 0.0, "gradient_accumulation_steps": 1, "loss_type": "grpo"}
    config = CreditConfig(str(out / "run"), **QUIET | fixed | {"shuffle_dataset": False, **options})
    data = Dataset.from_list(rows((0, 1)))
    trainer = CreditTrainer(model, verdicts, config, data, processing_class=processor, rollout_func=fixed_rollouts)
    trainer.train()
    weights = trainer.accelerator.unwrap_model(trainer.model).state_dict()
    torch.save({name: value.clone() for name, value in weights.items()}, out / f"weights_{rank}.pt")
    (out / f"facts_{rank}.json").write_text(f'{{"num_processes": {trainer.accelerator.num_processes}}}')
    if processes > 1:
        dist.destroy_process_group()
