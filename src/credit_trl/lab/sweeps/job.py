"""One job of a sweep: train one arm with one seed, evaluate it, and mark it done.

A job's directory holds `job.json`, what a run writes (`run_directory`), and `done.json` once everything is there. It
is run by `python -m credit_trl.lab.sweeps.job DIRECTORY`, directly or through `accelerate launch`, any number of times:
it continues from its last complete checkpoint, and does nothing when it is done.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import PartialState
from filelock import FileLock, Timeout
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from credit_trl.cli.training import resolve_model
from credit_trl.config import CreditConfig
from credit_trl.evaluation.callback import EvaluationCallback, RunLog, summary
from credit_trl.tasks.registry import load_task
from credit_trl.trainer import CreditTrainer
from credit_trl.training.checkpoints import STATE_FILE
from credit_trl.training.run_directory import EVALUATIONS_FILE, JOB_FILE, SUMMARY_FILE, read_lines, write_json

DONE_FILE = "done.json"
LOCK_FILE = ".lock"
BUSY_FILE = ".busy"  # left by a job's process that has found another one at it, for who started it


class JobBusy(RuntimeError):
    """Another process is running this job."""


def is_done(folder: str | Path) -> bool:
    return (Path(folder) / DONE_FILE).is_file()


def run_job(folder: str | Path) -> None:
    """Run the job of a directory to its end.

    Raises:
        JobBusy: another process is at it.
        ValueError: its configuration cannot train.
    """
    folder = Path(folder)
    job = json.loads((folder / JOB_FILE).read_text(encoding="utf-8"))
    with _held(folder):
        if is_done(folder):
            return
        checkpoints = complete_checkpoints(folder)
        last_step = checkpoints[0].step if checkpoints else None
        if not (checkpoints and checkpoints[0].is_last and _is_evaluated(folder, checkpoints[0].step)):
            trainer = build_trainer(job, folder)
            # Not from the last step's, so that the log ends with what training itself has to sum up.
            trainer.train(resume_from_checkpoint=next((c.path for c in checkpoints if not c.is_last), None))
            trainer.accelerator.wait_for_everyone()
            last_step = trainer.state.global_step
        if PartialState().is_main_process:
            finish(folder, last_step)


def finish(folder: Path, last_step: int) -> None:
    """Sum up a job that was trained to this step, say that it is done, and only then drop what resuming needs.

    Raises:
        ValueError: the last step was not evaluated, as where its verifier failed: the job is begun again there.
    """
    told = summary(read_lines(folder / EVALUATIONS_FILE), last_step)
    write_json(folder / SUMMARY_FILE, told)
    write_json(folder / DONE_FILE, told)
    drop_checkpoints(folder)


def drop_checkpoints(folder: Path) -> None:
    """Remove a done job's checkpoints, unless it is to keep them."""
    if not json.loads((folder / JOB_FILE).read_text(encoding="utf-8"))["keep_checkpoints"]:
        for checkpoint in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
            shutil.rmtree(checkpoint, ignore_errors=True)  # another launcher may be at it too


def build_trainer(job: Mapping[str, Any], folder: Path) -> Any:
    """The trainer of a job, with its log and its evaluation attached.

    Args:
        job: the content of `job.json`.
        folder: its output directory.
    """
    task = load_task(job["task"])
    data = job["data"]
    rows = task.build(data.get("train_split", "train"), data.get("path"))
    if data.get("max_train_rows"):
        rows = rows.select(range(min(data["max_train_rows"], len(rows))))
    config = CreditConfig(output_dir=str(folder), seed=job["seed"], **job["config"])
    trainer = CreditTrainer(resolve_model(job["model"]), task.reward, config, rows)
    trainer.add_callback(RunLog(arm=job["arm"], method=job["method"], task=job["task"], base=job["model"]))
    trainer.add_callback(EvaluationCallback(trainer, task, **{"path": data.get("path"), **job["evaluation"]}))
    return trainer


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was written to its end; `is_last` where training ended there."""

    path: str
    step: int
    is_last: bool


def complete_checkpoints(folder: str | Path) -> list[Checkpoint]:
    """The checkpoints that were written to their end, newest first; half-written ones are passed over."""
    found = []
    for path in Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        try:
            json.loads((path / STATE_FILE).read_text(encoding="utf-8"))  # the last file of a checkpoint
            state = TrainerState.load_from_json(str(path / "trainer_state.json"))
        except (OSError, ValueError, TypeError):
            continue
        found.append(Checkpoint(str(path), state.global_step, state.global_step >= state.max_steps))
    return sorted(found, key=lambda checkpoint: -checkpoint.step)


def _is_evaluated(folder: Path, step: int) -> bool:
    return any(row["step"] == step for row in read_lines(folder / EVALUATIONS_FILE))


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Hold the job: the main process of a run does so for all of its processes. A killed process lets go."""
    if not PartialState().is_main_process:
        yield
        return
    try:
        with FileLock(folder / LOCK_FILE, timeout=0):
            yield
    except Timeout:
        raise JobBusy(f"{folder} is being run by another process.") from None


if __name__ == "__main__":
    try:
        run_job(sys.argv[1])
    except JobBusy:
        (Path(sys.argv[1]) / BUSY_FILE).touch()
        raise
