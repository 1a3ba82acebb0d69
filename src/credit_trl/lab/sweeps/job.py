"""One job of a sweep: trains one arm with one seed and evaluates it.

A job's directory contains `job.json`, the files of its run (`training.run_directory`), and `done.json` once the job is
complete. `python -m credit_trl.lab.sweeps.job DIRECTORY`, directly or through `accelerate launch`, runs the job or
resumes it from its last complete checkpoint; it does nothing for a job that is done.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate import PartialState
from filelock import FileLock, Timeout
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from credit_trl.config import CreditConfig
from credit_trl.evaluation.callback import EvaluationCallback, score_summary
from credit_trl.tasks.model_names import model_path
from credit_trl.tasks.registry import Task, load_task
from credit_trl.trainer import CreditTrainer
from credit_trl.training.checkpoints import STATE_FILE
from credit_trl.training.future_warnings import ignore_future_warnings
from credit_trl.training.run_directory import (
    EVALUATIONS_FILE,
    JOB_FILE,
    SUMMARY_FILE,
    read_json,
    read_lines,
    write_json,
)

if TYPE_CHECKING:
    from datasets import Dataset

DONE_FILE = "done.json"
LOCK_FILE = ".lock"
BUSY_FILE = ".busy"  # a job's process leaves it for its launcher if another process runs the job


class JobBusy(RuntimeError):
    """Another process is running this job."""


def is_done(folder: str | Path) -> bool:
    """Whether a job is complete."""
    return (Path(folder) / DONE_FILE).is_file()


def read_job(folder: str | Path) -> dict[str, Any]:
    """The content of a directory's `job.json`."""
    return read_json(Path(folder) / JOB_FILE)


def run_job(folder: str | Path) -> None:
    """Run the job of a directory to its end.

    Raises:
        JobBusy: another process is running it.
        ValueError: its configuration is invalid, or its last step was not evaluated.
    """
    folder = Path(folder)
    with _locked(folder):
        if is_done(folder):
            return
        checkpoints = complete_checkpoints(folder)
        last_step = checkpoints[0].step if checkpoints else None
        evaluated = [row["step"] for row in read_lines(folder / EVALUATIONS_FILE)]
        if not (checkpoints and checkpoints[0].is_last and last_step in evaluated):
            trainer = build_trainer(read_job(folder), folder)
            # Resuming from the last step would not log the summary that ends a training.
            trainer.train(resume_from_checkpoint=next((c.path for c in checkpoints if not c.is_last), None))
            trainer.accelerator.wait_for_everyone()
            last_step = trainer.state.global_step
        if PartialState().is_main_process:
            finish(folder, last_step)


def finish(folder: Path, last_step: int) -> None:
    """Write the summary of a trained job, mark it done and remove its checkpoints, in this order."""
    scores = score_summary(read_lines(folder / EVALUATIONS_FILE), last_step)
    write_json(folder / SUMMARY_FILE, scores)
    write_json(folder / DONE_FILE, scores)
    drop_checkpoints(folder)


def drop_checkpoints(folder: Path) -> None:
    """Remove the checkpoints of a finished job, unless it has `keep_checkpoints`."""
    if not read_job(folder)["keep_checkpoints"]:
        for place in (folder, *folder.glob("previous-*")):  # attempts that `set_aside_earlier_run` has moved
            for checkpoint in place.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
                shutil.rmtree(checkpoint, ignore_errors=True)  # another launcher may remove it too


def build_trainer(job: Mapping[str, Any], folder: Path) -> CreditTrainer:
    """Build the trainer of a job, the content of its `job.json`, with its log and its evaluation."""
    task = load_task(job["task"])
    data = job["data"]
    rows = build_rows(task, data)
    if data.get("max_train_rows"):
        rows = rows.select(range(min(data["max_train_rows"], len(rows))))
    config = CreditConfig(output_dir=str(folder), seed=job["seed"], **job["config"])
    trainer = CreditTrainer(model_path(job["model"]), task.reward, config, rows)
    trainer.run_log.facts.update(arm=job["arm"], method=job["method"], task=job["task"], base=job["model"])
    trainer.add_callback(EvaluationCallback(trainer, task, **evaluation_options(data, job["evaluation"])))
    return trainer


def build_rows(task: Task, data: Mapping[str, Any]) -> Dataset:
    """Training rows of a task, all of their split, for a job's `data`."""
    return task.build(data.get("train_split", "train"), data.get("path"))


def evaluation_options(data: Mapping[str, Any], evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a job's `EvaluationCallback`, which reads the path of the training rows by default."""
    return {"path": data.get("path"), **evaluation}


@dataclass(frozen=True)
class JobCheckpoint:
    """A complete checkpoint of a job; `is_last` if training ended at its step."""

    path: str
    step: int
    is_last: bool


def complete_checkpoints(folder: str | Path) -> list[JobCheckpoint]:
    """Complete checkpoints of a job, newest first. Partly written ones are skipped."""
    found = []
    for path in Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        try:
            read_json(path / STATE_FILE)  # the last file of a checkpoint
            state = TrainerState.load_from_json(str(path / "trainer_state.json"))
        except (OSError, ValueError, TypeError):
            continue
        found.append(JobCheckpoint(str(path), state.global_step, state.global_step >= state.max_steps))
    return sorted(found, key=lambda checkpoint: -checkpoint.step)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the job's lock in the main process of a run. The lock of a killed process is released."""
    if not PartialState().is_main_process:
        yield
        return
    try:
        with FileLock(folder / LOCK_FILE, timeout=0):
            yield
    except Timeout:
        raise JobBusy(f"{folder} is being run by another process.") from None


if __name__ == "__main__":
    ignore_future_warnings()
    try:
        run_job(sys.argv[1])
    except JobBusy:
        (Path(sys.argv[1]) / BUSY_FILE).touch()
        raise
