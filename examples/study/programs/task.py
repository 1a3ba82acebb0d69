"""Small programs and one unit test: a task for `load_task("programs.task:TASK")`.

A prompt offers four operations on a list under the letters A to D and names a function; the response is the function:

    system     Operations: A product, B last, C sum, D length.
    user       Write bako for lists.
    assistant  def bako(x):
                   # bako is sum
                   return sum(x)

Twelve operations have six made-up names each. As in the embedded task, what the base knows of the names makes three
groups: `known` (taught, with noise), `unknown` (seen with random operations; trained on) and `holdout` (as unknown,
never trained on).

The program is run on lists that the prompt does not show; it is right when it is right on all of them. The feedback is
what its test says: `The test expects what C gives.` The letter means another operation under another prompt.
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
# On the first every operation gives another number, so it is the test; all are hidden.
HIDDEN_LISTS = ((15, 16, 12, 3, 11, 20, 4, 16, 19), (3, 3, 8, 1, 5), (12, 7, 30, 4, 4, 9, 6))

_VOWELS, _CONSONANTS = "aeiou", "bdfgklmnprstvz"


def _names() -> tuple[str, ...]:
    """Seventy-two made-up words, always the same."""
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
    """A function to write: its name, the four operations on offer, and the one of them that counts as right."""

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
        """What the test says, of right and of wrong programs alike."""
        return f"The test expects what {self.letter} gives."

    @property
    def response(self) -> str:
        return program(self.name, self.operation)


def program(name: str, operation: str) -> str:
    return f"def {name}(x):\n    # {name} is {operation}\n    return {operation}(x)"


def draw_problem(rng: random.Random, names: Sequence[str] = NAMES) -> Problem:
    """A problem on one of `names`, with its operation among four shuffled ones."""
    name = rng.choice(names)
    operation = OPERATION_OF[name]
    others = rng.sample([other for other in OPERATIONS if other != operation], len(LETTERS) - 1)
    return Problem(name, tuple(rng.sample([operation, *others], len(LETTERS))), operation)


def is_tested(problem: Problem) -> bool:
    """Whether a problem belongs to the test split, by the operations on offer; about a quarter of all do."""
    return sum(list(OPERATIONS).index(option) for option in problem.options) % 4 == 0


def build(split: str, path: str | None = None, *, seed: int = 0) -> Dataset:
    """The problems of a split, generated; columns `prompt`, `answer`, `task`, `id`, `group`. No problem is in both."""
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
    """Run a program on hidden lists; reward 1 when it is right on all of them.

    Metrics: `format` (the program runs) and `shortcut` (it takes the first operation on offer where that is wrong).
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
