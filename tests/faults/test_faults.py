"""A run that is killed or fails at any point of a step resumes and equals an uninterrupted run bit for bit.

The controls are the uninterrupted run, and the killed run before its restart, which has no result. `make test-faults`
runs all faults, the fast tests four of them.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers.trainer_utils import get_last_checkpoint

from credit_trl.training.preemption import REQUEUE
from faults import launching
from faults.faulty_run import POINTS, STEPS, Fault

# After 2 steps a generation batch begins; after 3 steps the run is inside one.
INSIDE = ("update", "teacher", "checkpoint")


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
    Fault("teacher, after", 3, 0),
    Fault("checkpoint, after the progress", 3, 1),
]
LORA = [Fault("scores, second pass", 2), Fault("teacher, after", 3), Fault("checkpoint, after the progress", 3)]

CASES = [("", 1, fault) for fault in SINGLE] + [("lora", 1, fault) for fault in LORA]
CASES += [("", 2, fault) for fault in TWO] + [("fsdp2", 2, fault) for fault in SHARDED]
# The fast tests have one fault of each phase, one of them with two processes.
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


@pytest.mark.parametrize(("variant", "processes", "fault"), [case(*c) for c in CASES])
def test_killed_run_resumes_bitwise(context, uninterrupted, tmp_path, variant, processes, fault):
    expected = uninterrupted(variant, processes)
    codes = launching.launch(context, tmp_path, variant, fault, processes)
    assert codes == [-9], launching.log(tmp_path)
    assert not (tmp_path / "final.json").exists()
    check_last_checkpoint(tmp_path, fault)
    codes = launching.launch(context, tmp_path, variant, processes=processes)
    assert codes == [0] * processes, launching.log(tmp_path)
    assert launching.result(tmp_path) == expected


# Faults of the surroundings: each ends the run with an error that names it.
ENDINGS = {
    "disk": ("", Fault("checkpoint, before", 3, kind="disk"), "Step 3 could not be saved"),
    "service": ("service", Fault("verdict, inside", 2, kind="service"), "Connection refused"),
    "engine": ("", Fault("rollout, before", 2, kind="engine"), "VLLMServerError"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ENDINGS)
def test_run_whose_surroundings_fail_resumes_bitwise(context, uninterrupted, tmp_path, kind):
    variant, fault, reason = ENDINGS[kind]
    codes = launching.launch(context, tmp_path, variant, fault)
    assert codes == [1]
    assert reason in launching.log(tmp_path)
    assert Path(get_last_checkpoint(str(tmp_path))).name == "checkpoint-2"
    assert not (tmp_path / "unfinished").exists()
    codes = launching.launch(context, tmp_path, variant)
    assert codes == [0], launching.log(tmp_path)
    assert launching.result(tmp_path) == uninterrupted("", 1)


TERMINATED = [
    ("rarely", 1, Fault("update, inside the loss", 3, kind="terminate")),
    pytest.param("rarely", 1, Fault("rollout, after", 2, kind="terminate"), marks=pytest.mark.slow),
    pytest.param("", 1, Fault("checkpoint, half the optimizer", 3, kind="terminate"), marks=pytest.mark.slow),
    pytest.param("rarely-lora", 1, Fault("scores, second pass", 2, kind="terminate"), marks=pytest.mark.slow),
    pytest.param("rarely", 2, Fault("update, after the optimizer", 3, 1, kind="terminate"), marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("variant", "processes", "fault"), TERMINATED)
def test_sigterm_loses_no_step(context, uninterrupted, tmp_path, variant, processes, fault):
    """One process receives the signal; all finish the step, save it, and end with the code for requeuing."""
    codes = launching.launch(context, tmp_path, variant, fault, processes)
    assert codes == [REQUEUE], launching.log(tmp_path)
    done = fault.step + 1  # the step of the signal is finished; one during a save ends the next step
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == [f"checkpoint-{done}"]
    codes = launching.launch(context, tmp_path, variant, processes=processes)
    assert codes == [0] * processes, launching.log(tmp_path)
    kind = "lora" if "lora" in variant else ""
    assert launching.result(tmp_path) == uninterrupted(kind, processes)


def check_last_checkpoint(folder: Path, fault: Fault) -> None:
    """The newest checkpoint is the last complete one."""
    found = get_last_checkpoint(str(folder))
    finished = fault.step
    if fault.point.startswith("checkpoint"):
        is_named = fault.point.rpartition(", ")[2] in ("after its name", "before the old ones go", "after") or (
            "old one goes" in fault.point
        )
        finished = fault.step if is_named else fault.step - 1
    elif fault.point.startswith("teacher"):  # the step counts before its checkpoint is written
        finished = fault.step - 1
    if finished == 0:
        assert found is None
        return
    assert Path(found).name == f"checkpoint-{finished}"
    state = json.loads((Path(found) / "trainer_state.json").read_text())
    assert state["global_step"] == finished
    assert (Path(found) / "credit_state.json").is_file()


def test_fault_points_cover_each_phase():
    assert len(CASES) >= 30
    assert len(set(CASES)) == len(CASES)
    assert {fault.point for _, processes, fault in CASES if processes == 1} == set(POINTS)
    assert all(c in CASES for c in FAST)


def test_control_other_run_has_other_digests(uninterrupted):
    """One and two processes sample other rollouts and end with other weights."""
    ends = [uninterrupted("", 1), uninterrupted("", 2)]
    assert ends[0]["weights"] != ends[1]["weights"]
    assert all(end["step"] == STEPS and len(set(end["losses"])) == STEPS for end in ends)
