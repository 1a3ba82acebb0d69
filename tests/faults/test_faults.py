"""`kill -9` of any process at any point of a step: a restart ends bitwise where an undisturbed run ends.

Every fault has its control: the same run, undisturbed, and the killed run before it was restarted, which has not
ended. `make test-faults` runs them all, the fast tests four of them.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers.trainer_utils import get_last_checkpoint

from faults import launching
from faults.faulty_run import POINTS, STEPS, Fault

# Steps done when the fault strikes: 2 begins a generation batch, 3 is inside one. Checkpoints say how far they are.
INSIDE = ("update", "reference", "checkpoint")


def at(point: str) -> int:
    return 3 if point.startswith(INSIDE) else 2


SINGLE = [Fault(point, at(point)) for point in POINTS]
SINGLE += [
    Fault("scores, second pass", 0),
    Fault("update, after the optimizer", 0),
    Fault("checkpoint, after the optimizer", 1),
    Fault("checkpoint, half the optimizer", 4),
    Fault("checkpoint, before its name", STEPS),
]
TWO = [
    Fault(point, at(point), rank)
    for point in (
        "rollout, after",
        "verdict, inside",
        "scores, second pass",
        "update, before the backward pass",
        "update, after the optimizer",
        "checkpoint, after the random state",
    )
    for rank in (0, 1)
]
TWO += [Fault("checkpoint, half the optimizer", 3), Fault("checkpoint, before its name", 4)]
SHARDED = [
    Fault("scores, first pass", 2, 1),
    Fault("reference, after", 3, 0),
    Fault("checkpoint, after the progress", 3, 1),
]
LORA = [Fault("scores, second pass", 2), Fault("reference, after", 3), Fault("checkpoint, after the progress", 3)]

CASES = [("", 1, fault) for fault in SINGLE] + [("lora", 1, fault) for fault in LORA]
CASES += [("", 2, fault) for fault in TWO] + [("fsdp2", 2, fault) for fault in SHARDED]
# One of each phase in the fast tests, one of them with two processes.
FAST = [
    ("", 1, Fault("verdict, inside", 2)),
    ("", 1, Fault("checkpoint, half the optimizer", 3)),
    ("", 1, Fault("checkpoint, while an old one goes", 3)),
    ("", 2, Fault("update, after the optimizer", 3, 1)),
]


def case(variant, processes, fault):
    name = f"{variant or 'full'}-{processes}-{fault.point}-step{fault.step}-rank{fault.rank}"
    slow = () if (variant, processes, fault) in FAST else pytest.mark.slow
    return pytest.param(variant, processes, fault, id=name, marks=slow)


@pytest.fixture(scope="session")
def context():
    return launching.server()


@pytest.fixture(scope="session")
def undisturbed(context, tmp_path_factory):
    """(variant, processes) → what a run that nothing disturbs ends with."""
    known = {}

    def get(variant, processes):
        if (variant, processes) not in known:
            folder = tmp_path_factory.mktemp("undisturbed")
            codes = launching.launch(context, folder, variant, processes=processes)
            assert codes == [0] * processes, launching.log(folder)
            known[variant, processes] = launching.result(folder)
        return known[variant, processes]

    return get


@pytest.mark.parametrize(("variant", "processes", "fault"), [case(*c) for c in CASES])
def test_a_killed_run_continues_bitwise(context, undisturbed, tmp_path, variant, processes, fault):
    expected = undisturbed(variant, processes)
    codes = launching.launch(context, tmp_path, variant, fault, processes)
    assert codes == [-9], launching.log(tmp_path)
    assert not (tmp_path / "final.json").exists()
    check_what_is_left(tmp_path, fault)
    codes = launching.launch(context, tmp_path, variant, processes=processes)
    assert codes == [0] * processes, launching.log(tmp_path)
    assert launching.result(tmp_path) == expected


def check_what_is_left(folder: Path, fault: Fault) -> None:
    """The checkpoint that is found is the last one that was finished, and it is whole."""
    found = get_last_checkpoint(str(folder))
    finished = fault.step
    if fault.point.startswith("checkpoint"):
        is_named = fault.point.rpartition(", ")[2] in ("after its name", "before the old ones go", "after") or (
            "old one goes" in fault.point
        )
        finished = fault.step if is_named else fault.step - 1
    elif fault.point.startswith("reference"):  # the step is counted before its checkpoint is written
        finished = fault.step - 1
    if finished == 0:
        assert found is None
        return
    assert Path(found).name == f"checkpoint-{finished}"
    state = json.loads((Path(found) / "trainer_state.json").read_text())
    assert state["global_step"] == finished
    assert (Path(found) / "credit_state.json").is_file()


def test_there_are_at_least_thirty_faults_and_they_are_at_every_phase():
    assert len(CASES) >= 30
    assert len(set(CASES)) == len(CASES)
    assert {fault.point for _, processes, fault in CASES if processes == 1} == set(POINTS)
    assert all(c in CASES for c in FAST)


def test_runs_that_differ_end_elsewhere(undisturbed):
    """The comparison can fail: one process and two draw other rollouts and end with other weights."""
    ends = [undisturbed("", 1), undisturbed("", 2)]
    assert ends[0]["weights"] != ends[1]["weights"]
    assert all(end["step"] == STEPS and len(set(end["losses"])) == STEPS for end in ends)
