"""Plans the jobs of a sweep, runs those that are not done one after another, and reports failures."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from tqdm.auto import tqdm

from credit_trl.config import CreditConfig
from credit_trl.lab.sweeps.checks import check_data, check_evaluation
from credit_trl.lab.sweeps.job import BUSY_FILE, DONE_FILE, JobBusy, drop_checkpoints, is_done, read_job, run_job
from credit_trl.lab.sweeps.spec import Arm, SweepSpec
from credit_trl.tasks.printable import counted, printable
from credit_trl.training.run_directory import BASE_EVALUATION, JOB_FILE, RESULT_FILE, write_atomically, write_json

ERROR_FILE = "error.txt"
OUTPUT_FILE = "output.txt"
LAUNCHER_LOCK = ".launcher.lock"
_POLL_SECONDS = 5.0
# Common options of all jobs. Two checkpoints are kept, because the older one goes before the newer one is complete.
_CONFIG = {"save_strategy": "steps", "save_steps": 20, "save_total_limit": 2, "logging_steps": 1, "report_to": "none"}


@dataclass
class SweepReport:
    """Directories of the jobs that are done and of those that failed."""

    done: list[Path] = field(default_factory=list)
    failed: list[Path] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{counted(len(self.done), 'job')} done, {len(self.failed)} failed"]
        return "\n".join(lines + [f"  failed: {printable(str(folder))} (see {ERROR_FILE})" for folder in self.failed])


def plan_sweep(spec: SweepSpec, output_dir: str | Path, *, write: bool = True) -> list[Path]:
    """Return the jobs' directories, ordered by seed, so that early results compare all arms.

    `job.json` is written into each; with `write=False` the arms are only checked.

    Raises:
        ValueError: an invalid configuration of an arm, an unknown task, an invalid evaluation option, rows that cannot
            be loaded, or a directory that holds another job.
    """
    check_evaluation(spec)
    root = Path(output_dir)
    jobs = {root / arm.slug / f"seed-{seed}": _job(spec, arm, seed) for seed in spec.seeds for arm in spec.arms()}
    for folder, job in jobs.items():
        try:
            CreditConfig(output_dir=str(folder), seed=job["seed"], **job["config"])
            json.dumps(job, allow_nan=False)  # a date or an infinity would come back from `job.json` as another value
        except (TypeError, ValueError) as error:
            raise ValueError(f"Arm {job['arm']!r} has an invalid configuration: {error}") from error
        _check_same_job(job, folder)
    if not all(map(is_done, jobs)):
        check_data(spec)
    for folder, job in jobs.items():
        if write and not (folder / JOB_FILE).is_file():
            write_json(folder / JOB_FILE, job)
    return list(jobs)


def run_sweep(spec: SweepSpec, output_dir: str | Path, *, progress: bool = True) -> SweepReport:
    """Run all jobs of a sweep that are not done. A job that fails leaves its error, and the others still run.

    Jobs that another launcher runs are retried at the end, and resumed here if that launcher dies.
    """
    folders = plan_sweep(spec, output_dir)
    report = SweepReport()
    waiting = list(folders)
    with tqdm(total=len(folders), desc="sweep", unit="job", disable=not progress) as bar:
        while waiting:
            busy = []
            for folder in waiting:
                bar.set_postfix_str(str(folder.relative_to(output_dir)))
                share_base_evaluation(folder, folders)
                outcome = _run_or_resume(folder, spec)
                if outcome == "busy":
                    busy.append(folder)
                    continue
                (report.done if outcome == "done" else report.failed).append(folder)
                bar.update()
            if len(busy) == len(waiting):
                time.sleep(_POLL_SECONDS)
            waiting = busy
    return report


def share_base_evaluation(folder: Path, others: Sequence[Path]) -> None:
    """Copy the evaluation of step 0 from a job with the same model, task, data and evaluation options.

    The job uses the copy only if the settings in it, which include a fingerprint of the weights, match its own.
    """
    mine = folder / BASE_EVALUATION
    if mine.exists() or is_done(folder):
        return
    for other in others:
        theirs = other / BASE_EVALUATION
        if other != folder and (theirs / RESULT_FILE).is_file() and _base_of(other) == _base_of(folder):
            mine.parent.mkdir(parents=True, exist_ok=True)
            scratch = Path(tempfile.mkdtemp(dir=mine.parent, prefix=".base-"))
            try:
                shutil.copytree(theirs, scratch, dirs_exist_ok=True)
                scratch.rename(mine)
            except OSError:  # another launcher has started this job, or the other one from the beginning
                shutil.rmtree(scratch)
            return


def _base_of(folder: Path) -> tuple[Any, ...]:
    job = read_job(folder)
    return job["model"], job["task"], job["data"], job["evaluation"]


def _job(spec: SweepSpec, arm: Arm, seed: int) -> dict[str, Any]:
    return {
        "arm": arm.name,
        "method": arm.method,
        "seed": seed,
        "model": spec.model.replace("{seed}", str(seed)),
        "task": spec.task,
        "data": dict(spec.data),
        "config": {**_CONFIG, **spec.config, **arm.options},
        "evaluation": dict(spec.evaluation),
        "keep_checkpoints": spec.keep_checkpoints,
    }


def _check_same_job(job: Mapping[str, Any], folder: Path) -> None:
    now = json.loads(json.dumps(job))
    before = read_job(folder) if (folder / JOB_FILE).is_file() else now
    if differing := sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name)):
        raise ValueError(
            f"{folder} holds another job ({', '.join(differing)} differ). Use another output directory, or remove it."
        )


def _run_or_resume(folder: Path, spec: SweepSpec) -> str:
    """Run one job and return "done", "failed" or "busy"."""
    if is_done(folder):
        drop_checkpoints(folder)
        return "done"
    (folder / ERROR_FILE).unlink(missing_ok=True)
    error = None
    try:
        if spec.launcher == "inline":
            run_job(folder)
        else:
            error = _run_process(folder, spec)
    except JobBusy:
        return "busy"
    except Exception:
        error = traceback.format_exc()
    if error is None and is_done(folder):
        return "done"
    write_atomically(folder / ERROR_FILE, error or f"The job ended without an error and without {DONE_FILE}.\n")
    return "failed"


def _run_process(folder: Path, spec: SweepSpec) -> str | None:
    """Run a job in a new process, unless another launcher does, and return the end of its output if it fails."""
    command = [sys.executable, "-m"]
    if spec.launcher == "accelerate":
        command += ["accelerate.commands.launch", *map(str, spec.accelerate_args), "-m"]
    command += ["credit_trl.lab.sweeps.job", str(folder)]
    try:
        with FileLock(folder / LAUNCHER_LOCK, timeout=0), (folder / OUTPUT_FILE).open("ab") as output:
            start = output.tell()
            (folder / BUSY_FILE).unlink(missing_ok=True)
            finished = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False)
            # A process of a launcher that was killed may still run the job. The output could quote any message, so a
            # file signals it.
            busy = (folder / BUSY_FILE).exists()
            (folder / BUSY_FILE).unlink(missing_ok=True)
    except Timeout:
        raise JobBusy(f"{folder} is being run by another launcher.") from None
    if finished.returncode == 0:
        return None
    if busy:
        raise JobBusy(f"{folder} is being run by another process.")
    text = (folder / OUTPUT_FILE).read_bytes()[start:].decode(errors="replace")
    return f"Exit code {finished.returncode}. The end of {OUTPUT_FILE}:\n\n{text[-4000:]}\n"
