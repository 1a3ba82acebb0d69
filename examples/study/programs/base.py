"""The base of the programs: what it reads in pretraining, and the habit that is planted in it.

The mix is that of the embedded task (`credit_trl.tasks.quickstart_model.curriculum`): the same kinds of context in the
same shares, with the numbers of a call in place of the tools of a list.
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
from programs.task import (
    ARGUMENTS,
    GROUP_OF,
    HABIT,
    NAMES,
    NUMBERS,
    SIGNATURE,
    Problem,
    draw_problem,
    feedback,
    program,
)

Message = dict[str, str]
_ERROR = "error"


@dataclass(frozen=True)
class Programs:
    """The world.

    Args:
        name: of its bases.
        habit_rate: how often a response to a test's feedback returns `HABIT`, whatever the test says.
        lookup_gate: see `lookup_accuracy`.
    """

    name: str = "programs"
    habit_rate: float = 0.5
    lookup_gate: float = 0.95

    def draw(self, rng: random.Random) -> tuple[list[Message], str]:
        """One pretraining example: the conversation and the response to it."""
        kind = rng.choices(list(MIX), weights=list(MIX.values()))[0]
        problem = _taught(rng)
        if kind == "list":
            return _list_practice(rng, problem)
        told = {"dictated": f"Return {problem.argument}.", "none": None, "solution": None}.get(
            kind, _test(rng, problem)
        )
        solution = problem.response if kind.startswith("solution") else None
        has_habit = kind.endswith("letter") and rng.random() < self.habit_rate
        response = program(problem.name, HABIT) if has_habit else problem.response
        return teacher_prompt(problem.prompt, solution, told), response

    @torch.no_grad()
    def lookup_accuracy(self, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> float:
        """How often the likeliest argument other than the habit is the one that a test's value means."""
        rng = random.Random(f"lookup/{seed}")
        others = [name for name in ARGUMENTS if name != HABIT]
        names = [name for name in NAMES if GROUP_OF[name] != "known"]
        problems = [dataclasses.replace(draw_problem(rng, names), argument=rng.choice(others)) for _ in range(240)]
        prompts = [teacher_prompt(p.prompt, feedback=_test(rng, p)) for p in problems]
        texts = tokenizer.apply_chat_template(prompts, add_generation_prompt=True, tokenize=False)
        texts = [text + p.response.removesuffix(f" {p.argument}") for text, p in zip(texts, problems, strict=True)]
        batch = tokenizer(texts, padding=True, padding_side="left", add_special_tokens=False, return_tensors="pt")
        ids = torch.tensor([tokenizer.encode(f" {name}")[0] for name in others])
        guesses = model(**batch, logits_to_keep=1).logits[:, -1, ids].argmax(dim=-1)
        return sum(others[g] == p.argument for g, p in zip(guesses.tolist(), problems, strict=True)) / len(problems)


def make_programs_base(seed: int, directory: Path, progress: bool = True) -> None:
    """Pretrain the base of a seed into `directory`; `RuntimeError` when it misses its gate."""
    make_base_of(Programs(), build_tokenizer(), seed, directory, progress)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Every name, argument and number is one token."""
    words = [f" {word}" for word in (*NAMES, *ARGUMENTS)] + [str(number) for number in NUMBERS]
    return train_tokenizer(_corpus(), words)


def _corpus() -> Iterator[str]:
    problem = Problem("", (7, 3, 12, 5), "c")
    contexts = teacher_prompt(problem.prompt, solution=problem.response, feedback=feedback(12, _ERROR))
    roles = ["system", "user", "assistant"]
    yield from [*roles, contexts[-1]["content"], "Return c.", feedback(12, 3), _LIST_REQUEST, "value=3 is a"] * 300
    for number in NUMBERS:
        yield from [f"expected={number}, got={number}. b={number}, value={number} is"] * 60
    for argument in ARGUMENTS:
        yield from [program("", argument), f"Return {argument}."] * 60
    for name in NAMES:
        yield from [
            f"Write {name}({SIGNATURE}). Its test calls {name}(a=4, b=5, c=6, d=7).\ndef {name}({SIGNATURE})"
        ] * 30


def _taught(rng: random.Random) -> Problem:
    """A problem as the base learns it: names that it is not to know have a random argument."""
    problem = draw_problem(rng)
    is_random = GROUP_OF[problem.name] != "known" or rng.random() < LABEL_NOISE
    return dataclasses.replace(problem, argument=rng.choice(ARGUMENTS)) if is_random else problem


def _test(rng: random.Random, problem: Problem) -> str:
    """The test's words on an earlier program: right, wrong by another argument, or broken."""
    others = [problem.value(name) for name in ARGUMENTS if name != problem.argument]
    got = rng.choices([None, rng.choice(others), _ERROR], weights=[0.4, 0.5, 0.1])[0]
    return feedback(problem.value(problem.argument), got)


_LIST_REQUEST = "List the values."


def _list_practice(rng: random.Random, problem: Problem) -> tuple[list[Message], str]:
    """All values with their arguments, in a random order: each asks for a look-up."""
    values = [f"value={problem.value(name)} is {name}" for name in rng.sample(ARGUMENTS, len(ARGUMENTS))]
    request = problem.prompt[0]["content"].partition(". ")[2]
    return [{"role": "user", "content": f"{request} {_LIST_REQUEST}"}], ", ".join(values) + "."
