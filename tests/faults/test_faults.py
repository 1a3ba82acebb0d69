"""A run that is killed or fails at any point of a step resumes and equals an uninterrupted run bit for bit.

The controls are the uninterrupted run, and the killed run before its restart, which has no result. `make test-faults`
runs all faults, the fast tests four of them.
"""

import json
from pathlib import Path

import pytest
from transformers.trainer_utils import get_last_checkpoint

from credit_trl.cli.preemption import REQUEUE
from credit_trl.run_directory import run_lock
from faults import launching
from faults.faulty_run import FAULTS, STEPS, Fault


def cases(table: dict, kind: str) -> list:
    """Parameters (variant, processes, fault) of the rows of a table of `faults.toml`."""
    rows = [(row, ()) for row in table["fast"]] + [(row, pytest.mark.slow) for row in table["slow"]]
    parameters = []
    for (variant, processes, point, step, rank), marks in rows:
        name = f"{variant or 'full'}-{processes}-{point}-step{step}-rank{rank}"
        parameters.append(pytest.param(variant, processes, Fault(point, step, rank, kind), id=name, marks=marks))
    return parameters


@pytest.mark.parametrize(("variant", "processes", "fault"), cases(FAULTS["kills"], "kill"))
def test_killed_run_resumes_bitwise(context, uninterrupted, tmp_path, variant, processes, fault):
    expected = uninterrupted(variant, processes)
    codes = launching.launch(context, tmp_path, variant, fault, processes)
    assert codes == [-9], launching.log(tmp_path)
    assert not (tmp_path / "final.json").exists()
    check_last_checkpoint(tmp_path, fault)
    codes = launching.launch(context, tmp_path, variant, processes=processes)
    assert codes == [0] * processes, launching.log(tmp_path)
    assert launching.result(tmp_path) == expected


@pytest.mark.slow
@pytest.mark.parametrize("row", FAULTS["surroundings"], ids=lambda row: row["kind"])
def test_run_whose_surroundings_fail_resumes_bitwise(context, uninterrupted, tmp_path, row):
    fault = Fault(row["point"], row["step"], kind=row["kind"])
    codes = launching.launch(context, tmp_path, row["variant"], fault)
    assert codes == [1]
    assert row["says"] in launching.log(tmp_path)
    assert Path(get_last_checkpoint(str(tmp_path))).name == "checkpoint-2"
    assert not (tmp_path / "unfinished").exists()
    codes = launching.launch(context, tmp_path, row["variant"])
    assert codes == [0], launching.log(tmp_path)
    assert launching.result(tmp_path) == uninterrupted("", 1)


@pytest.mark.parametrize(("variant", "processes", "fault"), cases(FAULTS["terms"], "terminate"))
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


def test_error_of_one_process_ends_all(context, tmp_path):
    """A full disk while the main process writes, and a folder that another trainer uses."""
    fault = Fault("checkpoint, half the optimizer", 2, kind="disk")
    assert launching.launch(context, tmp_path, "", fault, processes=2) == [1]
    with run_lock(tmp_path):
        assert launching.launch(context, tmp_path, processes=2) == [1, 1]
    for rank in range(2):
        text = (tmp_path / f"log_{rank}.txt").read_text()
        assert "Step 2 could not be saved" in text
        assert "is used by another trainer" in text


def check_last_checkpoint(folder: Path, fault: Fault) -> None:
    """The newest checkpoint is the last complete one."""
    checkpoint = get_last_checkpoint(str(folder))
    finished = fault.step
    if fault.point.startswith("checkpoint"):
        is_named = fault.point.rpartition(", ")[2] in ("after its name", "before the old ones go", "after") or (
            "old one goes" in fault.point
        )
        finished = fault.step if is_named else fault.step - 1
    elif fault.point.startswith("teacher"):  # the step counts before its checkpoint is written
        finished = fault.step - 1
    if finished == 0:
        assert checkpoint is None
        return
    assert Path(checkpoint).name == f"checkpoint-{finished}"
    state = json.loads((Path(checkpoint) / "trainer_state.json").read_text())
    assert state["global_step"] == finished
    assert (Path(checkpoint) / "credit_state.json").is_file()


def test_fault_points_cover_each_phase():
    kills = [tuple(row) for rows in FAULTS["kills"].values() for row in rows]
    assert len(kills) == len(set(kills)) >= 30
    assert {point for _, processes, point, _, _ in kills if processes == 1} == set(FAULTS["points"])


def test_control_other_run_has_other_digests(uninterrupted):
    """One and two processes sample other rollouts and end with other weights."""
    ends = [uninterrupted("", 1), uninterrupted("", 2)]
    assert ends[0]["weights"] != ends[1]["weights"]
    assert all(end["step"] == STEPS and len(set(end["losses"])) == STEPS for end in ends)
