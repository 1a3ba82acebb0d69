"""CREDIT on samples of a policy that is two updates old, as an asynchronous sampler delivers them.

    python examples/stale_samples.py

Each token's loss is multiplied by the importance ratio π_θ / π_rollout of the sampled token, at most
`distillation_is_clip`. The samples bring the log-probabilities under the policy that sampled them; a test compares the
losses with dense passes.
"""

import sys
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from own_loop import OPTIONS, batches, grade, load, make_loop, sample

from credit_trl import CreditConfig
from credit_trl.tasks import quickstart
from credit_trl.training.loop import CreditLoop, LoopSample

LAG = 2  # updates between sampling and training
STEPS = 5
STALE_OPTIONS = OPTIONS | {"distillation_topk": None, "distillation_is_clip": 2.0}


@torch.no_grad()
def logps_of(model: torch.nn.Module, prompt: list[int], ids: list[int]) -> torch.Tensor:
    """Log-probabilities of a completion; a sampler that has them returns its own."""
    logits = model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(dim=-1).gather(1, torch.tensor(ids)[:, None]).squeeze(1)


class Sampler:
    """Samples generation batches with the policy's weights at the time of the call."""

    def __init__(self, loop: CreditLoop, rows: Sequence[dict[str, Any]]) -> None:
        self.loop = loop
        prompts = loop.config.generation_batch_size // loop.config.num_generations
        self.batches: Iterator[list[dict[str, Any]]] = batches(rows, prompts, loop.config.num_generations)
        self.seed = 0

    def sample(self, model: torch.nn.Module) -> list[LoopSample]:
        batch = next(self.batches)
        tokenizer = self.loop.step.context_builder.tokenizer
        prompts = [self.loop.prompt_ids(row["prompt"]) for row in batch]
        completions = sample(model, tokenizer, prompts, self.seed)
        self.seed += 1
        return [
            LoopSample(row["prompt"], ids, grade(row, ids, tokenizer), logps_of(model, prompt, ids))
            for row, prompt, ids in zip(batch, prompts, completions, strict=True)
        ]


def train(rows: Sequence[dict[str, Any]], steps: int = STEPS) -> list[float]:
    """Losses of the optimizer steps. From step `LAG` on, the samples are `LAG` updates old."""
    model, tokenizer = load()
    config = CreditConfig("unused", **STALE_OPTIONS)
    loop = make_loop(model, tokenizer, config)
    sampler = Sampler(loop, rows)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, weight_decay=0.0)
    waiting = deque(sampler.sample(model) for _ in range(LAG))
    losses = []
    for _ in range(steps):
        waiting.append(sampler.sample(model))
        losses.append(0.0)
        for micro_batch in loop.micro_batches(waiting.popleft()):
            loss = loop.loss(model.train(), micro_batch)
            loss.backward()
            losses[-1] += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        loop.end_batch()
    return losses


def main() -> int:
    torch.set_num_threads(1)
    for step, loss in enumerate(train(quickstart.build("train").to_list())):
        print(f"step {step}  samples {min(step, LAG)} updates old  loss {loss:.6f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
