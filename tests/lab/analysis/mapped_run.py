"""One process of a small deterministic training run with token maps, started by torchrun.

torchrun --nproc_per_node N mapped_run.py OUT --per_device B [--fsdp2] [--no_maps], with tests and
tests/distributed on PYTHONPATH.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import cpu_fsdp2
import torch
import torch.distributed as dist
from credit_run import GROUP, deterministic_rollouts, verdicts, whole
from datasets import Dataset

import tiny
from credit_trl import CreditConfig, CreditTrainer
from credit_trl.lab.analysis.callback import CreditMapCallback


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--per_device", type=int, required=True)
    parser.add_argument("--fsdp2", action="store_true")
    parser.add_argument("--no_maps", action="store_true")
    options = parser.parse_args()
    if options.fsdp2:
        cpu_fsdp2.install()
    tokenizer = tiny.build_tokenizer()
    rows = [
        {"prompt": [{"role": "user", "content": f"{n // 5}*{n % 5}="}], "answer": str(n // 5 * (n % 5))}
        for n in range(20)
    ]
    config = CreditConfig(
        output_dir=str(options.out),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=options.per_device,
        num_generations=GROUP,
        max_completion_length=16,
        max_steps=3,
        learning_rate=1e-3,
        report_to="none",
        save_strategy="no",
        gradient_checkpointing=False,
        disable_tqdm=True,
        seed=3,
        teacher_update_rate=0.2,
        ddp_find_unused_parameters=False,
    )
    torch.manual_seed(0)
    maps = CreditMapCallback(every=2, rollouts=16)
    trainer = CreditTrainer(
        tiny.build_model(tokenizer),
        verdicts,
        config,
        Dataset.from_list(rows),
        processing_class=tokenizer,
        rollout_func=deterministic_rollouts,
        callbacks=[] if options.no_maps else [maps],
    )
    maps.trainer = trainer
    trainer.train()
    weights = {n: whole(p) for n, p in trainer.accelerator.unwrap_model(trainer.model).named_parameters()}
    if trainer.accelerator.is_main_process:
        facts = {"processes": trainer.accelerator.num_processes, "type": str(trainer.accelerator.distributed_type)}
        torch.save({"weights": weights, "facts": facts}, options.out / "state.pt")
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
