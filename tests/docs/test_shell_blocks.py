"""Run the documented command lines of other programs, with the options that `substitutions.py` appends.

`make`: targets that `.ci/run` makes are steps of CI; other targets are made here, in a copy of the checkout. `python`:
the script runs with the line's arguments. `accelerate launch`, `sbatch`, and `trl credit` with an accelerate
configuration start their processes; `stand_ins/` replaces Slurm's commands and runs every node's part on this machine.
"""

from __future__ import annotations

import os
import runpy
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from blocks import ROOT, Command, calling
from substitutions import LINES, appended, is_not_run

STAND_INS = Path(__file__).parent / "stand_ins"
STUDY = "examples/study/README.md"
NOT_COPIED = (
    ".git",
    ".venv*",
    "runs",
    "site",
    "dist",
    "build",
    "__pycache__",
    ".*_cache",
    ".hypothesis",
    "*.egg-info",
)


def environment(folder: Path, *before: Path, **variables: str) -> dict[str, str]:
    """Environment of this process, offline, with `trl` and this interpreter's programs first on the path."""
    commands = folder / "bin"
    commands.mkdir(exist_ok=True)
    for name in ("trl", "credit-trl"):
        put(commands / name, f'exec "{sys.executable}" -m credit_trl "$@"')
    put(commands / "python", f'exec "{sys.executable}" "$@"')
    path = [*map(str, before), str(commands), str(Path(sys.executable).parent), os.environ["PATH"]]
    given = {"PATH": os.pathsep.join(path), "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    given |= {"HF_HOME": str(folder / "hub"), "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    return {**os.environ, **given, **variables}


def put(path: Path, body: str) -> None:
    path.write_text(f"#!/usr/bin/env bash\n{body}\n", encoding="utf-8")
    path.chmod(0o755)


def bash(text: str, folder: Path, variables: dict[str, str], timeout: float = 280) -> str:
    """Output of shell lines; fails on a non-zero exit status and kills the process group on a timeout."""
    command = ["bash", "-euo", "pipefail", "-c", text]
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=variables,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, 9)
            process.wait()
    assert process.returncode == 0, f"{text}\n{output[-4000:]}"
    return output


def made_by_ci(folder: Path) -> list[str]:
    """Targets that `.ci/run` makes, in order: it runs with a `make` that only records its arguments."""
    recorded = folder / "made"
    put(folder / "make", f'echo "$@" >>"{recorded}"')
    for installed in ("bwrap", "chromium"):
        put(folder / installed, "exit 0")
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    subprocess.run([ROOT / ".ci" / "run"], env={**os.environ, "PATH": path}, check=True, timeout=60)
    return recorded.read_text("utf-8").split()


# Target that CI does not make → the test that makes it.
IN_A_COPY = {"format": "test_make_format_formats", "test-slow": "test_make_test_slow_collects_the_slow_tests"}


@pytest.mark.parametrize("command", calling("make"), ids=str)
def test_make_targets_run_in_ci_or_in_a_copy(command, tmp_path):
    by_ci = made_by_ci(tmp_path)
    for target in command.words[1:]:
        planned = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert planned.returncode == 0, planned.stderr
        assert (target in by_ci) != (target in IN_A_COPY), f"{command}: neither CI nor a test makes {target}"
        assert target in by_ci or IN_A_COPY[target] in globals()


@pytest.fixture
def checkout(tmp_path) -> Path:
    """Copy of the checkout whose `.venv` links to this environment."""
    copy = tmp_path / "checkout"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*NOT_COPIED))
    (copy / ".venv").mkdir()
    for entry in Path(sys.prefix).iterdir():
        if entry.name != ".installed":
            (copy / ".venv" / entry.name).symlink_to(entry)
    (copy / ".venv" / ".installed").touch()
    return copy


def test_make_format_formats(checkout):
    module = checkout / "src" / "credit_trl" / "rollout" / "verdict.py"
    text = module.read_text("utf-8")
    module.write_text(text.replace(" = ", "="), encoding="utf-8")
    bash("make format", checkout, dict(os.environ))
    assert module.read_text("utf-8") == text
    bash("make lint", checkout, dict(os.environ))


@pytest.mark.slow
def test_make_test_slow_collects_the_slow_tests(checkout):
    """Only collects, because this test is itself slow. The second environment links to this one too."""
    shutil.copytree(checkout / ".venv", checkout / ".venv-optional", symlinks=True)
    os.utime(checkout / ".venv-optional" / ".installed")
    output = bash("make test-slow", checkout, {**os.environ, "PYTEST_ADDOPTS": "--collect-only -q"})
    assert "test_shell_blocks.py::test_make_test_slow_collects_the_slow_tests" in output
    assert "test_triton_rows.py::" in output  # collected by the second environment only


IN_THE_CHECKOUT = [command for command in calling("python") if command.words[1].startswith("notebooks/")]
OF_THE_STUDY = [command for command in calling("python") if command.block.page == STUDY]
SCRIPTS = [c for c in calling("python") if not is_not_run(c) and c not in [*IN_THE_CHECKOUT, *OF_THE_STUDY]]
STEP_MADE = "  seconds rollout "  # printed by a logged step
OTHERWISE = {"credit_dpo.py": "mean margin", "interventional_credit.py": "seed 3, exact"}
LONG = ("credit_dpo.py", "interventional_credit.py", "livecodebench.py")


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, id=str(command), marks=[pytest.mark.slow] if command.words[1].endswith(LONG) else [])
        for command in SCRIPTS
    ],
)
def test_documented_script_lines_run(command, tiny_model, page_folder, monkeypatch, capfd):
    _, script, *arguments = command.words
    monkeypatch.setattr(sys, "argv", [script, *arguments, *appended(command, tiny_model)])
    runpy.run_path(str(ROOT / script), run_name="__main__")
    assert OTHERWISE.get(Path(script).name, STEP_MADE) in capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("command", IN_THE_CHECKOUT, ids=str)
def test_documented_notebook_lines_update_the_notebook(command, checkout, tmp_path):
    output = bash(command.text, checkout, environment(tmp_path))
    assert f"{command.words[2]}.ipynb: " in output


def free_job() -> int:
    """A job number for which the port of the Slurm script is free."""
    for job in range(1000, 9000):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", 20000 + job)):
                return job
    raise OSError("no free port")


def is_launch(command: Command) -> bool:
    return command.program in ("accelerate", "sbatch") or "--accelerate_config" in command.words


LAUNCHES = [command for command in calling("accelerate", "sbatch", "trl") if is_launch(command)]


@pytest.mark.slow
@pytest.mark.parametrize("command", LAUNCHES, ids=str)
def test_documented_launches_train_a_step(command, tiny_model, page_folder, tmp_path):
    variables = environment(tmp_path, STAND_INS, SLURM_JOB_ID=str(free_job()))
    output = bash(" ".join([command.text, *appended(command, tiny_model)]), page_folder, variables)
    if command.program == "sbatch":
        (log,) = (page_folder / "runs").glob("*.log")
        output += log.read_text("utf-8")
    assert STEP_MADE in output
    assert list((page_folder / "run").rglob("model.safetensors"))
    if command.program == "sbatch":
        assert output.count("Training completed.") == 1 + ("--nodes=2" in command.words)  # once per machine


SLURM_SCRIPT = ROOT / "examples" / "slurm" / "credit.sbatch"
# In place of `trl`: a run that saves on SIGTERM, as a checkpoint at the end of the step does.
SAVING_RUN = """
trap 'sleep 0.5; echo "saved by node $SLURM_NODEID"; exit 143' TERM
echo "started node $SLURM_NODEID"
while true; do sleep 0.05; done
"""


def slurm_job(folder: Path, run: str) -> tuple[subprocess.Popen, Path]:
    """A job of two nodes that runs `run` in place of `trl`, and its log."""
    (folder / "programs").mkdir()
    put(folder / "programs" / "trl", run)
    (folder / "recipe.yaml").write_text("per_device_train_batch_size: 2\ngradient_accumulation_steps: 4\n")
    variables = environment(folder, folder / "programs", STAND_INS, SLURM_JOB_ID="7", SLURM_JOB_NAME="credit")
    variables |= {"SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "1", "SLURM_JOB_NODELIST": "node-[1-2]"}
    job = subprocess.Popen(["bash", str(SLURM_SCRIPT), "recipe.yaml"], cwd=folder, env=variables)
    return job, folder / "runs" / "credit-7.log"


def test_slurm_job_saves_and_is_requeued_on_sigterm(tmp_path):
    job, log = slurm_job(tmp_path, SAVING_RUN)
    try:
        while not (log.is_file() and log.read_text().count("started") == 2):
            assert job.poll() is None
            time.sleep(0.05)
        job.terminate()
        job.wait(timeout=60)
    finally:
        job.kill()
    ended = [line for line in log.read_text().splitlines() if line.startswith(("saved", "requeued"))]
    assert ended[-1] == "requeued 7"
    assert sorted(ended[:-1]) == ["saved by node 0", "saved by node 1"]


@pytest.mark.parametrize("status", [0, 3, 75])
def test_slurm_job_is_requeued_for_its_exit_code_alone(tmp_path, status):
    job, log = slurm_job(tmp_path, f"exit {status}")
    assert job.wait(timeout=60) == status
    assert ("requeued" in log.read_text()) == (status == 75)


def test_every_substitution_matches_a_documented_line():
    commands = [*SCRIPTS, *IN_THE_CHECKOUT, *OF_THE_STUDY, *LAUNCHES]
    lines = [" ".join(command.words) for command in commands]
    for beginning in LINES:
        assert any(line.startswith(beginning) for line in lines), beginning
    for command in commands:
        appended(command, "model")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_documented_study_lines_write_its_result_pages(checkout, tmp_path):
    """Runs in a copy, since the lines write into `results/`, with one sample per prompt."""
    from credit_trl.tasks.quickstart_model import SHIPPED

    folder = (checkout / STUDY).parent
    for spec in folder.glob("*.yaml"):
        spec.write_text(spec.read_text("utf-8").replace("  k: 4\n", "  k: 1\n"), encoding="utf-8")
    for world in ("plain", "shortcut", "style", "programs"):
        for seed in (1, 6, 8, 13, 25, 31):  # the first seed of each sweep
            shutil.copytree(SHIPPED, folder / "runs" / "study" / "bases" / f"{world}-seed{seed}")
    shutil.copytree(SHIPPED, folder / "runs" / "study" / "bases" / "weak-seed0")
    pages = [folder / "results" / name for name in ("methods.md", "forms.md", "settled.md", "worlds.md")]
    for page in pages:
        page.unlink(missing_ok=True)
    variables = environment(tmp_path) | {"PYTHONPATH": str(checkout / "src")}
    for command in OF_THE_STUDY:
        bash(" ".join([command.text, *appended(command, "")]), folder, variables, timeout=1200)
    methods, forms, settled, worlds = (page.read_text("utf-8") for page in pages)
    assert "seeds 1." in methods
    assert "### The same after" not in methods  # the longer runs come after the line that writes the page
    sections = ("## At the end of learning", "## A first choice", "## Sources and gates")
    for heading in (*sections, "## The new worlds at the end of learning", "Style world, %", "Programs world, %"):
        assert heading in forms
    assert "offered tool, against SDPO" in settled
    assert "| temper-only, λ = 0.1 | 1 |" in worlds
