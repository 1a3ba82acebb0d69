from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
import textwrap
import threading

import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

from credit_trl import Verdict
from credit_trl.rollout.deadline import deadline_in, remaining_seconds
from credit_trl.tasks import Task, as_task, batch_of, known_tasks, load_task, mix_datasets, mixed_reward
from credit_trl.tasks.registry import BUILT_IN, call_reward

OWN_TASK = """
    from credit_trl import Verdict

    class Echo:
        def build(self, split, path=None):
            return (split, path)

        def verify(self, response, answer, *, truncated=False):
            return Verdict(float(response == answer), "cut" if truncated else None)

    instance = Echo()
    not_a_task = object()
"""


@pytest.fixture
def own_package(tmp_path, monkeypatch):
    """Installed package `echo_env` with the task `echo` as an entry point."""
    (tmp_path / "echo_env.py").write_text(textwrap.dedent(OWN_TASK))
    info = tmp_path / "echo_env-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: echo-env\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[credit_trl.tasks]\necho = echo_env:Echo\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("echo_env", None)


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_built_in_tasks_have_build_verify_and_reward(name):
    task = load_task(name)
    assert task.name == name
    assert callable(task.build)
    assert callable(task.verify)
    assert task.reward.__name__ == name  # TRL logs a reward function under its name


def test_option_after_colon_is_passed_to_build(shared_data):
    built = load_task("sciknoweval:biology").build("test", shared_data / "sciknoweval")
    assert set(built["task"]) == {"sciknoweval:biology"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "livecodebench, math, quickstart, sciknoweval, toolalpaca"),
        ("no.such.module:Task", "package.module:attribute"),
        ("json:NoSuchName", "json has no attribute 'NoSuchName'"),
        ("sciknoweval:alchemy", "use one of biology, .*physics"),
        ("math:algebra", "takes no option"),
        ("", "Known tasks"),
        (None, "Known tasks"),
        (".relative:Task", "Unknown task"),
    ],
)
def test_unknown_names_raise_and_list_known_tasks(name, message):
    with pytest.raises(ValueError, match=message):
        load_task(name)


def test_import_error_names_the_missing_module(tmp_path, monkeypatch):
    (tmp_path / "needs_something.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_there"):
        load_task("needs_something:Task")


@pytest.mark.parametrize("name", ["echo_env:Echo", "echo_env:instance"])
def test_custom_task_loads_by_module_and_attribute(own_package, name):
    task = load_task(name)
    assert task.build("train") == ("train", None)
    assert [verdict.reward for verdict in task.reward(completions=["a", "b"], answer=["a", "a"])] == [1.0, 0.0]
    assert task.reward.__name__ == name


def test_custom_task_without_build_and_verify_raises(own_package):
    with pytest.raises(TypeError, match="`build` and `verify`"):
        load_task("echo_env:not_a_task")


def test_rows_without_required_columns_raise():
    class Unasked:
        def build(self, split, path=None):
            return Dataset.from_list([{"question": "1 + 1?"}])

        def verify(self, response, answer, *, truncated=False):
            return Verdict(1.0)

    with pytest.raises(ValueError, match=r"no column `prompt`, `answer`; its columns are question\. Rename one"):
        as_task(Unasked, "unasked").build("train")


def test_entry_point_adds_a_task_name(own_package):
    assert "echo" in known_tasks()
    assert load_task("echo").verify("a", "a").reward == 1.0
    with pytest.raises(ValueError, match="takes no option"):
        load_task("echo:loud")


def test_one_name_from_two_packages_raises(own_package):
    info = own_package / "other_env-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-env\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[credit_trl.tasks]\necho = echo_env:instance\n")
    with pytest.raises(ValueError, match="Several packages define"):
        load_task("echo")


def test_task_object_is_returned_unchanged():
    task = Task(
        "mine", build=lambda split, path=None: None, verify=lambda *_, **__: Verdict(1.0), reward=lambda **_: []
    )
    assert as_task(task, "package:mine") is task


def test_async_reward_stays_a_coroutine_function():
    class Slow:
        build = verify = staticmethod(exact)

        async def reward(self, completions, answer, **columns):
            return [0.5 for _ in completions]

    reward = as_task(Slow, "slow").reward
    assert inspect.iscoroutinefunction(reward)
    assert reward.__name__ == "slow"
    assert asyncio.run(reward(completions=["a", "b"], answer=["a", "b"])) == [0.5, 0.5]


def test_loading_a_task_imports_no_other_task():
    code = (
        "import sys; import credit_trl.tasks; credit_trl.tasks.known_tasks();"
        "credit_trl.tasks.load_task('sciknoweval:physics');"
        "print([name for name in ('datasets', 'trl', 'torch', 'credit_trl.tasks.math', 'credit_trl.tasks.toolalpaca',"
        "'credit_trl.tasks.livecodebench', 'credit_trl.trainer') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"


# ---- batches ----


def exact(response: str, answer: str, *, truncated: bool = False) -> Verdict:
    return Verdict(float(response == answer), f"expected {answer}{' (cut)' if truncated else ''}")


def test_batch_grades_texts_and_conversations_alike():
    reward = batch_of(exact)
    completions = ["yes", [{"role": "assistant", "content": "yes"}], [{"role": "assistant", "content": "no"}]]
    verdicts = reward(completions=completions, answer=["yes"] * 3, truncated=[False, True, False], prompts=["?"] * 3)
    assert [verdict.reward for verdict in verdicts] == [1.0, 1.0, 0.0]
    assert [verdict.feedback for verdict in verdicts] == ["expected yes", "expected yes (cut)", "expected yes"]


def test_batch_with_too_few_answers_raises():
    with pytest.raises(ValueError, match="zip"):
        batch_of(exact)(completions=["a", "b"], answer=["a"])


NAMES = ["sciknoweval:physics", "sciknoweval:biology", "toolalpaca"]


@given(rows=st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from("AB"), st.booleans()), max_size=12))
def test_mixed_batch_equals_grading_each_row_with_its_task(rows):
    calls = '[{"Action": "f", "Action_Input": "{\\"x\\": 1}"}]'
    names = [name for name, _, _ in rows]
    completions = [f'<answer>{letter}</answer> Action: f\nAction Input: {{"x": 1}}' for _, letter, _ in rows]
    answers = [calls if name.startswith("toolalpaca") else "A" for name in names]
    truncated = [flag for _, _, flag in rows]
    mixed = mixed_reward(
        completions=completions, task=names, answer=answers, truncated=truncated, trainer_state=object(), prompts=names
    )
    assert mixed == [
        load_task(name).verify(completion, answer, truncated=flag)
        for name, completion, answer, flag in zip(names, completions, answers, truncated, strict=True)
    ]


def test_mixed_batch_calls_each_task_once_with_its_rows(monkeypatch):
    seen = []

    def reward(completions, answer, extra, trainer_state, truncated=None, **columns):
        seen.append((completions, answer, extra, truncated))
        return [0.5 if completion == "z" else None for completion in completions]

    for name in ("one", "two"):
        monkeypatch.setitem(BUILT_IN, name, f"fake_task_{name}")
        module = type(sys)(f"fake_task_{name}")
        module.build, module.verify, module.reward = exact, exact, reward
        monkeypatch.setitem(sys.modules, f"fake_task_{name}", module)
    graded = mixed_reward(
        completions=["x", "y", "z"],
        task=["one", "two", "one"],
        answer=["a", "b", "c"],
        extra=[1, 2, 3],
        truncated=[True, False, False],
        trainer_state="whole",
    )
    assert graded == [None, None, 0.5]
    assert seen == [(["x", "z"], ["a", "c"], [1, 3], [True, False]), (["y"], ["b"], [2], [False])]


@pytest.mark.parametrize("inside_a_loop", [False, True])  # a notebook has a loop that runs
def test_mixed_batch_awaits_async_rewards(monkeypatch, inside_a_loop):
    async def reward(completions, answer, **columns):
        await asyncio.sleep(0)
        return [float(completion == right) for completion, right in zip(completions, answer, strict=True)]

    module = type(sys)("fake_task_slow")
    module.build, module.verify, module.reward = exact, exact, reward
    monkeypatch.setitem(BUILT_IN, "slow", "fake_task_slow")
    monkeypatch.setitem(sys.modules, "fake_task_slow", module)
    batch = {"completions": ["x", "y"], "task": ["slow", "slow"], "answer": ["x", "z"]}

    async def in_a_loop():
        return mixed_reward(**batch)

    assert (asyncio.run(in_a_loop()) if inside_a_loop else mixed_reward(**batch)) == [1.0, 0.0]


def test_async_reward_has_the_deadline_in_a_daemon_thread():
    """A thread that is not a daemon keeps the process of a verifier that hangs alive."""

    async def reward(completions, **columns):
        return [remaining_seconds(), threading.current_thread().daemon]

    with deadline_in(5.0):
        seconds, daemon = call_reward(reward, completions=["x"])
    assert 0 < seconds <= 6.0
    assert daemon


def test_task_class_is_instantiated_once(own_package):
    import echo_env

    load_task("echo_env:Echo")
    made = []
    echo_env.Echo.__init__ = lambda self: made.append(self)
    for _ in range(3):
        mixed_reward(completions=["a"], task=["echo_env:Echo"], answer=["a"])
    assert len(made) == 1


def test_task_name_in_data_imports_no_module(tmp_path, monkeypatch):
    (tmp_path / "planted.py").write_text("raise SystemExit('it ran')\n")
    monkeypatch.syspath_prepend(tmp_path)
    rows = {"completions": ["a"], "answer": ["a"]}
    with pytest.raises(ValueError, match=r"A name in data does not import a module.*load_task\('planted:Task'\)"):
        mixed_reward(task=["planted:Task"], **rows)
    with pytest.raises(ValueError, match="no part of the mixed task"):
        load_task("quickstart,math").reward(task=["planted:Task"], **rows)
    with pytest.raises(ValueError, match="no part of the mixed task"):
        load_task("quickstart,math").reward(task=["toolalpaca"], **rows)
    assert "planted" not in sys.modules


def test_row_of_an_unknown_task_raises():
    with pytest.raises(ValueError, match="Unknown task 'nothing'"):
        mixed_reward(completions=["x"], task=["nothing"], answer=["a"])


def test_mix_datasets_keeps_rows_and_routes_verifiers(shared_data):
    physics = load_task("sciknoweval:physics").build("test", shared_data / "sciknoweval")
    tools = load_task("toolalpaca").build("test", shared_data / "toolalpaca" / "eval_simulated.json")
    mixed = mix_datasets([physics, tools])
    assert len(mixed) == len(physics) + len(tools)
    assert set(mixed["task"]) == {"sciknoweval:physics", "toolalpaca"}
    assert mixed["task"][:4] == ["sciknoweval:physics", "toolalpaca"] * 2  # the first rows are of all tasks
    for part in (physics, tools):
        (name,) = part.unique("task")
        assert [row["id"] for row in mixed if row["task"] == name] == part["id"][:]
    golden = ["Action: none" if row["task"] == "toolalpaca" else f"<answer>{row['answer']}</answer>" for row in mixed]
    verdicts = mixed_reward(completions=golden, task=mixed["task"][:], answer=mixed["answer"][:])
    assert [verdict.reward for verdict in verdicts] == [float(task != "toolalpaca") for task in mixed["task"]]
    assert {verdict.feedback.split()[0] for verdict in verdicts} == {"Correct", "Actions"}


def test_several_names_load_a_mixed_task(shared_data):
    task = load_task("sciknoweval:physics, toolalpaca")
    built = task.build("test", shared_data)
    assert built["task"][:] == ["sciknoweval:physics", "toolalpaca"] * 68 + ["sciknoweval:physics"] * 12
    assert task.reward.__name__ == "sciknoweval:physics, toolalpaca"
    rows = list(built.take(2))
    completions = [f"<answer>{row['answer']}</answer>" for row in rows]
    columns = {key: [row[key] for row in rows] for key in ("answer", "task")}
    batch = task.reward(completions=completions, **columns)
    single = [
        task.verify(completion, row["answer"], task=row["task"])
        for completion, row in zip(completions, rows, strict=True)
    ]
    assert batch == single
    assert [verdict.reward for verdict in batch] == [1.0, 0.0]
    with pytest.raises(ValueError, match="no part of the mixed task"):
        task.verify("x", "A", task="math")


def test_mixture_with_an_unknown_part_names_it():
    with pytest.raises(ValueError, match="Unknown task 'nothing'"):
        load_task("sciknoweval:physics,nothing")


def test_mix_datasets_sets_task_column_from_keys():
    rows = [{"prompt": [{"role": "user", "content": "?"}], "answer": "A"}]
    own = Dataset.from_list(rows)
    other = Dataset.from_list([rows[0] | {"task": "something else"}])
    assert mix_datasets({"my.own:Task": own, "math": other})["task"] == ["my.own:Task", "math"]


@pytest.mark.parametrize("answer", [5, True, ["x"]])
def test_mix_datasets_refuses_answers_that_are_not_text(answer):
    """A cast would change 5 to "5" and True to "true", which the task's verifier does not take for its answers."""
    prompt = [{"role": "user", "content": "q"}]
    with pytest.raises(ValueError, match=r"`answer` of .*json\.dumps"):
        mix_datasets({"echo": Dataset.from_list([{"prompt": prompt, "answer": answer}])})


QUESTION = [{"role": "user", "content": "?"}]


def part(**columns) -> Dataset:
    return Dataset.from_list([{"prompt": QUESTION, "answer": "A"} | columns] * 2)


def test_mix_datasets_keeps_privileged_contexts():
    mixed = mix_datasets({"one": part(privileged_context="z"), "two": part(), "three": part(privileged_context=None)})
    assert mixed["privileged_context"][:] == ["z", None, None] * 2
    assert mixed.features["privileged_context"].dtype == "large_string"  # text, for `training.checks`
    assert "privileged_context" not in mix_datasets({"one": part(), "two": part()}).column_names
    only = mix_datasets([part(task="one", privileged_context=None)])
    assert only["privileged_context"][:] == [None, None]


OTHER_PROMPTS = {
    "text": "?",
    "another key": [{"role": "user", "content": "?", "name": "bob"}],
    "no role": [{"content": "?"}],
    "content in parts": [{"role": "user", "content": [{"type": "text", "text": "?"}]}],
    "content a number": [{"role": "user", "content": 3}],
    "a list of texts": ["?"],
    "one message": {"role": "user", "content": "?"},
}


@pytest.mark.parametrize("prompt", OTHER_PROMPTS.values(), ids=OTHER_PROMPTS)
def test_mix_datasets_refuses_prompts_that_are_no_messages(prompt):
    message = r"`prompt` of parts.*lists of messages"
    with pytest.raises(ValueError, match=message):
        mix_datasets({"good": part(), "bad": part(prompt=prompt)})
    with pytest.raises(ValueError, match=message):
        mix_datasets([part(task="good"), part(task="bad", prompt=prompt)])


@pytest.mark.parametrize("column", ["prompt", "answer"])
def test_mix_datasets_names_the_part_without_a_column(column):
    lacking = part().rename_column(column, "other")
    with pytest.raises(ValueError, match=f"`{column}` of parts.* is missing among .*other"):
        mix_datasets({"good": part(), "bad": lacking})
    with pytest.raises(ValueError, match=rf"`{column}` of parts\[1\] is missing"):
        mix_datasets([part(task="good"), lacking])


def test_mix_datasets_names_the_part_without_tasks():
    with pytest.raises(ValueError, match=r"`task` of parts\[1\] is missing among prompt"):
        mix_datasets([part(task="good"), part()])


def test_mix_datasets_refuses_contexts_that_are_not_text():
    with pytest.raises(ValueError, match=r"`privileged_context` of parts\[1\] is .*int64"):
        mix_datasets({"good": part(privileged_context="z"), "bad": part(privileged_context=3)})


def test_mix_datasets_accepts_extra_columns_and_no_ids():
    rows = [{"prompt": [{"role": "user", "content": "?"}], "answer": "A", "task": "sciknoweval:physics", "extra": 1}]
    mixed = mix_datasets([Dataset.from_list(rows), Dataset.from_list(rows)])
    assert mixed.column_names == ["prompt", "answer", "task"]
    assert mixed[1]["prompt"] == [{"role": "user", "content": "?"}]


def length(completions, **columns):
    return [float(len(completion)) for completion in completions]


def matches(completions, gold, **columns):
    return [Verdict(float(c == g), f"It is {g}.") for c, g in zip(completions, gold, strict=True)]


def test_data_set_with_reward_functions_is_a_task():
    rows = Dataset.from_list([{"prompt": "1+1?", "gold": "2"}])
    task = Task.from_dataset({"train": rows}, [length, matches])
    assert load_task(task) is task
    assert task.build("train") is rows
    assert task.reward(["2", "30"], gold=["2", "2"]) == [Verdict(2.0, "It is 2."), Verdict(2.0, "It is 2.")]
    assert task.verify("2", gold="2").reward == 2.0
    with pytest.raises(ValueError, match="no split 'test'; use one of train"):
        task.build("test")
