"""One process of a small deterministic run, forked from a server that has imported all modules.

Tests compare the files of runs with different numbers of processes.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from peft import LoraConfig
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

import tiny
from credit_trl import CreditConfig, CreditTrainer, Verdict
from credit_trl.contexts import build
from credit_trl.lab.analysis import CreditMapCallback
from credit_trl.rollout.batch import prompt_key
from distributed import cpu_fsdp2

GROUP = 4


def deterministic_rollouts(prompts, trainer):
    """Completions of 1 to 9 bytes that depend only on the prompt and the index in its group."""
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
    """Verdicts without success and feedback for some prompts, whose samples have no teacher."""
    graded = []
    for completion, a in zip(completions, answer, strict=True):
        is_hopeless = int(a) % 3 == 0
        reward = 0.0 if is_hopeless else float(completion[-1]["content"] > "8")
        graded.append(Verdict(reward, None if is_hopeless else f"It is {a}."))
    return graded


def whole(tensor):
    """Copy a tensor, gathered if it is sharded."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def kept_draws() -> list[tuple[int, list[str]]]:
    """Return a list that gets (sample, prompts drawn for it) of each later draw."""
    draws, draw = [], build.draw_contrasts

    def record(source, batch, sample, seed):
        drawn = []
        draws.append((sample, drawn))
        for contrast in draw(source, batch, sample, seed):
            drawn.append(prompt_key(contrast.prompt))
            yield contrast

    build.draw_contrasts = record
    return draws


def share_held(parameters) -> float:
    """Share of the parameters' elements on this process; 0 without parameters."""
    held = total = 0
    for parameter in parameters:
        if hasattr(parameter, "ds_tensor"):
            held, total = held + parameter.ds_tensor.numel(), total + parameter.ds_numel
        else:
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            held, total = held + local.numel(), total + parameter.numel()
    return held / max(total, 1)


class FirstGradients(TrainerCallback):
    """Records the gradients of the first optimizer step, after their average over processes."""

    gradients = None

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if self.gradients is None:
            named = model.named_parameters()
            self.gradients = {n.removeprefix("module."): whole(p.grad) for n, p in named if p.grad is not None}


def begin(out: Path, rank: int, limit: float) -> None:
    """Redirect the output to `log_<rank>.txt`, with a traceback after half of the watchdog's limit."""
    output = os.open(out / f"log_{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable()
    faulthandler.dump_traceback_later(limit / 2)


def join(rank: int, processes: int, port: int) -> None:
    """Set the environment variables that a launcher sets."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TRL_EXPERIMENTAL_SILENCE": "1"}
    os.environ |= {name: str(rank) for name in ("RANK", "LOCAL_RANK")}
    os.environ |= {name: str(processes) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}


def run(folder: str, rank: int, processes: int, port: int, limit: float, options: dict[str, Any]) -> None:
    """Train three steps, and write facts and the weights of policy and teacher.

    Args:
        folder: output folder.
        rank: index of this process.
        processes: number of processes.
        port: a free port.
        limit: seconds until the watchdog ends the process.
        options: `per_device` (batch size of a process), `lora`, `fsdp2`, `topk` and `kind` of the teacher, and `maps`
            (whether token maps are written).
    """
    out = Path(folder)
    begin(out, rank, limit)
    join(rank, processes, port)
    if options["fsdp2"]:
        cpu_fsdp2.install()

    tokenizer = tiny.build_tokenizer()
    rows = [
        {"prompt": [{"role": "user", "content": f"{a}*{b}="}], "answer": str(a * b)}
        for a in range(4)
        for b in range(5)
    ]
    rows[3] = rows[9]  # a duplicate, which must not be a contrast prompt
    config = CreditConfig(
        output_dir=str(out / "run"),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=options["per_device"],
        num_generations=GROUP,
        max_completion_length=16,
        max_steps=3,
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
        teacher_model_kind=options["kind"],
        distillation_topk=options["topk"],
        ddp_find_unused_parameters=False,
    )
    gradients, draws = FirstGradients(), kept_draws()
    maps = [CreditMapCallback(every=2, rollouts=16)] if options.get("maps") else []
    torch.manual_seed(0)
    trainer = CreditTrainer(
        tiny.build_model(tokenizer),
        verdicts,
        config,
        Dataset.from_list(rows),
        processing_class=tokenizer,
        rollout_func=deterministic_rollouts,
        callbacks=[gradients, *maps],
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        if options["lora"]
        else None,
    )
    for callback in maps:
        callback.trainer = trainer
    trainer.train()
    accelerator = trainer.accelerator
    weights = {n: whole(p) for n, p in accelerator.unwrap_model(trainer.model).named_parameters()}
    torch.save({"weights": weights, "gradients": gradients.gradients}, out / f"state_{rank}.pt")
    teacher = {} if options["kind"] == "live" else trainer.teacher.named_weights()
    torch.save({n: whole(p) for n, p in teacher.items()}, out / f"teacher_{rank}.pt")
    facts = {
        "num_processes": accelerator.num_processes,
        "distributed_type": str(accelerator.distributed_type),
        "sharded": any(isinstance(p, DTensor) for p in trainer.model.parameters()),
        "teacher_held": share_held(teacher.values()),
        "draws": draws,
        "log": [entry for entry in trainer.state.log_history if "loss" in entry],
    }
    (out / f"facts_{rank}.json").write_text(json.dumps(facts))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
