"""CREDIT in a plain PyTorch loop, without a trainer: three optimizer steps on the embedded task.

    python examples/own_loop.py

`CreditLoop` scores the samples and computes the loss; sampling and optimizer are this file's. A test compares
the losses with `CreditTrainer`'s on the same samples.
"""

import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from credit_trl import CreditConfig
from credit_trl.contexts.builder import ContextBuilder
from credit_trl.quickstart_model import model_path
from credit_trl.tasks import quickstart
from credit_trl.teacher.models import make_teacher
from credit_trl.training.loop import CreditLoop, LoopSample
from credit_trl.training.step import CreditStep

STEPS = 3
OPTIONS: dict[str, Any] = {
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 2,
    "num_generations": 4,
    "max_completion_length": 32,
    "learning_rate": 2e-3,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 1.0,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": "none",
    **quickstart.TEMPLATES,
}


def load() -> tuple[torch.nn.Module, Any]:
    path = model_path("quickstart")
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), AutoTokenizer.from_pretrained(path)


def make_loop(model: torch.nn.Module, tokenizer: Any, config: CreditConfig) -> CreditLoop:
    """Teacher, contexts and loss of a policy."""
    builder = ContextBuilder(tokenizer, config, [tokenizer.eos_token_id])
    return CreditLoop(CreditStep(config, builder, make_teacher(config.teacher_model_kind, model)))


@torch.no_grad()
def sample(model: torch.nn.Module, tokenizer: Any, prompts: Sequence[list[int]], seed: int) -> list[list[int]]:
    """One completion of each prompt, with its end; `seed` determines all of them."""
    torch.manual_seed(seed)
    longest = max(map(len, prompts))
    padding = [longest - len(prompt) for prompt in prompts]
    ids = [[tokenizer.pad_token_id] * count + prompt for count, prompt in zip(padding, prompts, strict=True)]
    mask = [[0] * count + [1] * len(prompt) for count, prompt in zip(padding, prompts, strict=True)]
    options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "max_new_tokens": OPTIONS["max_completion_length"]}
    was_training = model.training
    output = model.eval().generate(input_ids=torch.tensor(ids), attention_mask=torch.tensor(mask), **options)
    model.train(was_training)
    completions = []
    for row in output[:, longest:].tolist():
        end = row.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in row else len(row)
        completions.append(row[:end])
    return completions


def grade(row: dict[str, Any], ids: list[int], tokenizer: Any) -> Any:
    truncated = ids[-1] != tokenizer.eos_token_id
    return quickstart.verify(tokenizer.decode(ids, skip_special_tokens=True), row["answer"], truncated=truncated)


def batches(rows: Sequence[dict[str, Any]], prompts: int, samples: int) -> Iterator[list[dict[str, Any]]]:
    """Rows of successive generation batches, each row repeated for its samples."""
    for start in itertools.count(0, prompts):
        yield [row for row in rows[start : start + prompts] for _ in range(samples)]


def train(rows: Sequence[dict[str, Any]], steps: int = STEPS) -> list[float]:
    """Losses of the optimizer steps."""
    model, tokenizer = load()
    model.train()
    config = CreditConfig("unused", **OPTIONS)
    loop = make_loop(model, tokenizer, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, weight_decay=0.0)
    prompts_per_batch = config.generation_batch_size // config.num_generations
    losses = []
    for step, batch in zip(range(steps), batches(rows, prompts_per_batch, config.num_generations), strict=False):
        prompts = [loop.prompt_ids(row["prompt"]) for row in batch]
        completions = sample(model, tokenizer, prompts, seed=step)
        samples = [
            LoopSample(row["prompt"], ids, grade(row, ids, tokenizer))
            for row, ids in zip(batch, completions, strict=True)
        ]
        losses.append(0.0)
        for micro_batch in loop.micro_batches(samples):
            loss = loop.loss(model, micro_batch)
            loss.backward()
            losses[-1] += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        loop.end_batch()
    return losses


def main() -> int:
    torch.set_num_threads(1)
    for step, loss in enumerate(train(quickstart.build("train").to_list()), 1):
        print(f"step {step}  loss {loss:.6f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
