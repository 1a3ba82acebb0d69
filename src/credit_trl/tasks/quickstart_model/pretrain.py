"""Pretraining of a base from random weights: next-token loss on responses, Muon on the matrices, AdamW on the rest.

Looking a letter up in the prompt appears all at once, some hundred steps in, and when depends on the seed. So the
learning rate stays constant until the look-up is there (the world's `lookup_gate`), and only then decays.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from credit_trl.tasks.quickstart_model.architecture import build_model


class World(Protocol):
    """What a base learns: the embedded task's worlds (`curriculum.WORLDS`), or one of your own."""

    @property
    def name(self) -> str: ...

    @property
    def lookup_gate(self) -> float:
        """The accuracy at which the learning rate begins to decay, and that a base must have in the end."""

    def draw(self, rng: random.Random) -> tuple[list[dict[str, str]], str]:
        """One pretraining example: the conversation and the response to it."""

    def lookup_accuracy(self, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> float:
        """How often a model makes of the feedback, read with its prompt, what it means there; in [0, 1]."""


@dataclass(frozen=True)
class Recipe:
    """Steps count updates of `batch_size` examples; the two learning rates are those before the decay."""

    batch_size: int = 32
    warmup_steps: int = 30
    gate_every: int = 50
    min_constant_steps: int = 500
    max_constant_steps: int = 1500
    decay_steps: int = 350
    muon_lr: float = 0.02
    muon_weight_decay: float = 0.0
    adamw_lr: float = 3e-3
    adamw_weight_decay: float = 0.0
    max_grad_norm: float = 1.0


def pretrain(
    tokenizer: PreTrainedTokenizerFast,
    world: World,
    seed: int = 0,
    recipe: Recipe = Recipe(),
    progress: bool = True,
) -> Qwen3ForCausalLM:
    """Train a base of `world` and return it in evaluation mode.

    Raises:
        RuntimeError: the look-up did not appear within `max_constant_steps`, or was lost in the decay.
    """
    rng = random.Random(f"pretrain/{world.name}/{seed}")
    model = build_model(tokenizer, seed).train()
    optimizers = _optimizers(model, recipe)
    peak_rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    remaining = None  # steps of decay left, once the gate is passed
    total = recipe.max_constant_steps + recipe.decay_steps
    bar = tqdm(total=total, desc=f"pretraining the {world.name} base", disable=not progress, unit="step")
    step = 0
    while remaining != 0:
        decay = 1.0 if remaining is None else remaining / recipe.decay_steps
        _set_rates(optimizers, peak_rates, min(1.0, (step + 1) / recipe.warmup_steps) * decay)
        loss = _train_step(model, tokenizer, [world.draw(rng) for _ in range(recipe.batch_size)])
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1
        bar.update()
        if remaining is not None:
            remaining -= 1
        elif step >= recipe.min_constant_steps and step % recipe.gate_every == 0:
            accuracy = world.lookup_accuracy(model, tokenizer)
            bar.set_postfix(loss=f"{loss:.3f}", lookup=f"{accuracy:.2f}")
            if accuracy >= world.lookup_gate:
                remaining, bar.total = recipe.decay_steps, step + recipe.decay_steps
            elif step >= recipe.max_constant_steps:
                break
    bar.close()
    check_gate(world, model, tokenizer, f"after {step} steps of the {world.name} world with seed {seed}")
    return model.eval()


def check_gate(world: World, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, when: str) -> float:
    """The look-up accuracy of a base that is good enough to be a teacher.

    Raises:
        RuntimeError: it is below the world's `lookup_gate`.
    """
    accuracy = world.lookup_accuracy(model, tokenizer, seed=1)
    if accuracy < world.lookup_gate:
        raise RuntimeError(f"Look-up is {accuracy:.2f} {when}, below {world.lookup_gate}: use another seed.")
    return accuracy


def _optimizers(model: Qwen3ForCausalLM, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the 21 projections inside the layers; AdamW for the embeddings and the norms."""
    named = list(model.named_parameters())
    matrices = [parameter for name, parameter in named if parameter.ndim == 2 and "embed" not in name]
    rest = [parameter for name, parameter in named if parameter.ndim != 2 or "embed" in name]
    muon = torch.optim.Muon(matrices, lr=recipe.muon_lr, weight_decay=recipe.muon_weight_decay)
    adamw = torch.optim.AdamW(rest, lr=recipe.adamw_lr, betas=(0.9, 0.98), weight_decay=recipe.adamw_weight_decay)
    return [muon, adamw]


def _set_rates(optimizers: list[torch.optim.Optimizer], peak_rates: list[list[float]], factor: float) -> None:
    for optimizer, rates in zip(optimizers, peak_rates, strict=True):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor


def _train_step(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, examples: list[tuple[list[dict[str, str]], str]]
) -> float:
    """One backward pass; the loss is the mean over the tokens of the responses and their ends of turn."""
    conversations, responses = zip(*examples, strict=True)
    prompts = tokenizer.apply_chat_template(list(conversations), add_generation_prompt=True, tokenize=False)
    prompt_ids = tokenizer(prompts, add_special_tokens=False)["input_ids"]
    response_ids = tokenizer(list(responses), add_special_tokens=False)["input_ids"]
    response_ids = [[*ids, tokenizer.eos_token_id] for ids in response_ids]
    # Shortest first, in two halves: less padding.
    order = sorted(range(len(examples)), key=lambda row: len(prompt_ids[row]))
    halves = [order[: len(order) // 2], order[len(order) // 2 :]]
    tokens = sum(map(len, response_ids))
    total = 0.0
    for rows in halves:
        loss = _response_loss(model, [prompt_ids[row] for row in rows], [response_ids[row] for row in rows]) / tokens
        loss.backward()
        total += loss.item()
    return total


def _response_loss(
    model: Qwen3ForCausalLM, prompt_ids: list[list[int]], response_ids: list[list[int]]
) -> torch.Tensor:
    """Sum of `-log p` over the responses' tokens, a scalar; only their positions are projected to the vocabulary."""
    sequences = [torch.tensor(p + r) for p, r in zip(prompt_ids, response_ids, strict=True)]
    labels = [torch.tensor([-100] * len(p) + r) for p, r in zip(prompt_ids, response_ids, strict=True)]
    input_ids = pad_sequence(sequences, batch_first=True, padding_value=model.config.pad_token_id)
    targets = pad_sequence(labels, batch_first=True, padding_value=-100)[:, 1:]
    hidden = model.model(input_ids=input_ids).last_hidden_state[:, :-1]
    supervised = targets != -100
    return F.cross_entropy(model.lm_head(hidden[supervised]), targets[supervised], reduction="sum")
