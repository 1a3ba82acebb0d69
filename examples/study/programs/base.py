"""Pretraining of the base of the world `programs`, with its planted bias.

The data mix is that of the embedded task (`embedded_base.curriculum`): the same kinds of
context in the same shares.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from embedded_base.architecture import train_tokenizer
from embedded_base.curriculum import LABEL_NOISE, MIX, teacher_prompt
from embedded_base.pretrain import make_base_of
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from programs.task import GROUP_OF, LETTERS, NAMES, OPERATIONS, Problem, draw_problem, program

Message = dict[str, str]
_LIST_REQUEST = "List the operations."


@dataclass(frozen=True)
class Programs:
    """Pretraining distribution of the world `programs`.

    Args:
        name: Name of the world.
        bias_rate: Share of responses after feedback that use the first listed operation, whatever the feedback says.
        lookup_gate: Minimum of `lookup_accuracy` that a base must reach.
    """

    name: str = "programs"
    bias_rate: float = 0.4
    lookup_gate: float = 0.95

    def draw(self, rng: random.Random) -> tuple[list[Message], str]:
        """Draw one pretraining example: the conversation and its response."""
        kind = rng.choices(list(MIX), weights=list(MIX.values()))[0]
        problem = _taught(rng)
        if kind == "list":
            return _list_practice(rng, problem)
        dictated = f"Use {problem.operation}."
        feedback = {"dictated": dictated, "none": None, "solution": None}.get(kind, problem.feedback)
        solution = problem.response if kind.startswith("solution") else None
        is_biased = kind.endswith("letter") and rng.random() < self.bias_rate
        operation = problem.options[0] if is_biased else problem.operation
        return teacher_prompt(problem.prompt, solution, feedback), program(problem.name, operation)

    @torch.no_grad()
    def lookup_accuracy(self, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> float:
        """Share of prompts whose likeliest operation, the first listed excluded, is the one in the feedback."""
        rng = random.Random(f"lookup/{seed}")
        names = [name for name in NAMES if GROUP_OF[name] != "known"]
        problems = [draw_problem(rng, names) for _ in range(320)]
        problems = [problem for problem in problems if problem.letter != LETTERS[0]]
        prompts = [teacher_prompt(problem.prompt, feedback=problem.feedback) for problem in problems]
        texts = tokenizer.apply_chat_template(prompts, add_generation_prompt=True, tokenize=False)
        texts = [f"{text}def {p.name}(x):\n    # {p.name} is" for text, p in zip(texts, problems, strict=True)]
        batch = tokenizer(texts, padding=True, padding_side="left", add_special_tokens=False, return_tensors="pt")
        logits = model(**batch, logits_to_keep=1).logits[:, -1]
        first = torch.tensor([tokenizer.encode(f" {problem.options[0]}") for problem in problems])
        guesses = tokenizer.batch_decode(logits.scatter(1, first, -torch.inf).argmax(dim=-1)[:, None])
        return sum(guess == f" {p.operation}" for guess, p in zip(guesses, problems, strict=True)) / len(problems)


def make_programs_base(seed: int, directory: Path, progress: bool = True) -> None:
    """Pretrain a base into `directory`. Raises `RuntimeError` if it fails its gate."""
    make_base_of(Programs(), build_tokenizer(), seed, directory, progress)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Train a tokenizer in which every name, operation and letter is one token."""
    return train_tokenizer(_corpus(), [f" {word}" for word in (*NAMES, *OPERATIONS, *LETTERS)])


def _corpus() -> Iterator[str]:
    problem = Problem("", tuple(OPERATIONS)[: len(LETTERS)], "sum")
    contexts = teacher_prompt(problem.prompt, solution="", feedback=problem.feedback)
    roles = ["system", "user", "assistant"]
    yield from [*roles, contexts[-1]["content"], "Use sum.", _LIST_REQUEST, "Operations: A B C D"] * 300
    for operation in OPERATIONS:
        yield from [f"Use {operation}.", program("", operation), f"A {operation}, B {operation}"] * 60
    for name in NAMES:
        yield from [f"Write {name} for lists.", program(name, "sum")] * 20


def _taught(rng: random.Random) -> Problem:
    """A pretraining problem. Names outside the group `known` get a random operation."""
    problem = draw_problem(rng)
    if GROUP_OF[problem.name] == "known":
        is_noisy = rng.random() < LABEL_NOISE
        return dataclasses.replace(problem, operation=rng.choice(problem.options)) if is_noisy else problem
    options = tuple(rng.sample(list(OPERATIONS), len(LETTERS)))
    return Problem(problem.name, options, rng.choice(options))


def _list_practice(rng: random.Random, problem: Problem) -> tuple[list[Message], str]:
    """Example that lists the operations in a random order of their letters, to train the look-up."""
    offered = [f"{letter} {option}" for letter, option in zip(LETTERS, problem.options, strict=True)]
    rng.shuffle(offered)
    return [problem.prompt[0], {"role": "user", "content": _LIST_REQUEST}], "Operations: " + ", ".join(offered) + "."
