"""Atomic checkpoints: complete or absent, and earlier ones survive a full disk."""

import errno
import json
import os
from functools import partial
from pathlib import Path
from pkgutil import resolve_name

import pytest
import torch
from transformers import Trainer

from credit_trl import CreditTrainer
from credit_trl.training import checkpoints
from credit_trl.training.checkpoints import UNFINISHED, CheckpointError, checkpoint_to_resume, find_damage
from tables import tables_of

TABLES = tables_of(__file__)


@pytest.fixture
def make_trainer(make_trainer):
    return partial(make_trainer, save_strategy="steps", save_steps=1, save_total_limit=1, max_steps=3)


def names(folder: Path) -> list[str]:
    """Checkpoints in a folder, and the folder of unfinished ones; others are of the report."""
    return sorted(path.name for pattern in ("checkpoint-*", UNFINISHED) for path in folder.glob(pattern))


def test_only_complete_checkpoints_within_limit_remain(make_trainer, tmp_path):
    make_trainer().train()
    assert names(tmp_path / "run") == ["checkpoint-3"]
    assert set(TABLES["files"]) <= {path.name for path in (tmp_path / "run" / "checkpoint-3").iterdir()}


def full_disk(*args, **kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(("owner", "name"), TABLES["writers"].values(), ids=TABLES["writers"])
def test_full_disk_keeps_previous_checkpoint(make_trainer, tmp_path, monkeypatch, owner, name):
    trainer, owner = make_trainer(max_steps=2), resolve_name(owner)
    original = getattr(owner, name)

    def fail_at_two(*args, **kwargs):
        return full_disk() if trainer.state.global_step == 2 else original(*args, **kwargs)

    monkeypatch.setattr(owner, name, fail_at_two)
    with pytest.raises(
        CheckpointError, match=r"Step 2 could not be saved.*No space left.*checkpoint is .*checkpoint-1\."
    ):
        trainer.train()
    assert names(tmp_path / "run") == ["checkpoint-1"]  # the incomplete second one is removed
    monkeypatch.undo()
    make_trainer(max_steps=2).train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
    assert names(tmp_path / "run") == ["checkpoint-2"]


def test_first_failed_checkpoint_reports_none_exists(make_trainer, monkeypatch):
    monkeypatch.setattr(CreditTrainer, "_save_progress", full_disk)
    with pytest.raises(CheckpointError, match="There is no checkpoint yet"):
        make_trainer().train()


def test_finished_checkpoint_replaces_one_of_its_name(tmp_path):
    unfinished, finished = tmp_path / "unfinished" / "checkpoint-2", tmp_path / "checkpoint-2"
    for folder, text in ((unfinished, "new"), (finished, "old")):
        folder.mkdir(parents=True)
        (folder / "state").write_text(text)
    checkpoints.finish(unfinished, finished)
    assert (finished / "state").read_text() == "new"
    assert find_damage(finished) is None
    assert names(tmp_path / "unfinished") == []


def test_latest_is_newest_complete_checkpoint_or_none(tmp_path):
    assert checkpoint_to_resume("latest", tmp_path / "nowhere") is None
    for name in ("checkpoint-9", "checkpoint-10", "unfinished/checkpoint-11"):
        (tmp_path / name).mkdir(parents=True)
        checkpoints.write_manifest(tmp_path / name, {})
    assert checkpoint_to_resume("latest", tmp_path) == str(tmp_path / "checkpoint-10")
    assert checkpoint_to_resume(str(tmp_path / "checkpoint-9"), tmp_path) == str(tmp_path / "checkpoint-9")


@pytest.mark.parametrize(("asked", "message"), TABLES["no_checkpoints"])
def test_folder_that_is_no_checkpoint_is_refused(asked, message, tmp_path):
    (tmp_path / "checkpoint-3").mkdir()
    for name in ("run.json", "trainer_state.json"):
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match=message):
        checkpoint_to_resume(str(tmp_path / asked), tmp_path)


def test_second_call_of_train_uses_no_rollouts_of_the_first(make_trainer, monkeypatch):
    trainer = make_trainer(max_steps=1, per_device_train_batch_size=4, steps_per_generation=2)
    generated = []
    generate = trainer._generate
    monkeypatch.setattr(trainer, "_generate", lambda prompts: generated.append(trainer._step) or generate(prompts))
    trainer.train()  # ends inside a generation batch
    trainer.train()
    assert generated == [0, 0]


def test_checkpoint_is_pushed_under_its_final_name(make_trainer, tmp_path, monkeypatch):
    pushed = []
    monkeypatch.setattr(
        Trainer, "_push_from_checkpoint", lambda _, folder: pushed.append((folder, find_damage(Path(folder))))
    )
    trainer = make_trainer(max_steps=1)
    trainer.args.push_to_hub = True  # the hub's repository is made at construction
    trainer.train()
    checkpoint = tmp_path / "run" / "checkpoint-1"
    assert pushed == [(str(checkpoint), None)]
    assert torch.load(checkpoint / "training_args.bin", weights_only=False).push_to_hub


def test_saved_options_hold_no_nested_token(make_trainer, tmp_path):
    trainer = make_trainer(max_steps=1)
    loading = {
        "token": "hf_secret",
        "processor_kwargs": [{"hub_token": "hf_secret"}],
        "pad_token": "<pad>",
        "token_ids": [1],
    }
    trainer.args.teacher_model_init_kwargs = loading
    trainer.train()
    trainer.save_model(str(tmp_path / "final"))
    assert trainer.args.teacher_model_init_kwargs is loading
    assert loading["token"] == "hf_secret"
    for folder in (tmp_path / "run" / "checkpoint-1", tmp_path / "final"):
        assert all(b"hf_secret" not in path.read_bytes() for path in folder.iterdir())
        options = torch.load(folder / "training_args.bin", weights_only=False).teacher_model_init_kwargs
        assert options == loading | {"token": "<TOKEN>", "processor_kwargs": [{"hub_token": "<TOKEN>"}]}


def test_best_checkpoint_has_its_final_name(make_trainer, dataset, tmp_path):
    trainer = make_trainer(eval_rows=dataset.select(range(2)), **TABLES["best"])
    trainer.train()
    best = Path(trainer.state.best_model_checkpoint)
    assert best.parent == tmp_path / "run"
    assert best.is_dir()
    saved = tmp_path / "run" / f"checkpoint-{trainer.state.best_global_step}"
    state = json.loads((saved / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == str(best)
