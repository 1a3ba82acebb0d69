"""General damage of training: divergence from the base on 200 prompts that have nothing to do with the task.

The prompts are twenty kinds of requests about ten subjects. The base answers each once, greedily; the answers are
scored under the base and under the trained model. `kl` is the mean of KL(base ‖ trained) over the tokens of these
answers, in nats; `perplexity` is that of the trained model on them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

SUBJECTS = "volcanoes, bicycles, honey bees, the moon, chess, glass, elephants, bread, rivers, trains".split(", ")
KINDS = (
    "Write one sentence about {}.",
    "Why do people like {}?",
    "Tell me a fact about {}.",
    "Explain {} to a child.",
    "What is the history of {}?",
    "Write a short poem about {}.",
    "Name three things related to {}.",
    "How would you describe {}?",
    "What should I read about {}?",
    "Give me a title for an essay on {}.",
    "What is a common myth about {}?",
    "Write a question about {}.",
    "Compare {} with books.",
    "What comes to mind when you hear of {}?",
    "Summarize {} in ten words.",
    "What are {} good for?",
    "Begin a story about {}.",
    "Write a headline on {}.",
    "What do experts say about {}?",
    "Is it easy to learn about {}?",
)
PROMPTS = tuple(kind.format(subject) for kind in KINDS for subject in SUBJECTS)


@dataclass(frozen=True)
class Damage:
    """`kl` in nats per token, `perplexity` of the trained model and `base_perplexity` of the base on its answers."""

    kl: float
    perplexity: float
    base_perplexity: float


@torch.no_grad()
def answer_prompts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str] = PROMPTS,
    tokens: int = 24,
    batch_size: int = 50,
) -> list[tuple[list[int], list[int]]]:
    """(ids of the prompt, ids of the model's greedy answer) of each prompt."""
    pairs = []
    for start in range(0, len(prompts), batch_size):
        texts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
            )
            for prompt in prompts[start : start + batch_size]
        ]
        batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
        width = batch["input_ids"].shape[1]
        batch = batch.to(model.device)
        found = model.generate(**batch, do_sample=False, max_new_tokens=tokens)[:, width:].tolist()
        for text, ids in zip(texts, found, strict=True):
            end = ids.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in ids else len(ids)
            pairs.append((tokenizer(text, add_special_tokens=False)["input_ids"], ids[:end]))
    return pairs


@torch.no_grad()
def measure_damage(
    base: PreTrainedModel, trained: PreTrainedModel, pairs: Sequence[tuple[list[int], list[int]]], batch_size: int = 20
) -> Damage:
    """Score the base's answers under both models."""
    totals = torch.zeros(3, dtype=torch.float64)
    count = 0
    for start in range(0, len(pairs), batch_size):
        rows = pairs[start : start + batch_size]
        width = max(len(prompt) + len(answer) for prompt, answer in rows)
        ids = torch.tensor([prompt + answer + [0] * (width - len(prompt) - len(answer)) for prompt, answer in rows])
        mask = torch.tensor([[1] * (len(p) + len(a)) + [0] * (width - len(p) - len(a)) for p, a in rows])
        is_answer = torch.tensor([[len(p) <= i < len(p) + len(a) for i in range(width)] for p, a in rows])
        ids, mask, is_answer = (part.to(base.device) for part in (ids, mask, is_answer))
        targets = ids[is_answer]
        logps = []
        for model in (base, trained):
            hidden = model.base_model(input_ids=ids, attention_mask=mask).last_hidden_state[:, :-1]
            logps.append(model.get_output_embeddings()(hidden[is_answer[:, 1:]]).float().log_softmax(-1))
        own, other = logps
        sums = [
            (own.exp() * (own - other)).sum(),
            -other.gather(1, targets[:, None]).sum(),
            -own.gather(1, targets[:, None]).sum(),
        ]
        totals += torch.stack(sums).double().cpu()
        count += len(targets)
    kl, trained_nll, base_nll = (totals / count).tolist()
    return Damage(kl, math.exp(trained_nll), math.exp(base_nll))
