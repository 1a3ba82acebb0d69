"""Running a sweep: plan its jobs, run what is missing one after another, and say what became of each."""

from __future__ import annotations

import inspect
import json
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from tqdm.auto import tqdm

from credit_trl.evaluation.callback import EvaluationCallback, check_options
from credit_trl.evaluation.protocol import RESULT_FILE
from credit_trl.lab.sweeps.job import BUSY_FILE, JobBusy, drop_checkpoints, is_done, run_job
from credit_trl.lab.sweeps.spec import SweepSpec
from credit_trl.tasks.registry import load_task
from credit_trl.training.run_directory import EVALUATIONS_FOLDER, JOB_FILE, write_atomically, write_json

SWEEP_FILE = "sweep.json"
ERROR_FILE = "error.txt"
OUTPUT_FILE = "output.txt"
LAUNCHER_LOCK = ".launcher.lock"
BASE_EVALUATION = Path(EVALUATIONS_FOLDER) / "step-000000"
_POLL_SECONDS = 5.0


@dataclass
class SweepReport:
    """What became of a sweep's jobs: their folders."""

    done: list[Path] = field(default_factory=list)
    failed: list[Path] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{len(self.done)} jobs done, {len(self.failed)} failed"]
        lines += [f"  failed: {folder} (see {ERROR_FILE})" for folder in self.failed]
        return "\n".join(lines)


def plan_sweep(spec: SweepSpec, output_dir: str | Path, *, write: bool = True) -> list[Path]:
    """The jobs' directories, seed after seed, so that early results compare all arms.

    Args:
        spec: the sweep.
        output_dir: where they are.
        write: write `job.json` into each. Without it every arm is checked, and nothing is bound to this spec.

    Raises:
        ValueError: an arm's configuration is invalid, there is no such task or no such option of the evaluation, or a
            directory holds another job.
    """
    _check_evaluation(spec)
    root = Path(output_dir)
    jobs = {root / arm.slug / f"seed-{seed}": _job(spec, arm, seed) for seed in spec.seeds for arm in spec.arms()}
    for folder, job in jobs.items():
        _check(job, folder)
        _check_same(job, folder)
    if write:
        for folder, job in jobs.items():
            if not (folder / JOB_FILE).is_file():
                write_json(folder / JOB_FILE, job)
        write_json(root / SWEEP_FILE, {"jobs": [str(folder.relative_to(root)) for folder in jobs]})
    return list(jobs)


def run_sweep(spec: SweepSpec, output_dir: str | Path, *, progress: bool = True) -> SweepReport:
    """Run all jobs of a sweep that are not done; a job that fails leaves its error and does not stop the others.

    Jobs that another launcher is running are waited for at the end, and taken over if that launcher dies.

    Args:
        spec: the sweep.
        output_dir: where the jobs' directories are.
        progress: show a bar over jobs.
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
                outcome = _run(folder, spec)
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
    """Copy the evaluation before the first step from a job that starts from the same model and was evaluated alike.

    The evaluation's own settings, which hold a fingerprint of the weights, decide whether it is then used.
    """
    mine = folder / BASE_EVALUATION
    if mine.exists() or is_done(folder):
        return
    wanted = _base_of(folder)
    for other in others:
        theirs = other / BASE_EVALUATION
        if other != folder and (theirs / RESULT_FILE).is_file() and _base_of(other) == wanted:
            mine.parent.mkdir(parents=True, exist_ok=True)
            scratch = Path(tempfile.mkdtemp(dir=mine.parent, prefix=".base-"))
            shutil.copytree(theirs, scratch, dirs_exist_ok=True)
            try:
                scratch.rename(mine)
            except OSError:  # another launcher has begun this job meanwhile
                shutil.rmtree(scratch)
            return


def _base_of(folder: Path) -> tuple[Any, ...]:
    job = json.loads((folder / JOB_FILE).read_text(encoding="utf-8"))
    return job["model"], job["task"], job["data"], job["evaluation"]


def _job(spec: SweepSpec, arm: Any, seed: int) -> dict[str, Any]:
    return {
        "arm": arm.name,
        "method": arm.method,
        "seed": seed,
        "model": spec.model.format(seed=seed),
        "task": spec.task,
        "data": dict(spec.data),
        "config": {**_CONFIG, **spec.config, **arm.options},
        "evaluation": dict(spec.evaluation),
        "keep_checkpoints": spec.keep_checkpoints,
    }


# Two checkpoints, since the older one goes before the newer one is complete.
_CONFIG = {"save_strategy": "steps", "save_steps": 20, "save_total_limit": 2, "logging_steps": 1, "report_to": "none"}


def _check(job: Mapping[str, Any], folder: Path) -> None:
    from credit_trl.config import CreditConfig

    try:
        CreditConfig(output_dir=str(folder), seed=job["seed"], **job["config"])
    except (TypeError, ValueError) as error:
        raise ValueError(f"Arm {job['arm']!r} cannot train: {error}") from error


def _check_evaluation(spec: SweepSpec) -> None:
    load_task(spec.task)
    own = inspect.signature(EvaluationCallback).parameters.keys() - {"trainer", "task", "options"}
    passed_on = {name: value for name, value in spec.evaluation.items() if name not in own}
    try:
        check_options(spec.evaluation.get("k", 1), passed_on)
    except (TypeError, ValueError) as error:
        raise ValueError(f"`evaluation`: {error}") from error


def _check_same(job: Mapping[str, Any], folder: Path) -> None:
    """Nothing of another job may be continued as this one."""
    path = folder / JOB_FILE
    if not path.is_file():
        return
    before, now = json.loads(path.read_text(encoding="utf-8")), json.loads(json.dumps(job))
    if before != now:
        differing = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
        raise ValueError(
            f"{folder} holds another job ({', '.join(differing)} differ). Use another output directory, or remove it."
        )


def _run(folder: Path, spec: SweepSpec) -> str:
    """Run one job; "done", "failed" or "busy"."""
    if is_done(folder):
        drop_checkpoints(folder)
        return "done"
    (folder / ERROR_FILE).unlink(missing_ok=True)
    launchers: dict[str, Callable[[Path, SweepSpec], str | None]] = {
        "inline": _run_inline,
        "process": _run_process,
        "accelerate": _run_process,
    }
    try:
        error = launchers[spec.launcher](folder, spec)
    except JobBusy:
        return "busy"
    if error is None and is_done(folder):
        return "done"
    write_atomically(folder / ERROR_FILE, error or "The job ended without an error and without being done.\n")
    return "failed"


def _run_inline(folder: Path, spec: SweepSpec) -> str | None:
    try:
        run_job(folder)
    except JobBusy:
        raise
    except Exception:
        return traceback.format_exc()
    return None


def _run_process(folder: Path, spec: SweepSpec) -> str | None:
    """In a process of its own, which no other launcher has started one for."""
    try:
        with FileLock(folder / LAUNCHER_LOCK, timeout=0):
            return _run_alone(folder, spec)
    except Timeout:
        raise JobBusy(f"{folder} is being run by another launcher.") from None


def _run_alone(folder: Path, spec: SweepSpec) -> str | None:
    """Output goes to `output.txt`. Only what a killed launcher has left behind may be at the job, and write there."""
    command = [sys.executable, "-m"]
    if spec.launcher == "accelerate":
        command += ["accelerate.commands.launch", *spec.accelerate_args, "-m"]
    with (folder / OUTPUT_FILE).open("ab") as output:
        start = output.tell()
        (folder / BUSY_FILE).unlink(missing_ok=True)
        finished = subprocess.run(
            [*command, "credit_trl.lab.sweeps.job", str(folder)], stdout=output, stderr=subprocess.STDOUT, check=False
        )
    if finished.returncode == 0:
        return None
    if (folder / BUSY_FILE).exists():  # not what the output says: it may quote completions
        (folder / BUSY_FILE).unlink()
        raise JobBusy(str(folder))
    said = (folder / OUTPUT_FILE).read_bytes()[start:].decode(errors="replace")
    return f"Exit code {finished.returncode}. The end of {OUTPUT_FILE}:\n\n{said[-4000:]}\n"
