"""Sweeps that are killed, fail or share a directory end with the same files as an uninterrupted sweep."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from filelock import FileLock

from credit_trl import Verdict
from credit_trl.cli import credit_sweep
from credit_trl.lab.sweeps import SweepSpec, launch, run_sweep
from credit_trl.lab.sweeps.job import DONE_FILE, LOCK_FILE, complete_checkpoints, finish, is_done
from credit_trl.lab.sweeps.launch import ERROR_FILE
from credit_trl.training.run_directory import append_lines, read_lines, write_json

CONFIG = {
    "use_cpu": True,
    "bf16": False,
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 5,
    "max_steps": 4,
    "learning_rate": 1e-2,
    "save_steps": 2,
    "gradient_checkpointing": False,
    "disable_tqdm": True,
}


class SumTask:
    """A task that is loaded by its import path."""

    fail_in: str | None = None

    def build(self, split, path=None):
        from datasets import Dataset

        rows = [
            {"prompt": [{"role": "user", "content": f"{a}+{b}="}], "answer": str(a + b), "id": f"{a}+{b}"}
            for a in range(3)
            for b in range(2)
        ]
        return Dataset.from_list(rows)

    def verify(self, response, answer, *, truncated=False):
        if SumTask.fail_in == "verify":
            raise RuntimeError("the verifier broke")
        return Verdict(float(len(response) % 2), f"The answer is {answer}.")


@pytest.fixture
def spec(make_model, tokenizer, tmp_path, monkeypatch) -> SweepSpec:
    model = tmp_path / "model"
    make_model().save_pretrained(model)
    tokenizer.save_pretrained(model)
    monkeypatch.setitem(sys.modules, "sweep_task", sys.modules[__name__])
    return SweepSpec(
        model=str(model),
        task="sweep_task:SumTask",
        grid=[{"method": ["GRPO", "CREDIT"]}],
        seeds=[1],
        config=CONFIG,
        evaluation={"k": 2, "eval_steps": 2, "max_prompts": 3, "keep_best": False},
        launcher="inline",
    )


TIMES = ("seconds", "time", "per_second", "runtime")


def results(root: Path) -> dict[str, object]:
    """All result files of a sweep without times, and without those of attempts that saved no checkpoint."""
    found: dict[str, object] = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if "/previous-" in name:
            continue
        if path.name in ("samples.jsonl", "result.json", "evaluations.jsonl", "summary.json", "done.json", "job.json"):
            found[name] = path.read_bytes().replace(str(root).encode(), b"ROOT")
        elif path.name == "log.jsonl":
            rows = [row for row in read_lines(path) if "train_runtime" not in row]
            found[name] = [{k: v for k, v in row.items() if not any(t in k for t in TIMES)} for row in rows]
    return found


@pytest.fixture
def uninterrupted(spec, tmp_path) -> Path:
    report = run_sweep(spec, tmp_path / "whole", progress=False)
    assert len(report.done) == 2
    return tmp_path / "whole"


def in_a_child(function, *args):
    child = multiprocessing.get_context("fork").Process(target=function, args=args)
    child.start()
    return child


def killed_at(spec, root, moment):
    """Run a sweep in a process that is killed when it calls a function once more than a number of calls."""
    import credit_trl.evaluation.samples as samples
    import credit_trl.lab.sweeps.job as job
    from credit_trl.trainer import CreditTrainer

    owner, name, calls = {
        "evaluation": (samples.SampleFile, "append", 1),
        "checkpoint": (CreditTrainer, "_save_optimizer_and_scheduler", 0),
        "rollout": (CreditTrainer, "_generate", 1),
        "update": (CreditTrainer, "training_step", 1),
        "finish": (job, "finish", 0),
    }[moment]
    original = getattr(owner, name)
    count = 0

    def counted(*args, **kwargs):
        nonlocal count
        count += 1
        if count > calls:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(owner, name, counted)
    run_sweep(spec, root, progress=False)


def test_a_killed_sweep_ends_with_the_files_of_a_whole_one(spec, uninterrupted, tmp_path):
    root = tmp_path / "killed"
    for moment in ("evaluation", "checkpoint", "rollout", "update", "finish") * 2:
        child = in_a_child(killed_at, spec, root, moment)
        child.join(120)
        assert child.exitcode == -signal.SIGKILL, moment
    report = run_sweep(spec, root, progress=False)
    assert len(report.done) == 2
    assert results(root) == results(uninterrupted)
    samples = [tuple(sorted(row.items(), key=str)) for row in read_lines(next(root.rglob("samples.jsonl")))]
    assert len({str(s) for s in samples}) == len(samples)


def test_a_finished_sweep_trains_nothing_again(spec, uninterrupted, monkeypatch):
    before = {path: path.stat().st_mtime_ns for path in uninterrupted.rglob("*.json*")}
    monkeypatch.setattr("credit_trl.lab.sweeps.launch.run_job", lambda folder: pytest.fail("a finished job was run"))
    assert len(run_sweep(spec, uninterrupted, progress=False).done) == 2
    after = {path: path.stat().st_mtime_ns for path in uninterrupted.rglob("*.json*")}
    assert all(before[path] == time_ns for path, time_ns in after.items())
    assert not list(uninterrupted.rglob("checkpoint-*"))


def test_arms_with_one_base_share_its_evaluation(spec, tmp_path, monkeypatch):
    from credit_trl.evaluation.trainer_engine import TrainerEngine

    sizes = []
    generate = TrainerEngine.generate
    monkeypatch.setattr(TrainerEngine, "generate", lambda self, r, s: (sizes.append(len(r)), generate(self, r, s))[1])
    run_sweep(spec, tmp_path / "out", progress=False)
    assert sum(sizes) == 6 * (1 + 2 * 2)  # one of the base, then two of each of two arms
    first, second = (path.read_bytes() for path in (tmp_path / "out").rglob("step-000000/samples.jsonl"))
    assert first == second


def test_a_failed_job_leaves_its_error_and_the_others_run(spec, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(SumTask, "fail_in", "verify")
    first = run_sweep(spec, tmp_path / "out", progress=False)
    assert len(first.failed) == 2
    assert "the verifier broke" in (first.failed[0] / ERROR_FILE).read_text()
    assert "2 failed" in str(first)
    monkeypatch.setattr(SumTask, "fail_in", None)
    again = run_sweep(spec, tmp_path / "out", progress=False)
    assert len(again.done) == 2
    assert not list((tmp_path / "out").rglob(ERROR_FILE))


def hold(path, held, released):
    with FileLock(path):
        held.set()
        time.sleep(1.5)
        released.set()


def hold_until_killed(path, held):
    with FileLock(path):
        held.set()
        time.sleep(600)


def test_a_job_of_another_launcher_is_retried_until_it_is_free(spec, tmp_path, monkeypatch):
    monkeypatch.setattr("credit_trl.lab.sweeps.launch._POLL_SECONDS", 0.3)
    one = SweepSpec(**{**vars(spec), "grid": {"method": "SDPO"}})
    folder = tmp_path / "out" / "sdpo" / "seed-1"
    folder.mkdir(parents=True)
    held, released = (multiprocessing.get_context("fork").Event() for _ in range(2))
    other = in_a_child(hold, folder / LOCK_FILE, held, released)
    assert held.wait(30)
    report = run_sweep(one, tmp_path / "out", progress=False)
    assert report.done == [folder]
    assert str(report) == "1 job done, 0 failed"
    assert released.is_set()
    other.join(10)


def test_a_job_that_fails_while_another_launcher_waits_is_failed(spec, tmp_path, monkeypatch):
    """The waiting launcher starts no process, so its result does not change the outcome of the first launcher."""
    one = SweepSpec(**{**vars(spec), "grid": {"method": "SDPO"}, "launcher": "process"})
    (folder,) = launch.plan_sweep(one, tmp_path / "out")
    outcomes = []

    def child(command, stdout, **options):
        if not outcomes:  # another launcher tries the job while its process runs
            outcomes.append("started")
            outcomes.append(launch._run_or_resume(folder, one))
        stdout.write(b"ValueError: the real failure\n")
        stdout.flush()
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(launch.subprocess, "run", child)
    assert launch._run_or_resume(folder, one) == "failed"
    assert outcomes == ["started", "busy"]
    assert "the real failure" in (folder / ERROR_FILE).read_text()


def test_a_process_whose_job_is_locked_reports_busy(spec, tmp_path):
    one = SweepSpec(**{**vars(spec), "grid": {"method": "SDPO"}, "launcher": "process"})
    (folder,) = launch.plan_sweep(one, tmp_path / "out")
    held = multiprocessing.get_context("fork").Event()
    other = in_a_child(hold_until_killed, folder / LOCK_FILE, held)
    try:
        assert held.wait(30)
        assert launch._run_or_resume(folder, one) == "busy"
    finally:
        other.kill()
        other.join(10)
    assert not (folder / ERROR_FILE).exists()


def test_a_failed_job_whose_output_quotes_job_busy_is_failed(spec, tmp_path, monkeypatch):
    one = SweepSpec(**{**vars(spec), "grid": {"method": "SDPO"}, "launcher": "process"})
    (folder,) = launch.plan_sweep(one, tmp_path / "out")

    def child(command, stdout, **options):
        stdout.write(b"completion: credit_trl.lab.sweeps.job.JobBusy: ha\nRuntimeError: CUDA error\n")
        stdout.flush()
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(launch.subprocess, "run", child)
    assert launch._run_or_resume(folder, one) == "failed"
    assert "CUDA error" in (folder / ERROR_FILE).read_text()


def test_output_of_a_process_has_no_warning_of_a_dependency(spec, tmp_path):
    config = CONFIG | {"max_steps": 1, "save_steps": 1}
    own = {"model": "quickstart", "task": "quickstart", "config": config, "data": {"max_train_rows": 8}}
    one = SweepSpec(**{**vars(spec), **own, "grid": {"method": "SDPO"}, "launcher": "process"})
    (folder,) = launch.plan_sweep(one, tmp_path / "out")
    assert launch._run_or_resume(folder, one) == "done"
    output = (folder / launch.OUTPUT_FILE).read_text()
    assert "step 1/1" in output
    assert "FutureWarning" not in output


def test_numbers_among_accelerates_arguments_are_text(spec, tmp_path, monkeypatch):
    options = {"grid": {"method": "SDPO"}, "launcher": "accelerate", "accelerate_args": ["--num_processes", 2]}
    one = SweepSpec(**{**vars(spec), **options})
    (folder,) = launch.plan_sweep(one, tmp_path / "out")
    commands = []
    run = lambda command, **_: commands.append(command) or subprocess.CompletedProcess(command, 0)  # noqa: E731
    monkeypatch.setattr(launch.subprocess, "run", run)
    assert launch._run_process(folder, one) is None
    assert commands[0][3:6] == ["--num_processes", "2", "-m"]


def test_partly_written_checkpoints_are_skipped(tmp_path):
    def checkpoint(step, state=True, trainer_state=True):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        if trainer_state:
            (folder / "trainer_state.json").write_text(json.dumps({"global_step": step, "max_steps": 20}))
        if state:
            (folder / "credit_state.json").write_text(json.dumps({"step": step, "inside_generation_batch": False}))

    def found():
        return [(Path(one.path).name, one.step, one.is_last) for one in complete_checkpoints(tmp_path)]

    assert found() == []
    checkpoint(9)
    checkpoint(20)
    checkpoint(18, state=False)
    checkpoint(16, trainer_state=False)
    (tmp_path / "checkpoint-old").mkdir()
    assert found() == [("checkpoint-20", 20, True), ("checkpoint-9", 9, False)]
    (tmp_path / "checkpoint-20" / "credit_state.json").write_text('{"step": 2')
    assert found() == [("checkpoint-9", 9, False)]


def test_finish_writes_best_and_final_and_can_keep_checkpoints(tmp_path):
    (tmp_path / "checkpoint-4").mkdir()
    write_json(tmp_path / "job.json", {"keep_checkpoints": True})
    for step, score in ((0, 0.1), (2, 0.5), (4, 0.3)):
        append_lines(tmp_path / "evaluations.jsonl", {"step": step, "score": score})
    with pytest.raises(ValueError, match="Step 5 was not evaluated"):  # an earlier evaluation is not the final one
        finish(tmp_path, 5)
    assert not is_done(tmp_path)
    finish(tmp_path, 4)
    assert is_done(tmp_path)
    assert (tmp_path / "checkpoint-4").is_dir()
    write_json(tmp_path / "job.json", {"keep_checkpoints": False})
    finish(tmp_path, 4)
    assert not (tmp_path / "checkpoint-4").exists()
    scores = json.loads((tmp_path / DONE_FILE).read_text())
    assert (scores["best_during_training"]["step"], scores["final"]["step"]) == (2, 4)


def test_a_job_killed_while_removing_checkpoints_is_done(spec, tmp_path, monkeypatch):
    import credit_trl.lab.sweeps.job as job

    one = SweepSpec(**{**vars(spec), "grid": {"method": "SDPO"}})
    folder = tmp_path / "out" / "sdpo" / "seed-1"

    class Killed(BaseException):
        pass

    def killed(folder):
        shutil.rmtree(max(folder.glob("checkpoint-*")))
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(job, "drop_checkpoints", killed)
        with pytest.raises(Killed):
            run_sweep(one, tmp_path / "out", progress=False)
    log = (folder / "log.jsonl").read_bytes()
    assert run_sweep(one, tmp_path / "out", progress=False).done == [folder]
    assert (folder / "log.jsonl").read_bytes() == log
    assert not list(folder.glob("checkpoint-*"))


def test_a_base_evaluation_of_another_launcher_is_not_replaced(tmp_path, monkeypatch):
    from credit_trl.lab.sweeps import launch

    described = {"model": "m", "task": "t", "data": {}, "evaluation": {}}
    mine, theirs = (tmp_path / name for name in ("mine", "theirs"))
    for folder in (mine, theirs):
        write_json(folder / "job.json", described)
    write_json(theirs / launch.BASE_EVALUATION / "result.json", {})
    copytree = shutil.copytree

    def meanwhile(*args, **options):
        write_json(mine / launch.BASE_EVALUATION / "settings.json", {"started": True})
        return copytree(*args, **options)

    def restarted(*args, **options):
        raise shutil.Error([(str(theirs), "the run of this job was set aside", "No such file")])

    monkeypatch.setattr(launch.shutil, "copytree", restarted)
    launch.share_base_evaluation(mine, [mine, theirs])
    assert not list((mine / "evaluations").iterdir())
    monkeypatch.setattr(launch.shutil, "copytree", meanwhile)
    launch.share_base_evaluation(mine, [mine, theirs])
    assert [path.name for path in (mine / "evaluations").iterdir()] == ["step-000000"]
    assert [path.name for path in (mine / launch.BASE_EVALUATION).iterdir()] == ["settings.json"]


def test_command_plans_runs_and_reports(spec, tmp_path, capsys):
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml.safe_dump({k: v for k, v in vars(spec).items() if k != "accelerate_args"}))
    parser = argparse.ArgumentParser()
    credit_sweep.add_arguments(parser)
    arguments = [str(path), "--output_dir", str(tmp_path / "out")]
    assert credit_sweep.run(parser.parse_args([*arguments, "--dry_run"])) == 0
    assert capsys.readouterr().out.count("missing") == 2
    assert not (tmp_path / "out").exists()  # the spec may still change after a dry run
    assert credit_sweep.run(parser.parse_args(arguments)) == 0
    assert "2 jobs done" in capsys.readouterr().out
    assert (tmp_path / "out" / "report" / "report.html").is_file()
    path.write_text("model: m")
    with pytest.raises(ValueError, match=r"sweep\.yaml"):
        credit_sweep.run(parser.parse_args(arguments))


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["process", "accelerate"])
def test_jobs_in_separate_processes_write_the_same_files(spec, uninterrupted, tmp_path, launcher, monkeypatch):
    shutil.copy(__file__, tmp_path / "sweep_task.py")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    options = ["--cpu", "--num_processes", "1", "--num_machines", "1", "--mixed_precision", "no"]
    other = SweepSpec(**{**vars(spec), "launcher": launcher, "accelerate_args": options})
    report = run_sweep(other, tmp_path / "apart", progress=False)
    assert len(report.done) == 2, report
    assert results(tmp_path / "apart") == results(uninterrupted)
