"""One process of a small deterministic run; torchrun starts it, a test compares what the runs wrote.

torchrun --nproc_per_node N credit_run.py OUT --per_device B [--lora] [--support S] [--kind K] [--steps N]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from datasets import Dataset
from peft import LoraConfig
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

sys.path.insert(0, str(Path(__file__).parents[1]))
import tiny
from credit_trl import CreditConfig, CreditTrainer, Verdict
from credit_trl import rollouts as rollouts_module
from distributed import cpu_fsdp2

GROUP = 4


def deterministic_rollouts(prompts, trainer):
    """Completion = f(prompt, index in its group), whatever process asks: lengths from 1 to 9 bytes."""
    tokenizer = trainer.processing_class
    first = trainer.accelerator.process_index * len(prompts)
    prompt_ids, completion_ids = [], []
    for i, prompt in enumerate(prompts):
        prompt_ids.append(
            tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"]
        )
        digest = hashlib.sha256(f"{prompt}{(first + i) % GROUP}".encode()).hexdigest()
        text = digest[: int(digest[0], 16) % 9 + 1]
        completion_ids.append(tokenizer(text)["input_ids"] + [tokenizer.eos_token_id])
    return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": None}


def verdicts(completions, answer, **kwargs):
    """Some questions never succeed and get no feedback: their samples have no teacher."""
    graded = []
    for completion, a in zip(completions, answer, strict=True):
        silent = int(a) % 3 == 0
        reward = 0.0 if silent else float(completion[-1]["content"] > "8")
        graded.append(Verdict(reward, None if silent else f"It is {a}."))
    return graded


def whole(tensor):
    """A copy of a tensor, gathered where it was sharded."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


class FirstGradients(TrainerCallback):
    """Keeps the first optimizer step's gradients, after they were averaged over processes."""

    gradients = None

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if self.gradients is None:
            named = model.named_parameters()
            self.gradients = {n.removeprefix("module."): whole(p.grad) for n, p in named if p.grad is not None}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--per_device", type=int, required=True)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--support", default="teacher_topk")
    parser.add_argument("--kind", default="ema")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--fsdp2", action="store_true")
    options = parser.parse_args()
    if options.fsdp2:
        cpu_fsdp2.install()

    tokenizer = tiny.build_tokenizer()
    rows = [
        {"prompt": [{"role": "user", "content": f"{a}*{b}="}], "answer": str(a * b)}
        for a in range(4)
        for b in range(5)
    ]
    rows[3] = rows[9]  # a duplicate question is not another question
    config = CreditConfig(
        output_dir=str(options.out / "run"),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=options.per_device,
        num_generations=GROUP,
        max_completion_length=16,
        max_steps=options.steps,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        gradient_checkpointing=False,
        disable_tqdm=True,
        seed=3,
        contrastive_count=2,
        contrastive_coef=0.3,
        teacher_update_rate=0.2,
        teacher_model_kind=options.kind,
        distillation_support=options.support,
        ddp_find_unused_parameters=False,
    )
    gradients, draws = FirstGradients(), []
    draw = rollouts_module.contrast.draw_from_batch

    def recording(keys, samples, *args, **kwargs):
        drawn = draw(keys, samples, *args, **kwargs)
        draws.extend((sample, [keys[i] for i in d]) for sample, d in zip(samples, drawn, strict=True))
        return drawn

    rollouts_module.contrast.draw_from_batch = recording
    torch.manual_seed(0)
    trainer = CreditTrainer(
        tiny.build_model(tokenizer),
        verdicts,
        config,
        Dataset.from_list(rows),
        processing_class=tokenizer,
        rollout_func=deterministic_rollouts,
        callbacks=[gradients],
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        if options.lora
        else None,
    )
    trainer.train()
    accelerator = trainer.accelerator
    rank = accelerator.process_index
    weights = {n: whole(p) for n, p in accelerator.unwrap_model(trainer.model).named_parameters()}
    torch.save({"weights": weights, "gradients": gradients.gradients}, options.out / f"state_{rank}.pt")
    reference = {} if options.kind == "live" else trainer.reference.named_weights()
    torch.save({n: whole(p) for n, p in reference.items()}, options.out / f"reference_{rank}.pt")
    facts = {
        "num_processes": accelerator.num_processes,
        "distributed_type": str(accelerator.distributed_type),
        "sharded": any(isinstance(p, DTensor) for p in trainer.model.parameters()),
        "draws": draws,
        "log": [entry for entry in trainer.state.log_history if "loss" in entry],
    }
    (options.out / f"facts_{rank}.json").write_text(json.dumps(facts))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
