from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

from credit_trl import Verdict
from credit_trl.tasks import Task, batch_of, load_task, mix_tasks

NAMES = ["sciknoweval:physics", "sciknoweval:biology", "toolalpaca"]
MIXED = load_task(",".join(NAMES))
PARTS = {name: load_task(name) for name in NAMES}


@given(rows=st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from("AB"), st.booleans()), max_size=12))
def test_mixed_batch_equals_grading_each_row_with_its_task(rows):
    calls = '[{"Action": "f", "Action_Input": "{\\"x\\": 1}"}]'
    batch = {
        "completions": [f'<answer>{letter}</answer> Action: f\nAction Input: {{"x": 1}}' for _, letter, _ in rows],
        "task": [name for name, _, _ in rows],
        "answer": [calls if name == "toolalpaca" else "A" for name, _, _ in rows],
        "truncated": [flag for _, _, flag in rows],
    }
    expected = []
    for completion, name, answer, flag in zip(*batch.values(), strict=True):
        expected.append(PARTS[name].verify(completion, answer, truncated=flag))
        assert MIXED.verify(completion, answer, task=name, truncated=flag) == expected[-1]
    assert MIXED.reward(**batch, trainer_state=object()) == expected


def part(name: str = "part", reward=None, **columns) -> Task:
    row = {"prompt": [{"role": "user", "content": "?"}], "answer": "A"} | columns
    rows = Dataset.from_list([{column: value for column, value in row.items() if value != "missing"}] * 2)
    return replace(Task.from_dataset(rows, batch_of(exact), name), **({"reward": reward} if reward else {}))


def exact(response: str, answer: str, *, truncated: bool = False) -> Verdict:
    return Verdict(float(response == answer))


def test_each_task_is_called_once_with_its_rows():
    seen = []

    def reward(completions, answer, extra, trainer_state, truncated=None, **columns):
        seen.append((completions, answer, extra, truncated, trainer_state))
        return [0.5 if completion == "z" else None for completion in completions]

    graded = mix_tasks([part("one", reward), part("two", reward)]).reward(
        completions=["x", "y", "z"],
        task=["one", "two", "one"],
        answer=["a", "b", "c"],
        extra=[1, 2, 3],
        truncated=[True, False, False],
        trainer_state="whole",
    )
    assert graded == [None, None, 0.5]
    assert seen == [
        (["x", "z"], ["a", "c"], [1, 3], [True, False], "whole"),
        (["y"], ["b"], [2], [False], "whole"),
    ]


@pytest.mark.parametrize("inside_a_loop", [False, True])  # a notebook has a loop that runs
def test_asynchronous_rewards_are_awaited(inside_a_loop):
    async def reward(completions, answer, **columns):
        await asyncio.sleep(0)
        return [float(completion == right) for completion, right in zip(completions, answer, strict=True)]

    mixed = mix_tasks([part("slow", reward)])

    async def in_a_loop():
        return mixed.reward(["x", "y"], ["slow", "slow"], answer=["x", "z"])

    graded = asyncio.run(in_a_loop()) if inside_a_loop else mixed.reward(["x", "y"], ["slow"] * 2, answer=["x", "z"])
    assert graded == [1.0, 0.0]


@pytest.mark.parametrize("name", ["math", "planted:Task", "sciknoweval"])
def test_row_of_another_task_raises_and_imports_nothing(name):
    with pytest.raises(ValueError, match=f"{name!r} is no part of the mixed task"):
        MIXED.reward(["x"], [name], answer=["A"])
    with pytest.raises(ValueError, match="is no part of the mixed task"):
        MIXED.verify("x", "A", task=name)


def test_tasks_of_one_name_raise():
    with pytest.raises(ValueError, match="need different names, got part, part"):
        mix_tasks([part(), part()])


def test_columns_of_all_tasks_and_contexts_of_any_are_kept():
    mixed = mix_tasks([part("one", privileged_context="z", extra=1), part("two", id="i")]).build("train")
    assert set(mixed.column_names) == {"prompt", "answer", "task", "privileged_context"}
    assert mixed["privileged_context"][:] == ["z", None] * 2
    assert mixed["task"][:] == ["one", "two"] * 2
    with_ids = mix_tasks([part("one", id="i"), part("two", id="j", task="another")]).build("train")
    assert with_ids["id"][:] == ["i", "j"] * 2
    assert with_ids["task"][:] == ["one", "two"] * 2


OTHER_ROWS = {
    "prompt: text": {"prompt": "?"},
    "prompt: another key": {"prompt": [{"role": "user", "content": "?", "name": "bob"}]},
    "prompt: content in parts": {"prompt": [{"role": "user", "content": [{"type": "text", "text": "?"}]}]},
    "prompt: one message": {"prompt": {"role": "user", "content": "?"}},
    "answer: a number": {"answer": 5},
    "answer: a truth value": {"answer": True},
    "answer: missing": {"answer": "missing"},
    "privileged_context: a number": {"privileged_context": 3},
}


@pytest.mark.parametrize(("column", "row"), [(key.partition(":")[0], row) for key, row in OTHER_ROWS.items()])
def test_columns_of_another_type_raise_and_are_not_cast(column, row):
    """A cast would change 5 to "5" and True to "true", which the task's verifier does not take for its answers."""
    with pytest.raises(ValueError, match=column):
        mix_tasks([part("one", privileged_context="z"), part("two", **row)]).build("train")
