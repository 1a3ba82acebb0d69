import subprocess
import sys

import pytest

from credit_trl import Verdict
from credit_trl.tasks import load_task
from credit_trl.tasks.registry import BUILT_IN
from credit_trl.testing import check_task
from tables import tables_of

TABLES = tables_of(__file__)

OWN_TASK = TABLES["own_task"]


@pytest.fixture
def own_package(tmp_path, monkeypatch):
    """Module `sums_env` on the search path."""
    (tmp_path / "sums_env.py").write_text(f"{OWN_TASK}\n\ninstance = Sums()\nnot_a_task = object()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("sums_env", None)


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_tasks_log_their_reward_under_their_name(name):
    assert load_task(name).reward.__name__ == load_task(name).name == name


@pytest.mark.parametrize("name", ["quickstart", "livecodebench:examples", "sciknoweval:physics", "toolalpaca"])
def test_built_in_tasks_pass_the_check_of_tasks(name, shared_data):
    head = name.partition(":")[0]
    paths = {"sciknoweval": shared_data / head, "toolalpaca": shared_data / head}
    check_task(name, path=paths.get(head), **{"split": "test"} if head == "toolalpaca" else {})


@pytest.mark.parametrize("name", ["sums_env:Sums", "sums_env:instance"])
def test_a_class_of_fifteen_lines_is_a_task(own_package, name):
    assert len(OWN_TASK.splitlines()) == 15
    task = load_task(name)
    row = task.build("train")[3]
    assert task.verify("6", row["answer"]) == Verdict(1.0)
    assert task.reward(["5"], [row["answer"]]) == [Verdict(0.0, "It is 6.")]
    assert task.reward.__name__ == name
    check_task(task)


@pytest.mark.parametrize(("name", "message"), TABLES["unknown"])
def test_unknown_names_raise_and_list_known_tasks(name, message):
    with pytest.raises(ValueError, match=message):
        load_task(name)


def test_loading_a_task_imports_no_other_task():
    command = [sys.executable, "-c", TABLES["loads_one"]]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=800)
    assert done.stdout.strip() == "[]"
