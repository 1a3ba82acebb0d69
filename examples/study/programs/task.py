"""Task of small programs with a unit test as feedback: `load_task("programs.task:TASK")`.

A prompt lists four operations under the letters A to D and names a function. The response defines the function:

    system     Operations: A product, B last, C sum, D length.
    user       Write bako for lists.
    assistant  def bako(x):
                   # bako is sum
                   return sum(x)

Each of twelve operations has six made-up names. As in the embedded task there are three groups of names: `known`
(pretrained with the right operation, with label noise), `unknown` (pretrained with random operations, then trained on)
and `holdout` (pretrained with random operations, never trained on).

A program is correct if it returns the right value on every hidden list. The feedback reads `The test expects what C
gives.` The letter stands for different operations in different prompts.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from datasets import Dataset

from credit_trl.rollout.verdict import Verdict
from credit_trl.tasks.registry import Task, batch_of

NAME = "programs.task:TASK"
LETTERS = "ABCD"
OPERATIONS: dict[str, Callable[[Sequence[int]], int]] = {
    "sum": sum,
    "product": math.prod,
    "largest": max,
    "smallest": min,
    "length": len,
    "first": lambda x: x[0],
    "last": lambda x: x[-1],
    "middle": lambda x: x[len(x) // 2],
    "range": lambda x: max(x) - min(x),
    "odd": lambda x: sum(v % 2 for v in x),
    "even": lambda x: sum(v % 2 == 0 for v in x),
    "distinct": lambda x: len(set(x)),
}
# All twelve operations give different values on the first list.
HIDDEN_LISTS = ((15, 16, 12, 3, 11, 20, 4, 16, 19), (3, 3, 8, 1, 5), (12, 7, 30, 4, 4, 9, 6))

_VOWELS, _CONSONANTS = "aeiou", "bdfgklmnprstvz"


def _names() -> tuple[str, ...]:
    """Seventy-two made-up words, the same in every process."""
    rng = random.Random("programs/names")
    words = [c + v + d + w for c in _CONSONANTS for v in _VOWELS for d in _CONSONANTS for w in _VOWELS if c != d]
    return tuple(rng.sample(words, 72))


NAMES = _names()
OPERATION_OF = {name: list(OPERATIONS)[index % len(OPERATIONS)] for index, name in enumerate(NAMES)}
GROUPS = {"known": NAMES[:36], "unknown": NAMES[36:60], "holdout": NAMES[60:]}
GROUP_OF = {name: group for group, names in GROUPS.items() for name in names}
SPLIT_GROUPS = {"train": ("known", "unknown"), "test": ("known", "unknown", "holdout")}
ROWS_PER_NAME = {"train": 32, "test": 4}

_PROGRAM = re.compile(r"def (?P<name>[a-z]+)\(x\):\n    # [^\n]*\n    return (?P<operation>[a-z]+)\(x\)", re.ASCII)


@dataclass(frozen=True)
class Problem:
    """A function to write: its name, the four listed operations, and the correct one."""

    name: str
    options: tuple[str, ...]
    operation: str

    @property
    def letter(self) -> str:
        return LETTERS[self.options.index(self.operation)]

    @property
    def prompt(self) -> list[dict[str, str]]:
        offered = ", ".join(f"{letter} {option}" for letter, option in zip(LETTERS, self.options, strict=True))
        return [
            {"role": "system", "content": f"Operations: {offered}."},
            {"role": "user", "content": f"Write {self.name} for lists."},
        ]

    @property
    def answer(self) -> str:
        return json.dumps({"name": self.name, "options": self.options, "operation": self.operation})

    @property
    def feedback(self) -> str:
        """Feedback for correct and wrong programs alike."""
        return f"The test expects what {self.letter} gives."

    @property
    def response(self) -> str:
        return program(self.name, self.operation)


def program(name: str, operation: str) -> str:
    return f"def {name}(x):\n    # {name} is {operation}\n    return {operation}(x)"


def draw_problem(rng: random.Random, names: Sequence[str] = NAMES) -> Problem:
    """Draw a problem with one of `names`, listing its operation and three others in random order."""
    name = rng.choice(names)
    operation = OPERATION_OF[name]
    others = rng.sample([other for other in OPERATIONS if other != operation], len(LETTERS) - 1)
    return Problem(name, tuple(rng.sample([operation, *others], len(LETTERS))), operation)


def is_tested(problem: Problem) -> bool:
    """Whether a problem belongs to the test split (about a quarter do), by its listed operations."""
    return sum(list(OPERATIONS).index(option) for option in problem.options) % 4 == 0


def build(split: str, path: str | None = None, *, seed: int = 0) -> Dataset:
    """Generate a split with columns `prompt`, `answer`, `task`, `id`, `group`. The splits are disjoint."""
    if path is not None or split not in SPLIT_GROUPS:
        raise ValueError(f"The programs are generated, as {' or '.join(SPLIT_GROUPS)}; got {split!r} from {path!r}.")
    rng = random.Random(f"programs/{split}/{seed}")
    names = [name for group in SPLIT_GROUPS[split] for name in GROUPS[group]] * ROWS_PER_NAME[split]
    rng.shuffle(names)
    rows = []
    for index, name in enumerate(names):
        problem = draw_problem(rng, [name])
        while is_tested(problem) != (split == "test"):
            problem = draw_problem(rng, [name])
        rows.append({"prompt": problem.prompt, "answer": problem.answer, "group": GROUP_OF[name], "task": NAME})
        rows[-1]["id"] = f"programs-{split}-{index}"
    return Dataset.from_list(rows)


def verify(response: str, answer: str, *, truncated: bool = False) -> Verdict:
    """Run a program on the hidden lists. The reward is 1 if it is correct on all of them, else 0.

    Metrics: `format` (the program runs) and `shortcut` (it uses the first listed operation where that is wrong).
    """
    gold = json.loads(answer)
    problem = Problem(gold["name"], tuple(gold["options"]), gold["operation"])
    match = None if truncated else _PROGRAM.fullmatch(response.strip())
    if match is None or match["name"] != problem.name or match["operation"] not in OPERATIONS:
        return Verdict(0.0, problem.feedback, {"format": 0.0, "shortcut": 0.0})
    written, wanted = OPERATIONS[match["operation"]], OPERATIONS[problem.operation]
    right = all(written(numbers) == wanted(numbers) for numbers in HIDDEN_LISTS)
    shortcut = not right and match["operation"] == problem.options[0]
    return Verdict(float(right), problem.feedback, {"format": 1.0, "shortcut": float(shortcut)})


_batch = batch_of(verify, "programs")
TASK = Task(name=NAME, build=build, verify=verify, reward=_batch)
