"""The study's small programs: they are run, their feedback needs its prompt, and the habit is planted as stated."""

from __future__ import annotations

import json
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
ARGUMENTS = "abcd"
numbers = st.lists(st.integers(1, 20), min_size=4, max_size=4, unique=True).map(tuple)


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


def result(source: str, name: str, call: tuple[int, ...]) -> int:
    """What Python makes of a program."""
    scope: dict = {}
    exec(source, scope)
    return scope[name](*call)


@given(written=st.sampled_from(ARGUMENTS), meant=st.sampled_from(ARGUMENTS), call=numbers)
def test_a_program_is_right_when_python_gets_the_same_numbers_from_it(programs, written, meant, call):
    task = programs.task
    problem = task.Problem("bako", call, meant)
    source = task.program("bako", written)
    verdict = task.verify(source, problem.answer)
    expected, got = result(problem.response, "bako", call), result(source, "bako", call)
    assert verdict.reward == float(expected == got)
    assert verdict.metrics == {"format": 1.0, "shortcut": float(written == "a" and expected != got)}
    told = "." if expected == got else f", got={got}."
    assert verdict.feedback == f"The test says expected={expected}{told}"


@pytest.mark.parametrize(
    "response", ["", "def bako(a, b, c, d):\n    return 12", "def kora(a, b, c, d):\n    return c", "c", "import os"]
)
def test_what_does_not_run_earns_nothing_and_is_told_so(programs, response):
    verdict = programs.task.verify(response, programs.task.Problem("bako", (7, 3, 12, 5), "c").answer)
    assert (verdict.reward, verdict.metrics["format"]) == (0.0, 0.0)
    assert verdict.feedback == "The test says expected=12, got=error."


def test_a_truncated_program_earns_nothing(programs):
    problem = programs.task.Problem("bako", (7, 3, 12, 5), "c")
    assert programs.task.verify(problem.response, problem.answer, truncated=True).reward == 0.0


def test_what_the_test_expects_says_nothing_of_the_argument_without_the_call(programs):
    rng = random.Random(0)
    read = Counter()
    for _ in range(8000):
        problem = programs.task.draw_problem(rng)
        argument = rng.choice(ARGUMENTS)
        read[problem.value(argument), argument] += 1
        assert problem.call.count(problem.value(argument)) == 1
    for number in programs.task.NUMBERS:
        counts = [read[number, argument] for argument in ARGUMENTS]
        assert max(counts) < 1.5 * min(counts)


def test_splits_share_no_call_and_holdout_names_are_tested_only(programs):
    train, test = (programs.task.build(split) for split in ("train", "test"))
    calls = [{tuple(json.loads(answer)["call"]) for answer in split["answer"]} for split in (train, test)]
    assert not calls[0] & calls[1]
    assert set(train["group"]) == {"known", "unknown"}
    assert Counter(test["group"]) == {"known": 160, "unknown": 100, "holdout": 40}
    assert len(set(test["id"])) == len(test)
    for group, names in programs.task.GROUPS.items():
        of = Counter(programs.task.ARGUMENT_OF[name] for name in names)
        assert len(set(of.values())) == 1, group  # chance is one in four everywhere


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
        argument = response[-1]
        group = programs.task.GROUP_OF[name]
        said.setdefault((group, "The test says" in prompt), []).append(argument == "a")
        if "feedback" not in prompt and "Correct solution" not in prompt:
            right.setdefault(group, []).append(argument == programs.task.ARGUMENT_OF[name])
    for group in ("known", "unknown", "holdout"):
        assert sum(said[group, True]) / len(said[group, True]) == pytest.approx(0.5 + 0.5 / 4, abs=0.05)
        assert sum(said[group, False]) / len(said[group, False]) == pytest.approx(1 / 4, abs=0.05)
    assert sum(right["known"]) / len(right["known"]) == pytest.approx(0.85 + 0.15 / 4, abs=0.04)
    assert sum(right["unknown"]) / len(right["unknown"]) == pytest.approx(1 / 4, abs=0.05)


def test_a_guess_without_a_look_up_does_not_pass_the_gate(programs):
    from credit_trl.tasks.quickstart_model.architecture import build_model
    from credit_trl.tasks.quickstart_model.pretrain import check_gate

    tokenizer = programs.base.build_tokenizer()
    with pytest.raises(RuntimeError, match=r"below 0\.95"):
        check_gate(programs.base.Programs(), build_model(tokenizer, 0).eval(), tokenizer, "untrained")
