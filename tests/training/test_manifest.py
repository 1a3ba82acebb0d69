"""A damaged checkpoint is never resumed from: `latest` takes an older one, and a path is refused with the file."""

import shutil
from pathlib import Path

import pytest

from credit_trl.training.checkpoints import checkpoint_to_resume, find_damage, hash_files, write_manifest


@pytest.fixture(scope="module")
def runs() -> list[Path]:
    """The run directory, once it is made."""
    return []


@pytest.fixture
def run(make_trainer, tmp_path_factory, runs) -> Path:
    """A run directory with checkpoints of steps 1 and 3, the last one inside a generation batch."""
    if not runs:
        runs.append(tmp_path_factory.mktemp("run"))
        options = {"per_device_train_batch_size": 4, "steps_per_generation": 2, "max_steps": 3}
        make_trainer(output_dir=str(runs[0]), save_strategy="steps", save_steps=1, **options).train()
        shutil.rmtree(runs[0] / "checkpoint-2")
    return runs[0]


FILES = """
model.safetensors teacher.safetensors optimizer.pt scheduler.pt rng_state.pth trainer_state.json credit_state.json
rollouts_0.pt config.json tokenizer.json training_args.bin manifest.json
""".split()


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGES = {
    "flipped bit": flip,
    "truncated": truncate,
    "empty": lambda path: path.write_bytes(b""),
    "missing": Path.unlink,
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", FILES)
def test_damaged_checkpoint_is_refused_and_latest_takes_an_older_one(run, tmp_path, caplog, file, damage):
    shutil.copytree(run, tmp_path / "run")
    newest = tmp_path / "run" / "checkpoint-3"
    DAMAGES[damage](newest / file)
    with pytest.raises(ValueError, match=f"{newest / file} "):
        checkpoint_to_resume(str(newest), tmp_path / "run")
    assert checkpoint_to_resume("latest", tmp_path / "run") == str(tmp_path / "run" / "checkpoint-1")
    assert f"DAMAGED CHECKPOINT: {newest / file}" in caplog.text


def test_damaged_checkpoints_alone_do_not_start_the_run_again(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    for folder in (tmp_path / "run").glob("checkpoint-*"):
        flip(folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"No checkpoint in .* can be resumed: .*checkpoint-3.*checkpoint-1"):
        checkpoint_to_resume("latest", tmp_path / "run")


def test_manifest_covers_files_in_folders_and_not_itself(tmp_path):
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "0").write_text("weights")
    for _ in range(2):
        write_manifest(tmp_path, hash_files(tmp_path))
    assert find_damage(tmp_path) is None
    (tmp_path / "shards" / "0").write_text("weightz")
    assert find_damage(tmp_path).startswith(f"{tmp_path}/shards/0 has changed")


def test_checkpoint_of_another_trainer_is_named(tmp_path):
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1" / "trainer_state.json").touch()
    with pytest.raises(ValueError, match="was not saved by `CreditTrainer`; start a new run with `model="):
        checkpoint_to_resume("latest", tmp_path)
