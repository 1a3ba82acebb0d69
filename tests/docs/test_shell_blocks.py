"""Command lines of other programs, and launches, as the pages give them: bash runs them, with what `substitutions.py`
appends.

`make`: what `.ci/run` makes is CI's own step; any other target is made here, in a copy of the checkout. `python`: the
script runs with the line's arguments. `accelerate launch`, `sbatch`, and `trl credit` with an accelerate configuration
start their processes; Slurm's commands are those of `stand_ins/`, which run every node's part on this machine.
"""

from __future__ import annotations

import os
import runpy
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from blocks import ROOT, Command, calling
from substitutions import LINES, appended, is_left

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
    """This process's, offline, with `trl` and this interpreter's programs first on the path."""
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
    """What the lines print; whatever they started has ended with them."""
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
        said, _ = process.communicate(timeout=timeout)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, 9)
            process.wait()
    assert process.returncode == 0, f"{text}\n{said[-4000:]}"
    return said


def made_by_ci(folder: Path) -> list[str]:
    """The targets of `.ci/run` in its order: it runs, with a `make` that only notes what it is asked for."""
    noted = folder / "made"
    put(folder / "make", f'echo "$@" >>"{noted}"')
    for installed in ("bwrap", "chromium"):
        put(folder / installed, "exit 0")
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    subprocess.run([ROOT / ".ci" / "run"], env={**os.environ, "PATH": path}, check=True, timeout=60)
    return noted.read_text("utf-8").split()


# What CI does not make, and the test below that makes it.
IN_A_COPY = {"format": "test_make_format_formats", "test-slow": "test_make_test_slow_collects_the_slow_tests"}


@pytest.mark.parametrize("command", calling("make"), ids=str)
def test_make_targets_are_steps_of_ci_or_run_in_a_copy(command, tmp_path):
    by_ci = made_by_ci(tmp_path)
    for target in command.words[1:]:
        planned = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert planned.returncode == 0, planned.stderr
        assert (target in by_ci) != (target in IN_A_COPY), f"{command}: nothing makes {target}"
        assert target in by_ci or IN_A_COPY[target] in globals()


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A copy of the checkout, whose `.venv` is this environment."""
    copy = tmp_path / "checkout"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*NOT_COPIED))
    (copy / ".venv").mkdir()
    for entry in Path(sys.prefix).iterdir():
        if entry.name != ".installed":
            (copy / ".venv" / entry.name).symlink_to(entry)
    (copy / ".venv" / ".installed").touch()
    return copy


def test_make_format_formats(checkout):
    module = checkout / "src" / "credit_trl" / "verdict.py"
    text = module.read_text("utf-8")
    module.write_text(text.replace(" = ", "="), encoding="utf-8")
    bash("make format", checkout, dict(os.environ))
    assert module.read_text("utf-8") == text
    bash("make lint", checkout, dict(os.environ))


@pytest.mark.slow
def test_make_test_slow_collects_the_slow_tests(checkout):
    """It is the tier that this test is of: it collects, and does not run. Its second environment is this one too."""
    shutil.copytree(checkout / ".venv", checkout / ".venv-optional", symlinks=True)
    os.utime(checkout / ".venv-optional" / ".installed")
    said = bash("make test-slow", checkout, {**os.environ, "PYTEST_ADDOPTS": "--collect-only -q"})
    assert "test_shell_blocks.py::test_make_test_slow_collects_the_slow_tests" in said
    assert "test_triton_rows.py::" in said  # of the second environment alone


IN_THE_CHECKOUT = [command for command in calling("python") if command.words[1].startswith("notebooks/")]
OF_THE_STUDY = [command for command in calling("python") if command.block.page == STUDY]
SCRIPTS = [c for c in calling("python") if not is_left(c) and c not in [*IN_THE_CHECKOUT, *OF_THE_STUDY]]
STEP_MADE = "credit/distillation_loss"  # of a logged step
OTHERWISE = {"credit_dpo.py": "mean margin", "interventional_credit.py": "seed 3, exact"}
LONG = ("credit_dpo.py", "interventional_credit.py", "livecodebench.py")


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, id=str(command), marks=[pytest.mark.slow] if command.words[1].endswith(LONG) else [])
        for command in SCRIPTS
    ],
)
def test_scripts_run_from_the_line_that_their_page_gives(command, tiny_model, page_folder, monkeypatch, capfd):
    _, script, *arguments = command.words
    monkeypatch.setattr(sys, "argv", [script, *arguments, *appended(command, tiny_model)])
    runpy.run_path(str(ROOT / script), run_name="__main__")
    assert OTHERWISE.get(Path(script).name, STEP_MADE) in capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("command", IN_THE_CHECKOUT, ids=str)
def test_a_notebook_is_written_anew_by_the_line_of_its_page(command, checkout, tmp_path):
    said = bash(command.text, checkout, environment(tmp_path))
    assert f"{command.words[2]}.ipynb: " in said


def free_job() -> int:
    """A job number whose port, as the Slurm script takes it, is free."""
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
def test_launches_train_a_step(command, tiny_model, page_folder, tmp_path):
    (page_folder / "examples").symlink_to(ROOT / "examples")
    variables = environment(tmp_path, STAND_INS, SLURM_JOB_ID=str(free_job()))
    said = bash(" ".join([command.text, *appended(command, tiny_model)]), page_folder, variables)
    assert STEP_MADE in said
    assert list((page_folder / "run").rglob("model.safetensors"))
    if command.program == "sbatch":
        assert said.count("Training completed.") == 2  # each of the two machines has a first process


def test_every_rule_of_the_table_is_of_a_line():
    commands = [*SCRIPTS, *IN_THE_CHECKOUT, *OF_THE_STUDY, *LAUNCHES]
    lines = [" ".join(command.words) for command in commands]
    for beginning in LINES:
        assert any(line.startswith(beginning) for line in lines), beginning
    for command in commands:
        appended(command, "model")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_studys_lines_run_one_after_the_other_and_write_its_pages(checkout, tmp_path):
    """In a copy, since they write into `docs/`, with one sample a prompt."""
    from credit_trl.tasks.quickstart_model import SHIPPED

    folder = (checkout / STUDY).parent
    for spec in folder.glob("*.yaml"):
        spec.write_text(spec.read_text("utf-8").replace("  k: 4\n", "  k: 1\n"), encoding="utf-8")
    for world in ("plain", "shortcut", "style", "programs"):
        for seed in (1, 6, 8, 13, 25, 31):  # the first of each sweep's
            shutil.copytree(SHIPPED, folder / "runs" / "study" / "bases" / f"{world}-seed{seed}")
    written = [checkout / "docs" / name for name in ("study.md", "forms_study.md", "settled_study.md")]
    for page in written:
        page.unlink()
    variables = environment(tmp_path) | {"PYTHONPATH": str(checkout / "src")}
    for command in OF_THE_STUDY:
        bash(" ".join([command.text, *appended(command, "")]), folder, variables, timeout=1200)
    study, forms, settled = (page.read_text("utf-8") for page in written)
    assert "seeds 1." in study
    assert "### The same after" not in study  # the longer runs come after the line that writes the page
    sections = ("## At the end of learning", "## A first choice", "## Sources and gates")
    for heading in (*sections, "## The new worlds at the end of learning", "Style world, %", "Programs world, %"):
        assert heading in forms
    assert "relabelled, against SDPO" in settled
