"""Training gives the results that version 0.1.0 recorded, and continues from its checkpoints."""

from __future__ import annotations

import json
import shutil

import pytest

import recorded_runs

RECORDED = json.loads((recorded_runs.RECORDED / "runs.json").read_text())
SAME_MACHINE = recorded_runs.machine() == RECORDED["machine"]


def assert_same(result: dict, recorded: dict) -> None:
    """Bit for bit on the kind of machine that recorded; elsewhere sums may be ordered otherwise."""
    if SAME_MACHINE:
        assert result == recorded
    for name in ("loss", "grad_norm"):
        assert result[name] == pytest.approx(recorded[name], rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("name", recorded_runs.CASES)
def test_run_equals_the_recorded_run(name, tmp_path):
    assert_same(recorded_runs.run(name, tmp_path), RECORDED["runs"][name])


def test_checkpoint_of_version_0_1_resumes_bitwise(tmp_path):
    checkpoint = tmp_path / "run" / "checkpoint-3"
    shutil.copytree(recorded_runs.CHECKPOINT, checkpoint)
    trainer = recorded_runs.build_trainer(tmp_path / "run", recorded_runs.RESUMED, **recorded_runs.SMALL)
    trainer.train(resume_from_checkpoint=str(checkpoint))
    assert trainer.state.global_step == 8
    assert_same(recorded_runs.result(trainer), RECORDED["resumed"])
