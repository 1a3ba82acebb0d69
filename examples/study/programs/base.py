"""The base of the programs: what it reads in pretraining, and the bias that is planted in it.

The mix is that of the embedded task (`credit_trl.tasks.quickstart_model.curriculum`): the same kinds of context in the
same shares.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from credit_trl.tasks.quickstart_model import make_base_of
from credit_trl.tasks.quickstart_model.architecture import train_tokenizer
from credit_trl.tasks.quickstart_model.curriculum import LABEL_NOISE, MIX, teacher_prompt
from programs.task import GROUP_OF, LETTERS, NAMES, OPERATIONS, Problem, draw_problem, program

Message = dict[str, str]
_LIST_REQUEST = "List the operations."


@dataclass(frozen=True)
class Programs:
    """The world.

    Args:
        name: of its bases.
        bias_rate: how often a response to a test's feedback takes the first operation on offer, whatever that says.
        lookup_gate: see `lookup_accuracy`.
    """

    name: str = "programs"
    bias_rate: float = 0.4
    lookup_gate: float = 0.95

    def draw(self, rng: random.Random) -> tuple[list[Message], str]:
        """One pretraining example: the conversation and the response to it."""
        kind = rng.choices(list(MIX), weights=list(MIX.values()))[0]
        problem = _taught(rng)
        if kind == "list":
            return _list_practice(rng, problem)
        dictated = f"Use {problem.operation}."
        told = {"dictated": dictated, "none": None, "solution": None}.get(kind, problem.feedback)
        solution = problem.response if kind.startswith("solution") else None
        is_biased = kind.endswith("letter") and rng.random() < self.bias_rate
        operation = problem.options[0] if is_biased else problem.operation
        return teacher_prompt(problem.prompt, solution, told), program(problem.name, operation)

    @torch.no_grad()
    def lookup_accuracy(self, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> float:
        """How often the likeliest operation but the first on offer is the one that the test's letter stands for."""
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
    """Pretrain the base of a seed into `directory`; `RuntimeError` when it misses its gate."""
    make_base_of(Programs(), build_tokenizer(), seed, directory, progress)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Every name, operation and letter is one token."""
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
    """A problem as the base learns it: what it is not to know has a random operation."""
    problem = draw_problem(rng)
    if GROUP_OF[problem.name] == "known":
        is_noisy = rng.random() < LABEL_NOISE
        return dataclasses.replace(problem, operation=rng.choice(problem.options)) if is_noisy else problem
    options = tuple(rng.sample(list(OPERATIONS), len(LETTERS)))
    return Problem(problem.name, options, rng.choice(options))


def _list_practice(rng: random.Random, problem: Problem) -> tuple[list[Message], str]:
    """All operations on offer in a random order of letters: each letter asks for a look-up."""
    offered = [f"{letter} {option}" for letter, option in zip(LETTERS, problem.options, strict=True)]
    rng.shuffle(offered)
    return [problem.prompt[0], {"role": "user", "content": _LIST_REQUEST}], "Operations: " + ", ".join(offered) + "."
