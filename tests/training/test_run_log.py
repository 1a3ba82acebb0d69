"""`run.json` and `log.jsonl` of a run without evaluations."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers.trainer
from huggingface_hub.utils import filter_repo_objects

from credit_trl.cli.run_folder import model_of_run
from credit_trl.run_directory import append_lines, read_lines
from credit_trl.training.checkpoints import checkpoint_to_resume
from tiny import file_hashes


@pytest.fixture
def train(make_trainer, dataset, tmp_path):
    def run(resume=None, evaluates=False, saves=False, **options):
        saving = {"output_dir": str(tmp_path), "save_strategy": "steps", "save_steps": 2}
        trainer = make_trainer(eval_rows=dataset.select(range(4)), **saving | options)
        if evaluates:
            trainer.evaluate()
        trainer.train(resume_from_checkpoint=resume)
        if saves:
            trainer.save_model()

    return run


def steps(folder: Path) -> list[int]:
    """Trained steps of the log."""
    return [row["step"] for row in read_lines(folder / "log.jsonl") if "loss" in row]


def test_second_run_in_a_directory_moves_the_first_aside(train, tmp_path, caplog):
    (tmp_path / "notes.md").write_text("mine")
    train(max_steps=4, saves=True, contrastive_coef=0.1, log_completions=True)
    assert "The earlier run" not in caplog.text
    append_lines(tmp_path / "evaluations.jsonl", [{"step": 0, "score": 0.5}, {"step": 4, "score": 0.5}])
    expected = {name: value for name, value in file_hashes(tmp_path).items() if name != "notes.md"}
    train(max_steps=2, saves=True, contrastive_coef=0.5, log_completions=True)
    assert f"The earlier run in {tmp_path} is in {tmp_path / '_earlier_1'} now." in caplog.text
    assert file_hashes(tmp_path / "_earlier_1") == expected
    assert model_of_run(tmp_path / "_earlier_1") == tmp_path / "_earlier_1"
    run = json.loads((tmp_path / "run.json").read_text())
    assert (run["config"]["contrastive_coef"], [segment["step"] for segment in run["segments"]]) == (0.5, [0])
    assert (steps(tmp_path), len(list(tmp_path.glob("completions/*.parquet")))) == ([1, 2], 2)
    assert checkpoint_to_resume("latest", tmp_path) == str(tmp_path / "checkpoint-2")
    train(max_steps=1, saves=True)
    assert {path.name for path in tmp_path.glob("_earlier_*")} == {"_earlier_1", "_earlier_2"}
    assert (tmp_path / "notes.md").read_text() == "mine"


def test_a_run_killed_while_it_moves_the_first_aside_is_completed(train, tmp_path, monkeypatch):
    train(max_steps=2, saves=True)
    expected = file_hashes(tmp_path)
    rename = os.rename

    def killed(source, target):
        if Path(source).name == "model.safetensors":
            raise KeyboardInterrupt
        rename(source, target)

    monkeypatch.setattr(os, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        train(max_steps=1)
    monkeypatch.undo()
    train(max_steps=1)
    assert file_hashes(tmp_path / "_earlier_1") == expected


def test_run_has_no_checkpoint_or_model_of_an_earlier_one(train, tmp_path):
    train(max_steps=2)
    (tmp_path / "config.json").touch()
    assert model_of_run(tmp_path) == tmp_path
    train(max_steps=1, save_strategy="no")
    log = tmp_path / "log.jsonl"
    log.write_text(log.read_text().splitlines(keepends=True)[0])
    with pytest.raises(FileNotFoundError, match="neither a final model nor a checkpoint of its run"):
        model_of_run(tmp_path)
    assert checkpoint_to_resume("latest", tmp_path) is None


def test_latest_is_of_the_branch_that_trained_last(train, tmp_path):
    train(max_steps=6)
    train(max_steps=4, resume=str(tmp_path / "checkpoint-2"))
    os.utime(tmp_path / "checkpoint-4", (1.0, 1.0))  # as copying may
    assert checkpoint_to_resume("latest", tmp_path) == str(tmp_path / "checkpoint-4")
    train(max_steps=5, resume="latest")
    assert steps(tmp_path) == [1, 2, 3, 4, 5]


def test_evaluation_before_training_is_no_earlier_run(train, tmp_path):
    train(max_steps=1, evaluates=True)
    rows = [row for row in read_lines(tmp_path / "log.jsonl") if "warning" not in row]
    assert [row["step"] for row in rows][:2] == [0, 1]


def test_rows_and_tokens_are_not_pushed(make_trainer, tmp_path, monkeypatch):
    pushed = {}
    trainer = make_trainer(output_dir=str(tmp_path), teacher_model_init_kwargs={"token": "secret"})
    trainer.state.max_steps = 1
    trainer.train()
    trainer.save_model()
    hub = SimpleNamespace(upload_folder=lambda **options: pushed.update(options))
    monkeypatch.setattr(transformers.trainer, "hf_api", lambda: hub, raising=False)
    monkeypatch.setattr(transformers.trainer, "upload_folder", hub.upload_folder, raising=False)  # older releases
    trainer.hub_model_id, trainer.push_in_progress = "user/model", None
    monkeypatch.setattr(trainer, "create_model_card", lambda **_: None)
    trainer.push_to_hub()
    files = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()]
    assert (pushed["folder_path"], "_rows/train.parquet" in files) == (str(tmp_path), True)
    pushed_files = list(filter_repo_objects(files, ignore_patterns=pushed["ignore_patterns"]))
    assert "model.safetensors" in pushed_files
    assert not [file for file in pushed_files if file.endswith(".parquet")]
    assert "secret" not in str(trainer.args.to_dict())  # which dashboards show
    assert "secret" not in (tmp_path / "run.json").read_text()
