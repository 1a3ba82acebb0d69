"""A failed run of several processes returns a non-zero exit code and prints the cause in its last line."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from credit_trl.cli.preemption import REQUEUE
from tables import tables_of

TABLES = tables_of(__file__)

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
TRL = ["-m", "credit_trl", "credit"]
TWO = "--num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no".split()
RUN = TABLES["run"].split()


@pytest.fixture
def run(tmp_path):
    (tmp_path / "tasks.py").write_text(TABLES["tasks"])

    def start(*arguments, timeout=1000):
        command = [sys.executable, *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=timeout, check=False
        )

    return start


@pytest.mark.slow
@pytest.mark.parametrize(("task", "code", "reason"), TABLES["failures"])
def test_last_line_is_the_cause_of_the_failed_process(run, task, code, reason):
    failed = run(*TRL, *TWO, "--task", f"tasks:{task}", *RUN)
    assert failed.returncode == code, failed.stderr[-3000:]
    last_line = failed.stderr.splitlines()[-1]
    assert last_line.startswith("trl credit: error: process ")
    assert reason in last_line
    assert ("Traceback" in failed.stderr) == (task != "Unasked")  # tracebacks of the other processes


# Options of accelerate's launcher for two processes on a CPU, where it wraps the model as DDP instead of FSDP2.
FSDP2 = ["--config_file", str(ROOT / "examples/accelerate/fsdp2_8gpu.yaml"), *TWO[:2], "--mixed_precision", "no"]
LAUNCHERS = {
    "trl credit": [*TRL, *TWO],
    "accelerate launch": ["-m", "accelerate.commands.launch", *FSDP2, "-m", "credit_trl.cli.training"],
}


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_two_processes_train_on_a_cpu_and_say_how_they_wrap(run, launcher):
    trained = run(*LAUNCHERS[launcher], "--task", "tasks:Asked", *RUN)
    assert trained.returncode == 0, trained.stderr[-3000:]
    assert trained.stdout.splitlines()[0] == "trl credit: tasks:Asked on 2 x cpu (DDP), output in run"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("processes", [[], TWO], ids=["one", "two"])
def test_sigterm_to_the_command_ends_it_with_a_checkpoint(run, tmp_path, processes):
    line = ["--task", "tasks:Asked", *RUN, "--avg_at_k", "1", "--max_eval_rows", "4", "--avg_at_k_steps", "1"]
    line += ["--max_steps", "6", "--save_strategy", "steps", "--save_steps", "100", "--disable_tqdm", "true"]
    line += ["--logging_steps", "1", "--resume_from_checkpoint", "latest"]

    def last_logged():
        path = tmp_path / "run" / "log.jsonl"
        rows = [json.loads(row) for row in path.read_text().splitlines()] if path.exists() else []
        return [row for row in rows if "loss" in row]

    command = [sys.executable, *TRL, *processes, *line]
    with open(tmp_path / "out", "w") as out:
        job = subprocess.Popen(command, cwd=tmp_path, env=ENVIRONMENT, stdout=out, stderr=out)
    try:
        while len(last_logged()) < 2:
            assert job.poll() is None, (tmp_path / "out").read_text()[-3000:]
            time.sleep(0.05)
        job.terminate()
        assert job.wait() == REQUEUE, (tmp_path / "out").read_text()[-3000:]
    finally:
        job.kill()
    assert "error: " not in (tmp_path / "out").read_text()
    [saved] = (tmp_path / "run").glob("checkpoint-*")
    assert int(saved.name.split("-")[1]) == len(last_logged())
    assert run(*TRL, *processes, *line).returncode == 0
    assert [row["step"] for row in last_logged()] == [1, 2, 3, 4, 5, 6]
