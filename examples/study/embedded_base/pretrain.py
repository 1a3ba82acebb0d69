"""Pretraining of a base model: next-token loss on the responses, Muon for the matrices, AdamW for the rest.

The ability to look a letter up in the prompt appears suddenly after some hundred steps, at a step that depends on the
seed. The learning rate therefore stays constant until the look-up accuracy reaches a gate, and decays afterwards.
"""

from __future__ import annotations

import random
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from embedded_base.architecture import build_model
from embedded_base.muon import Muon
from safetensors.torch import save_file
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from credit_trl.quickstart_model import read_base

# A conversation and the response to it, or the response's beginning, which is not trained on, and the rest of it.
Example = tuple[list[dict[str, str]], str | tuple[str, str]]


class Curriculum(Protocol):
    """Source of pretraining examples: a world of the embedded task (`curriculum.World`) or of another task."""

    @property
    def name(self) -> str: ...

    @property
    def lookup_gate(self) -> float:
        """Look-up accuracy that a base must reach; by default the learning rate starts to decay there."""

    def draw(self, rng: random.Random) -> Example:
        """One pretraining example: a conversation and the response to it."""

    def lookup_accuracy(self, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> float:
        """Fraction of prompts with feedback that the model answers as the feedback means there, in [0, 1]."""


@dataclass(frozen=True)
class Recipe:
    """Hyperparameters of the pretraining; a step updates on `batch_size` examples, learning rates are peak values.

    Args:
        decay_gate: look-up accuracy at which the decay starts; None for the curriculum's gate.
    """

    batch_size: int = 32
    warmup_steps: int = 30
    gate_every: int = 50
    min_constant_steps: int = 500
    max_constant_steps: int = 1500
    decay_steps: int = 350
    decay_gate: float | None = None
    muon_lr: float = 0.02
    adamw_lr: float = 3e-3
    adamw_weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    layers: int = 3
    width: int = 96


def pretrain(
    tokenizer: PreTrainedTokenizerFast, curriculum: Curriculum, seed: int = 0, recipe: Recipe = Recipe()
) -> Qwen3ForCausalLM:
    """Train a base from random weights and return it in evaluation mode; prints the look-up accuracy at every gate.

    Raises:
        RuntimeError: the look-up accuracy stays below the gate for `max_constant_steps`, or is below the curriculum's
            gate after the decay.
    """
    rng = random.Random(f"pretrain/{curriculum.name}/{seed}")
    model = build_model(tokenizer, seed, recipe.layers, recipe.width).train()
    optimizers = _optimizers(model, recipe)
    peak_rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    gate = curriculum.lookup_gate if recipe.decay_gate is None else recipe.decay_gate
    remaining = None  # steps of decay left after the gate
    step = 0
    while remaining != 0:
        decay = 1.0 if remaining is None else remaining / recipe.decay_steps
        _set_rates(optimizers, peak_rates, min(1.0, (step + 1) / recipe.warmup_steps) * decay)
        loss = _train_step(model, tokenizer, [curriculum.draw(rng) for _ in range(recipe.batch_size)])
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1
        if remaining is not None:
            remaining -= 1
        elif step >= recipe.min_constant_steps and step % recipe.gate_every == 0:
            accuracy = curriculum.lookup_accuracy(model, tokenizer)
            print(f"{curriculum.name} {seed}, step {step}: loss {loss:.3f}, look-up {accuracy:.2f}", flush=True)
            if accuracy >= gate:
                remaining = recipe.decay_steps
            elif step >= recipe.max_constant_steps:
                break
    check_gate(curriculum, model, tokenizer, f"after {step} steps of the {curriculum.name} world with seed {seed}")
    return model.eval()


def make_base_of(
    curriculum: Curriculum, tokenizer: PreTrainedTokenizerFast, seed: int, directory: Path, recipe: Recipe = Recipe()
) -> None:
    """Pretrain a base and write it to `directory`, which appears only when the base is complete.

    Raises:
        FileExistsError: the directory exists and is not empty.
        RuntimeError: the base fails the look-up gate, before or after its weights are rounded to fp16.
    """
    if directory.is_dir() and any(directory.iterdir()):
        raise FileExistsError(f"{directory} exists: remove it, or choose another directory.")
    model = pretrain(tokenizer, curriculum, seed, recipe)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}.") as scratch:
        written = Path(scratch) / "base"
        write_base(model, tokenizer, written)
        check_gate(curriculum, *read_base(written), "after rounding the weights to fp16")
        written.rename(directory)


def write_base(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Write weights in fp16, which halves the file, with a configuration in fp32, the dtype to compute in."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(directory)
    model.config.architectures = [type(model).__name__]
    model.config.dtype = torch.float32
    model.config.save_pretrained(directory)
    model.generation_config.save_pretrained(directory)
    weights = {name: tensor.half() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def check_gate(
    curriculum: Curriculum, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, when: str
) -> float:
    """Look-up accuracy of a base.

    Raises:
        RuntimeError: the accuracy is below the curriculum's `lookup_gate`.
    """
    accuracy = curriculum.lookup_accuracy(model, tokenizer, seed=1)
    if accuracy < curriculum.lookup_gate:
        raise RuntimeError(f"Look-up is {accuracy:.2f} {when}, below {curriculum.lookup_gate}: use another seed.")
    return accuracy


def _optimizers(model: Qwen3ForCausalLM, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the seven projection matrices of each layer, AdamW for the embeddings and the norms."""
    parameters = list(model.named_parameters())
    matrices = [parameter for name, parameter in parameters if parameter.ndim == 2 and "embed" not in name]
    vectors = [parameter for name, parameter in parameters if parameter.ndim != 2 or "embed" in name]
    muon = Muon(matrices, lr=recipe.muon_lr)
    adamw = torch.optim.AdamW(vectors, lr=recipe.adamw_lr, betas=(0.9, 0.98), weight_decay=recipe.adamw_weight_decay)
    return [muon, adamw]


def _set_rates(optimizers: list[torch.optim.Optimizer], peak_rates: list[list[float]], factor: float) -> None:
    for optimizer, rates in zip(optimizers, peak_rates, strict=True):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor


def _train_step(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, examples: list[Example]) -> float:
    """Backward pass of the mean loss over the trained response tokens, end of turn included; returns the loss."""
    conversations, responses = zip(*examples, strict=True)
    begun, completed = zip(*(("", text) if isinstance(text, str) else text for text in responses), strict=True)
    prompts = tokenizer.apply_chat_template(list(conversations), add_generation_prompt=True, tokenize=False)
    prompts = [prompt + beginning for prompt, beginning in zip(prompts, begun, strict=True)]
    prompt_ids = tokenizer(prompts, add_special_tokens=False)["input_ids"]
    response_ids = tokenizer(list(completed), add_special_tokens=False)["input_ids"]
    response_ids = [[*ids, tokenizer.eos_token_id] for ids in response_ids]
    # Two halves, sorted by prompt length, need less padding than one batch.
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
    """Sum of `-log p` over the response tokens, a scalar; only their hidden states go through the LM head."""
    sequences = [torch.tensor(p + r) for p, r in zip(prompt_ids, response_ids, strict=True)]
    labels = [torch.tensor([-100] * len(p) + r) for p, r in zip(prompt_ids, response_ids, strict=True)]
    input_ids = pad_sequence(sequences, batch_first=True, padding_value=model.config.pad_token_id)
    targets = pad_sequence(labels, batch_first=True, padding_value=-100)[:, 1:]
    hidden = model.model(input_ids=input_ids).last_hidden_state[:, :-1]
    supervised = targets != -100
    return F.cross_entropy(model.lm_head(hidden[supervised]), targets[supervised], reduction="sum")
