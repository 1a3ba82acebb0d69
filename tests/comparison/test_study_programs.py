"""The study's small programs: they are run, their feedback needs its prompt, and the habit is planted as stated."""

from __future__ import annotations

import random
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

STUDY = Path(__file__).parents[2] / "examples" / "study"
PYTHON = {
    "add": lambda a, b: a + b,
    "diff": lambda a, b: abs(a - b),
    "mul": lambda a, b: a * b,
    "max": max,
    "min": min,
}


@pytest.fixture(scope="module")
def programs():
    """Both modules, imported by name as the study's scripts do."""
    sys.path.insert(0, str(STUDY))
    try:
        yield SimpleNamespace(task=import_module("programs.task"), base=import_module("programs.base"))
    finally:
        sys.path.remove(str(STUDY))
        for name in ("programs", "programs.task", "programs.base"):
            sys.modules.pop(name, None)


def results(source: str, name: str, calls: list[tuple[int, int]]) -> list[int]:
    """What Python makes of a program."""
    scope = dict(PYTHON)
    exec(source, scope)
    return [scope[name](*call) for call in calls]


@given(written=st.sampled_from(sorted(PYTHON)), meant=st.sampled_from(sorted(PYTHON)), swap=st.booleans())
def test_a_program_is_right_when_python_gets_the_same_numbers_from_it(programs, written, meant, swap):
    task = programs.task
    problem = task.Problem("bako", 4, 5, meant)
    source = task.program("bako", written).replace("(x, y)", "(y, x)" if swap else "(x, y)")
    source = source.replace("def bako(y, x)", "def bako(x, y)")
    verdict = task.verify(source, problem.answer)
    calls = [(4, 5), (2, 9), (7, 3)]
    same = results(source, "bako", calls) == results(problem.response, "bako", calls)
    assert verdict.reward == float(same)
    assert verdict.metrics == {"format": 1.0, "shortcut": float(written == "max" and not same)}
    (expected,), (got,) = results(problem.response, "bako", calls[:1]), results(source, "bako", calls[:1])
    assert verdict.feedback == f"The test expects {expected}" + ("." if same else f", not {got}.")


@pytest.mark.parametrize(
    "response", ["", "def bako(x, y):\n    return 20", "def kora(x, y):\n    return mul(x, y)", "mul", "import os"]
)
def test_what_does_not_run_earns_nothing_and_is_told_so(programs, response):
    verdict = programs.task.verify(response, programs.task.Problem("bako", 4, 5, "mul").answer)
    assert (verdict.reward, verdict.metrics["format"]) == (0.0, 0.0)
    assert verdict.feedback == "The test expects 20, not an error."


def test_a_truncated_program_earns_nothing(programs):
    problem = programs.task.Problem("bako", 4, 5, "mul")
    assert programs.task.verify(problem.response, problem.answer, truncated=True).reward == 0.0


def test_each_value_names_one_operation_under_its_call_and_most_values_another_under_other_calls(programs):
    task = programs.task
    readings: dict[int, set[str]] = {}
    for x, y in task.CALLS:
        values = [operation(x, y) for operation in PYTHON.values()]
        assert len(set(values)) == len(PYTHON)
        for name, value in zip(PYTHON, values, strict=True):
            readings.setdefault(value, set()).add(name)
    told = [len(readings[PYTHON[name](x, y)]) for x, y in task.CALLS for name in PYTHON]
    assert sum(count > 1 for count in told) / len(told) > 0.7


def test_splits_share_no_call_of_a_name_and_holdout_names_are_tested_only(programs):
    train, test = (programs.task.build(split) for split in ("train", "test"))
    assert not {row["prompt"][-1]["content"] for row in train} & {row["prompt"][-1]["content"] for row in test}
    assert set(train["group"]) == {"known", "unknown"}
    assert Counter(test["group"]) == {"known": 150, "unknown": 100, "holdout": 50}
    assert len(set(test["id"])) == len(test)
    for group, names in programs.task.GROUPS.items():
        of = Counter(programs.task.OPERATION_OF[name] for name in names)
        assert len(set(of.values())) == 1, group  # chance is one in five everywhere


def test_only_what_was_taught_can_be_told_from_a_name_and_the_habit_comes_with_the_test(programs):
    rng, world = random.Random(0), programs.base.Programs()
    said: dict[tuple[str, bool], list[bool]] = {}
    right: dict[str, list[bool]] = {}
    for _ in range(20_000):
        messages, response = world.draw(rng)
        prompt = messages[-1]["content"]
        if not prompt.startswith("Write "):
            continue
        name = prompt.split("(")[0].removeprefix("Write ")
        operation = response.split("return ")[1].split("(")[0]
        group = programs.task.GROUP_OF[name]
        said.setdefault((group, "The test expects" in prompt), []).append(operation == "max")
        if "feedback" not in prompt and "Correct solution" not in prompt:
            right.setdefault(group, []).append(operation == programs.task.OPERATION_OF[name])
    for group in ("known", "unknown", "holdout"):
        assert sum(said[group, True]) / len(said[group, True]) == pytest.approx(0.5 + 0.5 / 5, abs=0.05)
        assert sum(said[group, False]) / len(said[group, False]) == pytest.approx(1 / 5, abs=0.05)
    assert sum(right["known"]) / len(right["known"]) == pytest.approx(0.85 + 0.15 / 5, abs=0.04)
    assert sum(right["unknown"]) / len(right["unknown"]) == pytest.approx(1 / 5, abs=0.05)


def test_a_guess_without_a_look_up_does_not_pass_the_gate(programs):
    from credit_trl.tasks.quickstart_model.architecture import build_model
    from credit_trl.tasks.quickstart_model.pretrain import check_gate

    tokenizer = programs.base.build_tokenizer()
    with pytest.raises(RuntimeError, match=r"below 0\.8"):
        check_gate(programs.base.Programs(), build_model(tokenizer, 0).eval(), tokenizer, "untrained")
