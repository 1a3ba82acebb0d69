"""Small programs and one unit test: a task for `load_task("programs.task:TASK")`.

A prompt names a function and shows how its test calls it; the response is the function:

    user       Write bako(x, y). Its test calls bako(4, 5).
    assistant  def bako(x, y):
                   return mul(x, y)

What a name stands for is one of five operations. As in the embedded task, what the base knows of the sixty names makes
three groups: `known` (taught, with noise), `unknown` (seen with random operations; trained on) and `holdout` (as
unknown, never trained on).

The program is run on pairs of numbers that the prompt does not show; it is right when it is right on all of them. The
feedback is what the test says: `The test expects 20, not 9.` The value means something only with the call in the
prompt: 20 is `mul` of 4 and 5, and 9 is `add`, but `max` of 3 and 9.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import permutations

from datasets import Dataset

from credit_trl.tasks.registry import Task, batch_of
from credit_trl.verdict import Verdict

NAME = "programs.task:TASK"
OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "add": lambda x, y: x + y,
    "diff": lambda x, y: abs(x - y),
    "mul": lambda x, y: x * y,
    "max": max,
    "min": min,
}
# What the base, shown a failing test, likes to answer whatever the test says: see `programs.base`.
HABIT = "max"


def tells_apart(x: int, y: int) -> bool:
    """Whether the five operations give five different numbers."""
    return len({operation(x, y) for operation in OPERATIONS.values()}) == len(OPERATIONS)


# Ordered pairs with small products, so that most values have more than one reading.
CALLS = tuple((x, y) for x, y in permutations(range(2, 10), 2) if x * y <= 21 and tells_apart(x, y))
HIDDEN_CALLS = ((7, 8), (9, 6), (5, 8))
TEST_CALLS_PER_NAME = 5

_VOWELS, _CONSONANTS = "aeiou", "bdfgklmnprstvz"


def _names() -> tuple[str, ...]:
    """Sixty made-up words, always the same."""
    rng = random.Random("programs/names")
    words = [c + v + d + w for c in _CONSONANTS for v in _VOWELS for d in _CONSONANTS for w in _VOWELS if c != d]
    return tuple(rng.sample(words, 60))


NAMES = _names()
OPERATION_OF = {name: list(OPERATIONS)[index % len(OPERATIONS)] for index, name in enumerate(NAMES)}
GROUPS = {"known": NAMES[:30], "unknown": NAMES[30:50], "holdout": NAMES[50:]}
GROUP_OF = {name: group for group, names in GROUPS.items() for name in names}
SPLIT_GROUPS = {"train": ("known", "unknown"), "test": ("known", "unknown", "holdout")}
ROWS_PER_NAME = {"train": 32, "test": 5}

_PROGRAM = re.compile(
    r"def (?P<name>[a-z]+)\(x, y\):\n    return (?P<operation>[a-z]+)\((?P<args>x, y|y, x)\)", re.ASCII
)


@dataclass(frozen=True)
class Problem:
    """A function to write: its name, the numbers of its test, and the operation that counts as right."""

    name: str
    x: int
    y: int
    operation: str

    @property
    def prompt(self) -> list[dict[str, str]]:
        call = f"{self.name}({self.x}, {self.y})"
        return [{"role": "user", "content": f"Write {self.name}(x, y). Its test calls {call}."}]

    @property
    def answer(self) -> str:
        return json.dumps({"name": self.name, "x": self.x, "y": self.y, "operation": self.operation})

    @property
    def response(self) -> str:
        return program(self.name, self.operation)

    def value(self, operation: str) -> int:
        """What the test's call gives with an operation."""
        return OPERATIONS[operation](self.x, self.y)


def program(name: str, operation: str) -> str:
    return f"def {name}(x, y):\n    return {operation}(x, y)"


def feedback(expected: int, got: int | str | None = None) -> str:
    """What the test says: of a right program without `got`, of a program that does not run with "an error"."""
    return f"The test expects {expected}." if got is None else f"The test expects {expected}, not {got}."


def calls_of(name: str, split: str) -> tuple[tuple[int, int], ...]:
    """The calls that a split shows with a name: five for the test, the others for training."""
    held_out = random.Random(f"programs/calls/{name}").sample(CALLS, TEST_CALLS_PER_NAME)
    return tuple(call for call in CALLS if (call in held_out) == (split == "test"))


def build(split: str, path: str | None = None, *, seed: int = 0) -> Dataset:
    """The problems of a split, generated; columns `prompt`, `answer`, `task`, `id`, `group`."""
    if path is not None or split not in SPLIT_GROUPS:
        raise ValueError(f"The programs are generated, as {' or '.join(SPLIT_GROUPS)}; got {split!r} from {path!r}.")
    rng = random.Random(f"programs/{split}/{seed}")
    rows = []
    for name in (name for group in SPLIT_GROUPS[split] for name in GROUPS[group]):
        calls = calls_of(name, split)
        for index in range(ROWS_PER_NAME[split]):
            problem = Problem(name, *calls[index % len(calls)], OPERATION_OF[name])
            rows.append({"prompt": problem.prompt, "answer": problem.answer, "task": NAME, "group": GROUP_OF[name]})
    rng.shuffle(rows)
    return Dataset.from_list([{**row, "id": f"programs-{split}-{index}"} for index, row in enumerate(rows)])


def verify(response: str, answer: str, *, truncated: bool = False) -> Verdict:
    """Run a program on hidden numbers; reward 1 when it is right on all of them.

    Metrics: `format` (the program runs) and `shortcut` (it answers with the habit where that is wrong).
    """
    gold = json.loads(answer)
    problem = Problem(gold["name"], gold["x"], gold["y"], gold["operation"])
    match = None if truncated else _PROGRAM.fullmatch(response.strip())
    runs = match is not None and match["name"] == problem.name and match["operation"] in OPERATIONS
    if not runs:
        told = feedback(problem.value(problem.operation), "an error")
        return Verdict(0.0, told, {"format": 0.0, "shortcut": 0.0})
    wanted, written = OPERATIONS[problem.operation], OPERATIONS[match["operation"]]
    swap = match["args"] == "y, x"
    right = all(written(*((y, x) if swap else (x, y))) == wanted(x, y) for x, y in HIDDEN_CALLS)
    got = None if right else problem.value(match["operation"])
    habit = not right and match["operation"] == HABIT
    return Verdict(
        float(right), feedback(wanted(problem.x, problem.y), got), {"format": 1.0, "shortcut": float(habit)}
    )


def draw_problem(rng: random.Random, names: Sequence[str] = NAMES) -> Problem:
    """A problem on one of `names` with any call and the operation that it stands for."""
    name = rng.choice(names)
    return Problem(name, *rng.choice(CALLS), OPERATION_OF[name])


_batch = batch_of(verify, "programs")
TASK = Task(name=NAME, build=build, verify=verify, reward=_batch)
