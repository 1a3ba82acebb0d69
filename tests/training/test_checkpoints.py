"""Atomic checkpoints: complete or absent, and earlier ones survive a full disk."""

import errno
import io
import json
import math
import os
import resource
import shutil
import time
from functools import partial
from pathlib import Path
from pkgutil import resolve_name

import pytest
import torch
from transformers import Trainer, TrainerCallback

from credit_trl import CreditTrainer
from credit_trl.run_directory import LOCK_FILE, RunLockedError, read_steps, run_lock, write_atomically
from credit_trl.training import checkpoints
from credit_trl.training.checkpoints import UNFINISHED, CheckpointError, checkpoint_to_resume, find_damage
from credit_trl.training.weights import NonFiniteError
from tables import tables_of
from tiny import file_hashes

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
    files = {path.name for path in (tmp_path / "run" / "checkpoint-3").iterdir()}
    assert set(TABLES["files"]) <= files
    assert "rollouts_0.pt" not in files


@pytest.mark.parametrize("damage", [{"step": 0}, {"files": "{}"}], ids=["progress", "manifest"])
def test_a_replaced_json_encoder_writes_no_damaged_checkpoint(make_trainer, tmp_path, monkeypatch, damage):
    trainer, encode = make_trainer(), json.dumps

    def encode_at_two(value, **options):
        is_due = trainer.state.global_step == 2 and isinstance(value, dict) and damage.keys() <= value.keys()
        return encode(value | damage if is_due else value, **options)

    monkeypatch.setattr(json, "dumps", encode_at_two)
    with pytest.raises(CheckpointError, match=r"Step 2 could not be saved.*restore `json\.dumps`.*checkpoint-1\."):
        trainer.train()
    assert names(tmp_path / "run") == ["checkpoint-1"]
    assert find_damage(tmp_path / "run" / "checkpoint-1") is None


def test_a_failed_upload_of_a_checkpoint_ends_no_run(make_trainer, tmp_path, monkeypatch, caplog):
    def fail(self, folder):
        raise ConnectionError("no route to host\nmore")

    monkeypatch.setattr(Trainer, "init_hf_repo", lambda self: None)
    monkeypatch.setattr(Trainer, "_push_from_checkpoint", fail)
    make_trainer(push_to_hub=True).train()
    assert caplog.text.count("was not uploaded (ConnectionError: no route to host). Training continues.") == 3
    assert find_damage(tmp_path / "run" / "checkpoint-3") is None


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


class AtStep(TrainerCallback):
    """Calls a function when a step has ended, before its checkpoint is written."""

    def __init__(self, step, function):
        self.step, self.function = step, function

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.function(**kwargs)


@pytest.mark.parametrize("jump", [-3600.0, 3600.0])
def test_order_of_checkpoints_is_the_step_whatever_the_clock_says(make_trainer, tmp_path, monkeypatch, jump):
    trainer = make_trainer(save_total_limit=2, max_steps=4)
    finish, clock = checkpoints.finish, time.time

    def finish_and_jump(unfinished, finished):
        finish(unfinished, finished)
        at = clock() + jump * trainer.state.global_step
        monkeypatch.setattr(time, "time", lambda: at)
        os.utime(finished, (at, at))

    monkeypatch.setattr(checkpoints, "finish", finish_and_jump)
    trainer.train()
    assert names(tmp_path / "run") == ["checkpoint-3", "checkpoint-4"]
    assert checkpoint_to_resume("latest", tmp_path / "run") == str(tmp_path / "run" / "checkpoint-4")
    make_trainer(save_total_limit=2, max_steps=12).train(resume_from_checkpoint="latest")
    assert sorted(names(tmp_path / "run")) == ["checkpoint-11", "checkpoint-12"]


@pytest.mark.parametrize("kind", ["moved", "removed", "lock removed", "lock replaced"])
def test_run_whose_folder_or_lock_is_gone_ends_and_writes_nothing(make_trainer, tmp_path, kind):
    run = tmp_path / "run"
    changes = {
        "moved": lambda **_: run.rename(tmp_path / "moved"),
        "removed": lambda **_: shutil.rmtree(run),
        "lock removed": lambda **_: (run / LOCK_FILE).unlink(),
        "lock replaced": lambda **_: write_atomically(run / LOCK_FILE, "another"),
    }
    trainer = make_trainer()
    trainer.add_callback(AtStep(2, changes[kind]))
    with pytest.raises(RunLockedError, match=r"was moved, or .run_lock in it was removed.*Resume it from its last"):
        trainer.train()
    place = tmp_path / "moved" if kind == "moved" else run
    assert names(place) == ([] if kind == "removed" else ["checkpoint-1"])
    assert run.exists() is (kind in ("lock removed", "lock replaced"))
    if kind != "removed":
        make_trainer(output_dir=str(place)).train(resume_from_checkpoint="latest")


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_optimizer_state_that_is_not_finite_is_not_saved(make_trainer, tmp_path, value):
    def poison(optimizer, **_):
        state = next(iter(optimizer.state.values()))
        state["exp_avg_sq"].view(-1)[0] = value

    trainer = make_trainer()
    trainer.add_callback(AtStep(2, poison))
    with pytest.raises(NonFiniteError, match=r"optimizer's `exp_avg_sq`.* nothing is saved.*checkpoint-1"):
        trainer.train()
    assert names(tmp_path / "run") == ["checkpoint-1"]


@pytest.mark.parametrize("name", ["log.jsonl", "run.json", "evaluations.jsonl", "evaluations", "checkpoint-9"])
def test_links_in_a_run_folder_are_refused_and_not_followed(make_trainer, tmp_path, name):
    target = tmp_path / "target"
    target.mkdir() if name in ("evaluations", "checkpoint-9") else target.write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(target)
    expected = file_hashes(tmp_path)
    with pytest.raises(ValueError, match=f"{name} is a symbolic link.*Remove it, or set another `output_dir`"):
        make_trainer().train()
    assert file_hashes(tmp_path) == expected


def test_no_model_is_saved_into_the_folder_of_another_trainer(make_trainer, earlier_run):
    trainer = make_trainer()
    expected = file_hashes(earlier_run)
    with run_lock(earlier_run):
        with pytest.raises(RunLockedError, match="is used by another trainer"):
            trainer.save_model()
        (earlier_run / LOCK_FILE).unlink()
        assert file_hashes(earlier_run) == expected
    trainer.save_model(str(earlier_run.parent / "elsewhere"))


def test_clean_up_removes_only_what_a_run_wrote(make_trainer, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    for name in (".my.notes.2026.tmp", ".run.json.12.credit_trl.tmp"):
        (run / name).touch()
    make_trainer(max_steps=1).train()
    assert {path.name for path in run.glob(".*.tmp")} == {".my.notes.2026.tmp"}


@pytest.mark.parametrize("name", ["run.json", "log.jsonl", "evaluations.jsonl", "evaluations", "_rows"])
def test_path_of_the_wrong_kind_is_refused_with_the_run_unharmed(make_trainer, tmp_path, name):
    path = tmp_path / "run" / name
    if path.suffix:
        (path / "mine").mkdir(parents=True)
    else:
        path.parent.mkdir()
        path.write_text("mine")
    expected = file_hashes(tmp_path)
    with pytest.raises(ValueError, match=rf"{name} is a (file|folder), and a run writes a .* there\. Remove it"):
        make_trainer().train()
    assert file_hashes(tmp_path) == expected


def rewrite(path: Path, content: bytes) -> None:
    """Replace a file of a checkpoint, and its hash in the manifest."""
    path.write_bytes(content)
    checkpoints.write_manifest(path.parent, checkpoints.hash_files(path.parent))


@pytest.mark.parametrize(("file", "content", "message"), TABLES["unreadable"])
def test_unreadable_file_is_one_sentence_with_its_path(earlier_run, make_trainer, file, content, message):
    path = earlier_run / "checkpoint-2" / file
    if content == "a folder":
        path.unlink()
        path.mkdir()
    elif content == "pickle":
        rewrite(path, torch_bytes(Path("x")))
    else:
        state = json.loads(path.read_text())
        rewrite(path, json.dumps({**state, **content}).encode())
    with pytest.raises(ValueError, match=f"{path}.*{message}") as refused:
        make_trainer(max_steps=3).train(resume_from_checkpoint=str(path.parent))
    assert "weights_only" not in str(refused.value)


def torch_bytes(value) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(("file", "content", "warning"), TABLES["damaged"])
def test_damaged_file_of_the_run_is_warned_about_and_ends_no_resume(
    earlier_run, make_trainer, caplog, file, content, warning
):
    (earlier_run / file).write_text(content)
    trainer = make_trainer(max_steps=3)
    trainer.train(resume_from_checkpoint="latest")
    assert warning in caplog.text
    assert trainer.state.global_step == 3
    run = json.loads((earlier_run / "run.json").read_text())
    assert run["segments"][-1]["options"]["seed"] == 1
    assert [row["step"] for row in read_steps(earlier_run / "log.jsonl")][-1] == 3


@pytest.mark.parametrize(("code", "limit", "remedy"), TABLES["remedies"])
def test_advice_after_a_failed_checkpoint_fits_its_cause(make_trainer, monkeypatch, code, limit, remedy):
    def fail(*args, **kwargs):
        raise OSError(getattr(errno, code), os.strerror(getattr(errno, code)))

    monkeypatch.setattr(CreditTrainer, "_save_progress", fail)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit, limit))
    with pytest.raises(CheckpointError, match=remedy):
        make_trainer().train()
