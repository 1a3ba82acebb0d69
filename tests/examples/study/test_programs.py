"""The world `programs`: its verifier against Python, its feedback, its splits and its planted bias."""

from __future__ import annotations

import math
import random
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

STUDY = Path(__file__).parents[3] / "examples" / "study"
PYTHON = """
from math import prod as product
sum, length, largest, smallest = sum, len, max, min
def first(x): return x[0]
def last(x): return x[-1]
def middle(x): return x[len(x) // 2]
def range(x): return max(x) - min(x)
def odd(x): return sum(v & 1 for v in x)
def even(x): return len(x) - odd(x)
def distinct(x): return len(frozenset(x))
"""
OPERATIONS = "sum product largest smallest length first last middle range odd even distinct".split()


@pytest.fixture(scope="module")
def programs():
    """Both modules, imported as the study's scripts import them."""
    sys.path.insert(0, str(STUDY))
    try:
        yield SimpleNamespace(task=import_module("programs.task"), base=import_module("programs.base"))
    finally:
        sys.path.remove(str(STUDY))
        for name in ("programs", "programs.task", "programs.base"):
            sys.modules.pop(name, None)


def results(source: str, name: str, lists: tuple) -> list[int]:
    """Values that Python computes with a program."""
    scope: dict = {}
    exec(PYTHON + source, scope)
    return [scope[name](list(numbers)) for numbers in lists]


@given(
    options=st.lists(st.sampled_from(OPERATIONS), min_size=4, max_size=4, unique=True).map(tuple),
    right=st.integers(0, 3),
    written=st.sampled_from(OPERATIONS),
)
def test_verifier_agrees_with_python(programs, options, right, written):
    task = programs.task
    problem = task.Problem("bako", options, options[right])
    source = task.program("bako", written)
    verdict = task.verify(source, problem.answer)
    same = results(source, "bako", task.HIDDEN_LISTS) == results(problem.response, "bako", task.HIDDEN_LISTS)
    assert same == (written == options[right])  # the lists separate all operations
    assert verdict.reward == float(same)
    assert verdict.metrics == {"format": 1.0, "shortcut": float(written == options[0] and not same)}
    assert verdict.feedback == f"The test expects what {'ABCD'[right]} gives."


@pytest.mark.parametrize(
    "response",
    [
        "",
        "def bako(x):\n    return sum(x)",
        "def kora(x):\n    # kora is sum\n    return sum(x)",
        "def bako(x):\n    # bako is sum\n    return system(x)",
        "def bako(x):\n    # bako is sum\n    return sum(x)\nimport os",
    ],
)
def test_malformed_program_scores_zero(programs, response):
    verdict = programs.task.verify(response, programs.task.Problem("bako", tuple(OPERATIONS[:4]), "sum").answer)
    assert (verdict.reward, verdict.metrics) == (0.0, {"format": 0.0, "shortcut": 0.0})


def test_truncated_program_scores_zero(programs):
    problem = programs.task.Problem("bako", tuple(OPERATIONS[:4]), "sum")
    assert programs.task.verify(problem.response, problem.answer, truncated=True).reward == 0.0


def test_letter_and_operation_are_independent(programs):
    rng = random.Random(0)
    drawn = [programs.task.draw_problem(rng) for _ in range(12_000)]
    counts = Counter((problem.letter, problem.operation) for problem in drawn)
    total, letters, operations = len(drawn), Counter(), Counter()
    for (letter, operation), count in counts.items():
        letters[letter] += count
        operations[operation] += count
    information = sum(
        n / total * math.log(n * total / (letters[letter] * operations[operation]))
        for (letter, operation), n in counts.items()
    )
    assert information < 0.01  # nats, of at most log 4
    assert len(counts) == 48


def test_splits_are_disjoint_and_train_has_no_holdout(programs):
    train, test = (programs.task.build(split) for split in ("train", "test"))
    assert set(train["group"]) == {"known", "unknown"}
    assert Counter(test["group"]) == {"known": 144, "unknown": 96, "holdout": 48}
    assert len(set(test["id"])) == len(test)
    assert not set(train["answer"]) & set(test["answer"])
    for group, names in programs.task.GROUPS.items():
        of = Counter(programs.task.OPERATION_OF[name] for name in names)
        assert len(set(of.values())) == 1, group


def test_pretraining_plants_knowledge_and_bias_as_stated(programs):
    rng, world = random.Random(0), programs.base.Programs()
    first: dict[tuple[str, bool], list[bool]] = {}
    right: dict[str, list[bool]] = {}
    for _ in range(20_000):
        (system, user), response = world.draw(rng)
        if not user["content"].startswith("Write "):
            continue
        name = user["content"].split()[1]
        operation = response.split("return ")[1].split("(")[0]
        group = programs.task.GROUP_OF[name]
        offered = system["content"].removeprefix("Operations: A ").split(",")[0]
        first.setdefault((group, "The test expects" in user["content"]), []).append(operation == offered)
        if user["content"].endswith("for lists."):
            right.setdefault(group, []).append(operation == programs.task.OPERATION_OF[name])
    for group in ("known", "unknown", "holdout"):
        assert sum(first[group, True]) / len(first[group, True]) == pytest.approx(0.4 + 0.6 / 4, abs=0.05)
        assert sum(first[group, False]) / len(first[group, False]) == pytest.approx(1 / 4, abs=0.05)
    assert sum(right["known"]) / len(right["known"]) == pytest.approx(0.85 + 0.15 / 4, abs=0.04)
    assert sum(right["unknown"]) / len(right["unknown"]) == pytest.approx(1 / 12, abs=0.04)


def test_untrained_model_fails_the_gate(programs):
    from embedded_base.architecture import build_model
    from embedded_base.pretrain import check_gate

    tokenizer = programs.base.build_tokenizer()
    with pytest.raises(RuntimeError, match=r"below 0\.95"):
        check_gate(programs.base.Programs(), build_model(tokenizer, 0).eval(), tokenizer, "untrained")
