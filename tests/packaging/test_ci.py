"""`.ci/run` with stand-in programs: installation of missing packages, and failures."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "run"
MAKE = 'echo "make $*" >>"$SAID"'


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Run the script with only these programs on `PATH`; return its exit status and the logged calls."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("bash", "dirname", "chmod", "cp"):
        (programs / name).symlink_to(shutil.which(name))

    def run(**stands_in: str) -> tuple[int, list[str]]:
        said = tmp_path / "said"
        said.touch()
        for name, body in {"id": "echo 0", "python3": "exit 0", **stands_in}.items():
            path = programs / name.replace("_", "-")
            path.write_text(f"#!{shutil.which('bash')}\n{body}\n")
            path.chmod(0o755)
        environment = {"PATH": str(programs), "SAID": str(said), "HOME": os.environ.get("HOME", "/")}
        done = subprocess.run(["bash", str(SCRIPT)], env=environment, capture_output=True, text=True, check=False)
        return done.returncode, [*said.read_text().splitlines(), *done.stderr.splitlines()]

    return run


TARGETS = ["make lint test", "make test-vllm", "make quickstart", "make docs wheel notebooks"]


def test_installs_missing_make_and_venv(machine, tmp_path):
    (tmp_path / "make").write_text(f"#!{shutil.which('bash')}\n{MAKE}\n")
    (tmp_path / "make").chmod(0o755)
    apt = f'echo "apt-get $*" >>"$SAID"; case "$*" in *make*) cp {tmp_path}/make {tmp_path}/bin/make;; esac'
    status, said = machine(apt_get=apt, python3="exit 1")  # a Python without venv
    assert status == 0
    assert said[1] == "apt-get -qq install --no-install-recommends -y make python3-venv"
    optional = "make test-optional"  # of bubblewrap and Chromium, which are now there
    assert [line for line in said if line.startswith("make")] == [TARGETS[0], optional, *TARGETS[1:]]


def test_continues_without_optional_packages(machine):
    status, said = machine(apt_get="exit 1", make=MAKE)
    assert status == 0
    assert said[:4] == TARGETS
    assert [line.split()[0] for line in said[4:]] == ["bubblewrap", "chromium"]


def test_failing_target_ends_the_run(machine):
    status, said = machine(make=f'{MAKE}; [ "$1" != test-vllm ]', bwrap="exit 0", chromium="exit 0")
    assert status != 0
    assert said == TARGETS[:2]
