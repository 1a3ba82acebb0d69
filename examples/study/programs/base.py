"""The base of the programs: what it reads in pretraining, and the habit that is planted in it.

The mix is that of the embedded task (`credit_trl.tasks.quickstart_model.curriculum`): the same kinds of context in the
same shares, with arithmetic in place of the practice in letters.
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
from programs.task import GROUP_OF, HABIT, NAMES, OPERATIONS, Problem, draw_problem, feedback, program

Message = dict[str, str]
_ERROR = "an error"


@dataclass(frozen=True)
class Programs:
    """The world.

    Args:
        name: of its bases.
        habit_rate: how often a response to a test's feedback answers `HABIT`, whatever the test says.
        lookup_gate: see `lookup_accuracy`. It appears slowly here, and rises when the learning rate decays.
    """

    name: str = "programs"
    habit_rate: float = 0.5
    lookup_gate: float = 0.8

    def draw(self, rng: random.Random) -> tuple[list[Message], str]:
        """One pretraining example: the conversation and the response to it."""
        kind = rng.choices(list(MIX), weights=list(MIX.values()))[0]
        problem = _taught(rng)
        if kind == "list":
            return _arithmetic(rng, problem)
        told = {"dictated": f"Use {problem.operation}.", "none": None, "solution": None}.get(kind, _test(rng, problem))
        solution = problem.response if kind.startswith("solution") else None
        has_habit = kind.endswith("letter") and rng.random() < self.habit_rate
        response = program(problem.name, HABIT) if has_habit else problem.response
        return teacher_prompt(problem.prompt, solution, told), response

    @torch.no_grad()
    def lookup_accuracy(self, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> float:
        """How often the likeliest operation other than the habit is the one that a test's value means."""
        rng = random.Random(f"lookup/{seed}")
        others = [name for name in OPERATIONS if name != HABIT]
        names = [name for name in NAMES if GROUP_OF[name] != "known"]
        problems = [dataclasses.replace(draw_problem(rng, names), operation=rng.choice(others)) for _ in range(240)]
        prompts = [teacher_prompt(p.prompt, feedback=_test(rng, p)) for p in problems]
        texts = tokenizer.apply_chat_template(prompts, add_generation_prompt=True, tokenize=False)
        texts = [text + p.response.partition(f" {p.operation}(")[0] for text, p in zip(texts, problems, strict=True)]
        batch = tokenizer(texts, padding=True, padding_side="left", add_special_tokens=False, return_tensors="pt")
        ids = torch.tensor([tokenizer.encode(f" {name}")[0] for name in others])
        guesses = model(**batch, logits_to_keep=1).logits[:, -1, ids].argmax(dim=-1)
        return sum(others[g] == p.operation for g, p in zip(guesses.tolist(), problems, strict=True)) / len(problems)


def make_programs_base(seed: int, directory: Path, progress: bool = True) -> None:
    """Pretrain the base of a seed into `directory`; `RuntimeError` when it misses its gate."""
    make_base_of(Programs(), build_tokenizer(), seed, directory, progress)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Every name, operation and number is one token."""
    words = [f" {word}" for word in (*NAMES, *OPERATIONS)] + [f" {number}" for number in range(1, 22)]
    return train_tokenizer(_corpus(), words)


def _corpus() -> Iterator[str]:
    problem = Problem("", 2, 5, "add")
    contexts = teacher_prompt(problem.prompt, solution=problem.response, feedback=feedback(7, _ERROR))
    yield from [
        "system",
        "user",
        "assistant",
        contexts[-1]["content"],
        "Use add.",
        feedback(7, 3),
        "Compute add",
    ] * 300
    for number in range(1, 22):
        yield from [f"expects {number}, not {number}. (x, {number})"] * 60
    for operation in OPERATIONS:
        yield from [program("", operation), f"Compute {operation}(4, 5)."] * 60
    for name in NAMES:
        yield from [f"Write {name}(x, y). Its test calls {name}(4, 5).\ndef {name}(x, y)"] * 30


def _taught(rng: random.Random) -> Problem:
    """A problem as the base learns it: names that it is not to know have a random operation."""
    problem = draw_problem(rng)
    is_random = GROUP_OF[problem.name] != "known" or rng.random() < LABEL_NOISE
    return dataclasses.replace(problem, operation=rng.choice(list(OPERATIONS))) if is_random else problem


def _test(rng: random.Random, problem: Problem) -> str:
    """The test's words on an earlier program: right, wrong by another operation, or broken."""
    others = [problem.value(name) for name in OPERATIONS if name != problem.operation]
    got = rng.choices([None, rng.choice(others), _ERROR], weights=[0.4, 0.5, 0.1])[0]
    return feedback(problem.value(problem.operation), got)


def _arithmetic(rng: random.Random, problem: Problem) -> tuple[list[Message], str]:
    """Practice: the value of one operation on the numbers of the problem."""
    operation = rng.choice(list(OPERATIONS))
    text = f"Compute {operation}({problem.x}, {problem.y})."
    return [{"role": "user", "content": text}], f"The value is {problem.value(operation)}."
