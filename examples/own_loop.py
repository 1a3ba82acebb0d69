"""CREDIT in a plain PyTorch loop, without a trainer: three optimizer steps on the embedded task.

    python examples/own_loop.py            # on the samples of the present policy
    python examples/own_loop.py --lag 2    # on samples that are two updates old, as of an asynchronous sampler

`CreditLoop` scores the samples and computes the loss; sampling and optimizer are this file's. With a lag each token's
loss is multiplied by its importance ratio π_θ / π_rollout, at most `distillation_is_clip`; the samples bring their
log-probabilities. Tests compare the losses with `CreditTrainer`'s on the same samples, and with dense passes.
"""

import argparse
import itertools
from collections import deque
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
OPTIONS_WITH_LAG = OPTIONS | {"distillation_topk": None, "distillation_is_clip": 2.0}


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


@torch.no_grad()
def logps_of(model: torch.nn.Module, prompt: list[int], ids: list[int]) -> torch.Tensor:
    """Log-probabilities of a completion; a sampler that has them returns its own."""
    logits = model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(dim=-1).gather(1, torch.tensor(ids)[:, None]).squeeze(1)


def sampled_batches(
    loop: CreditLoop, model: torch.nn.Module, rows: Sequence[dict[str, Any]], with_logps: bool
) -> Iterator[list[LoopSample]]:
    """Successive generation batches, sampled with the weights of the time when each is asked for."""
    tokenizer = loop.step.context_builder.tokenizer
    size = loop.config.generation_batch_size // loop.config.num_generations
    for seed in itertools.count():
        batch = [row for row in rows[seed * size : (seed + 1) * size] for _ in range(loop.config.num_generations)]
        prompts = [loop.prompt_ids(row["prompt"]) for row in batch]
        samples = []
        for row, prompt, ids in zip(batch, prompts, sample(model, tokenizer, prompts, seed), strict=True):
            logps = logps_of(model, prompt, ids) if with_logps else None
            samples.append(LoopSample(row["prompt"], ids, grade(row, ids, tokenizer), logps))
        yield samples


def train(rows: Sequence[dict[str, Any]], steps: int = STEPS, lag: int = 0) -> list[float]:
    """Losses of the optimizer steps. From step `lag` on, the samples are `lag` updates old."""
    model, tokenizer = load()
    model.train()
    config = CreditConfig("unused", **(OPTIONS_WITH_LAG if lag else OPTIONS))
    loop = make_loop(model, tokenizer, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, weight_decay=0.0)
    batches = sampled_batches(loop, model, rows, with_logps=lag > 0)
    waiting = deque(itertools.islice(batches, lag))
    losses = []
    for _ in range(steps):
        waiting.append(next(batches))
        losses.append(0.0)
        for micro_batch in loop.micro_batches(waiting.popleft()):
            loss = loop.loss(model, micro_batch)
            loss.backward()
            losses[-1] += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        loop.end_batch()
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lag", type=int, default=0, help="updates between sampling and training")
    lag = parser.parse_args().lag
    torch.set_num_threads(1)
    for step, loss in enumerate(train(quickstart.build("train").to_list(), lag=lag)):
        print(f"step {step}  samples {min(step, lag)} updates old  loss {loss:.6f}")
