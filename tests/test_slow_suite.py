"""A shard of the slow tests stops at its budget, and remembers what remains and when it passed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slow_suite import SHARDS, exit_code, ordered_files, read_state

# Three files; a test of the first uses the whole budget, one of the last fails with the variable FAILS.
FILES = {
    "test_a.py": "def test_one(): pass\ndef test_two(): pass\n",
    "test_b.py": "def test_three(): pass\n",
    "test_c.py": "import os\ndef test_four(): assert 'FAILS' not in os.environ\n",
}


@pytest.fixture
def run_shard(tmp_path):
    """A function that runs the shard `faults` of three small files: exit code, ids of its tests, and its state."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")

    def run(minutes, **variables):
        state = tmp_path / "state.json"
        options = ["-p", "slow_suite", "--shard", "faults", "--minutes", str(minutes), "--state", str(state)]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *options]
        result = subprocess.run(
            command, cwd=tmp_path, env=environment | variables, capture_output=True, text=True, timeout=300
        )
        ran = [line.split()[0] for line in result.stdout.splitlines() if "::test_" in line and "%]" in line]
        return result.returncode, [name.partition("::")[0] for name in ran], json.loads(state.read_text())["faults"]

    return run


def test_a_shard_within_its_budget_passes(run_shard):
    code, files, state = run_shard(10)
    assert (code, sorted(files)) == (0, ["test_a.py", "test_a.py", "test_b.py", "test_c.py"])
    assert state["remaining"] == []
    assert state["passed"]


def test_what_a_budget_did_not_reach_comes_first(run_shard):
    """A budget of nothing ends after one test. The shard has passed when each of its files has."""
    code, files, state = run_shard(0)
    assert (code, len(files), state["passed"]) == (0, 1, None)
    assert set(FILES) - set(state["remaining"]) <= set(files)
    code, more, state = run_shard(10)
    assert more[0] == state_first(files)
    assert (code, state["remaining"]) == (0, [])
    assert state["passed"]


def state_first(files):
    """The file that a run begins with after one that reached these: the one of two tests is not finished."""
    order = sorted(FILES)
    position = order.index(files[0])
    return files[0] if files[0] == "test_a.py" else order[(position + 1) % len(order)]


def test_a_failed_shard_fails_and_comes_first(run_shard):
    code, _, state = run_shard(10, FAILS="1")
    assert (code, state) == (1, {"passed": None, "remaining": ["test_c.py"]})
    code, files, state = run_shard(10)
    assert (code, files[0], state["remaining"]) == (0, "test_c.py", [])


def test_each_file_comes_first_at_some_commit():
    files = ["b", "a", "c"]
    assert ordered_files(files, [], 0) == ["a", "b", "c"]
    assert {ordered_files(files, [], number)[0] for number in range(3)} == set(files)
    assert ordered_files(files, ["c", "removed"], 1) == ["c", "b", "a"]


def test_the_state_of_the_checkout_has_each_shard():
    state = read_state(Path(__file__).parents[1] / ".ci" / "slow_suite.json")
    assert state.keys() == SHARDS.keys()
    assert read_state(Path("missing.json")) == {shard: {"passed": None, "remaining": []} for shard in SHARDS}


@pytest.mark.parametrize(
    ("code", "has_passed", "expected"), [(0, False, 0), (1, False, 0), (0, True, 0), (1, True, 1)]
)
def test_a_shard_that_has_passed_before_fails(code, has_passed, expected, capsys):
    assert exit_code("faults", code, has_passed=has_passed) == expected
    assert ("SHARD FAULTS FAILS" in capsys.readouterr().out) == (code == 1 and not has_passed)
