"""`run.json` and `log.jsonl` of a run without evaluations."""

import json
from pathlib import Path

import pytest

from credit_trl.training.checkpoints import checkpoint_to_resume
from credit_trl.training.run_directory import read_lines, set_aside


@pytest.fixture
def train(make_trainer, dataset, tmp_path):
    def run(resume=None, evaluates=False, **options):
        saving = {"output_dir": str(tmp_path), "save_strategy": "steps", "save_steps": 2}
        trainer = make_trainer(eval_rows=dataset.select(range(4)), **saving, **options)
        if evaluates:
            trainer.evaluate()
        trainer.train(resume_from_checkpoint=resume)

    return run


def steps(folder: Path) -> list[int]:
    """Trained steps of the log."""
    return [row["step"] for row in read_lines(folder / "log.jsonl") if "loss" in row]


def test_second_run_in_a_directory_sets_the_first_aside(train, tmp_path, caplog):
    train(max_steps=4, contrastive_coef=0.1, log_completions=True)
    log, aside = (tmp_path / "log.jsonl").read_bytes(), tmp_path / "previous-1"
    train(max_steps=2, contrastive_coef=0.5, log_completions=True)
    assert f"is now in {aside}" in caplog.text
    assert (aside / "log.jsonl").read_bytes() == log
    assert steps(tmp_path) == [1, 2]
    for folder, checkpoints, coefficient in ((tmp_path, [2], 0.5), (aside, [2, 4], 0.1)):
        assert sorted(path.name for path in folder.glob("checkpoint-*")) == [f"checkpoint-{n}" for n in checkpoints]
        assert json.loads((folder / "run.json").read_text())["config"]["contrastive_coef"] == coefficient
    assert [len(list(folder.glob("completions/*.parquet"))) for folder in (tmp_path, aside)] == [2, 4]
    train(max_steps=4, contrastive_coef=0.5, resume="latest")
    assert steps(tmp_path) == [1, 2, 3, 4]
    assert checkpoint_to_resume("latest", aside) == str(aside / "checkpoint-4")


def test_latest_is_of_the_branch_that_trained_last(train, tmp_path, caplog):
    train(max_steps=6)
    aside = tmp_path / "previous-1"
    train(max_steps=4, resume=str(tmp_path / "checkpoint-2"))
    assert f"starts from step 2: what an earlier run in {tmp_path} saved later is now in {aside}" in caplog.text
    assert checkpoint_to_resume("latest", tmp_path) == str(tmp_path / "checkpoint-4")
    assert steps(tmp_path) == [1, 2, 3, 4]
    assert sorted(path.name for path in aside.iterdir()) == ["checkpoint-4", "checkpoint-6"]


def test_interrupted_run_sets_nothing_aside(tmp_path):
    (tmp_path / "log.jsonl").touch()
    (tmp_path / "checkpoint-2").mkdir()
    set_aside(tmp_path, 2)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-2", "log.jsonl"}


def test_base_in_the_run_directory_stays(tmp_path):
    for name in ("checkpoint-2", "checkpoint-4"):
        (tmp_path / name).mkdir()
    set_aside(tmp_path, 0, str(tmp_path / "checkpoint-2"))
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    assert (tmp_path / "previous-1" / "checkpoint-4").is_dir()


def test_evaluation_before_training_is_no_earlier_run(train, tmp_path):
    train(max_steps=1, evaluates=True)
    assert not (tmp_path / "previous-1").exists()
    assert [row["step"] for row in read_lines(tmp_path / "log.jsonl")][:2] == [0, 1]
