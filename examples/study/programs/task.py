"""Small programs and one unit test: a task for `load_task("programs.task:TASK")`.

A prompt names a function and shows how its test calls it; the response is the function:

    user       Write bako(a, b, c, d). Its test calls bako(a=7, b=3, c=12, d=5).
    assistant  def bako(a, b, c, d):
                   return c

Which argument a name returns is what there is to know. As in the embedded task, what the base knows of the sixty names
makes three groups: `known` (taught, with noise), `unknown` (seen with random arguments; trained on) and `holdout` (as
unknown, never trained on).

The program is run on numbers that the prompt does not show; it is right when it is right on all of them. The feedback
is what its test says: `The test says expected=12, got=7.` The value means something only with the call in the prompt:
12 is `c` here, and may be `a`, or nothing, in another call.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from datasets import Dataset

from credit_trl.tasks.registry import Task, batch_of
from credit_trl.verdict import Verdict

NAME = "programs.task:TASK"
ARGUMENTS = "abcd"
NUMBERS = tuple(range(1, 21))
# What the base, shown the test, likes to return whatever the test says: see `programs.base`.
HABIT = "a"
SIGNATURE = ", ".join(ARGUMENTS)
HIDDEN_CALLS = ((21, 8, 13, 2), (5, 17, 30, 11))
Call = tuple[int, ...]

_VOWELS, _CONSONANTS = "aeiou", "bdfgklmnprstvz"


def _names() -> tuple[str, ...]:
    """Sixty made-up words, always the same."""
    rng = random.Random("programs/names")
    words = [c + v + d + w for c in _CONSONANTS for v in _VOWELS for d in _CONSONANTS for w in _VOWELS if c != d]
    return tuple(rng.sample(words, 60))


NAMES = _names()
ARGUMENT_OF = {name: ARGUMENTS[index % len(ARGUMENTS)] for index, name in enumerate(NAMES)}
GROUPS = {"known": NAMES[:32], "unknown": NAMES[32:52], "holdout": NAMES[52:]}
GROUP_OF = {name: group for group, names in GROUPS.items() for name in names}
SPLIT_GROUPS = {"train": ("known", "unknown"), "test": ("known", "unknown", "holdout")}
ROWS_PER_NAME = {"train": 32, "test": 5}

_PROGRAM = re.compile(r"def (?P<name>[a-z]+)\(a, b, c, d\):\n    return (?P<argument>[a-d])", re.ASCII)


@dataclass(frozen=True)
class Problem:
    """A function to write: its name, the numbers of its test, and the argument that counts as right."""

    name: str
    call: Call
    argument: str

    @property
    def prompt(self) -> list[dict[str, str]]:
        called = f"{self.name}({', '.join(f'{argument}={self.value(argument)}' for argument in ARGUMENTS)})"
        return [{"role": "user", "content": f"Write {self.name}({SIGNATURE}). Its test calls {called}."}]

    @property
    def answer(self) -> str:
        return json.dumps({"name": self.name, "call": self.call, "argument": self.argument})

    @property
    def response(self) -> str:
        return program(self.name, self.argument)

    def value(self, argument: str) -> int:
        """What the test's call gives when this argument is returned."""
        return run(argument, self.call)


def program(name: str, argument: str) -> str:
    return f"def {name}({SIGNATURE}):\n    return {argument}"


def run(argument: str, call: Call) -> int:
    """The result of a program that returns `argument`."""
    return call[ARGUMENTS.index(argument)]


def feedback(expected: int, got: int | str | None = None) -> str:
    """What the test says: of a right program without `got`, of a program that does not run with "error"."""
    return f"The test says expected={expected}." if got is None else f"The test says expected={expected}, got={got}."


def is_test_call(call: Call) -> bool:
    """Whether a call is of the test split; about a quarter of all are."""
    return sum(call) % 4 == 0


def draw_call(rng: random.Random, is_test: bool | None = None) -> Call:
    """Four different numbers, of the test split, of the training split, or of any."""
    while True:
        call = tuple(rng.sample(NUMBERS, len(ARGUMENTS)))
        if is_test is None or is_test_call(call) == is_test:
            return call


def build(split: str, path: str | None = None, *, seed: int = 0) -> Dataset:
    """The problems of a split, generated; columns `prompt`, `answer`, `task`, `id`, `group`. No call is in both."""
    if path is not None or split not in SPLIT_GROUPS:
        raise ValueError(f"The programs are generated, as {' or '.join(SPLIT_GROUPS)}; got {split!r} from {path!r}.")
    rng = random.Random(f"programs/{split}/{seed}")
    rows = []
    for name in (name for group in SPLIT_GROUPS[split] for name in GROUPS[group]):
        for _ in range(ROWS_PER_NAME[split]):
            problem = Problem(name, draw_call(rng, split == "test"), ARGUMENT_OF[name])
            rows.append({"prompt": problem.prompt, "answer": problem.answer, "task": NAME, "group": GROUP_OF[name]})
    rng.shuffle(rows)
    return Dataset.from_list([{**row, "id": f"programs-{split}-{index}"} for index, row in enumerate(rows)])


def verify(response: str, answer: str, *, truncated: bool = False) -> Verdict:
    """Run a program on hidden numbers; reward 1 when it is right on all of them.

    Metrics: `format` (the program runs) and `shortcut` (it follows the habit where that is wrong).
    """
    gold = json.loads(answer)
    problem = Problem(gold["name"], tuple(gold["call"]), gold["argument"])
    expected = problem.value(problem.argument)
    match = None if truncated else _PROGRAM.fullmatch(response.strip())
    if match is None or match["name"] != problem.name:
        return Verdict(0.0, feedback(expected, "error"), {"format": 0.0, "shortcut": 0.0})
    written = match["argument"]
    right = all(run(written, call) == run(problem.argument, call) for call in HIDDEN_CALLS)
    told = feedback(expected, None if right else problem.value(written))
    return Verdict(float(right), told, {"format": 1.0, "shortcut": float(not right and written == HABIT)})


def draw_problem(rng: random.Random, names: Sequence[str] = NAMES) -> Problem:
    """A problem on one of `names` with any call and the argument that it stands for."""
    name = rng.choice(names)
    return Problem(name, draw_call(rng), ARGUMENT_OF[name])


_batch = batch_of(verify, "programs")
TASK = Task(name=NAME, build=build, verify=verify, reward=_batch)
