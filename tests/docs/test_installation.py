"""Run the documented `pip install` lines in a new environment, from a copy of the checkout, with the package index.

vLLM is replaced by an empty package of the version that pip would select; the other packages of its extra are
installed. `make test-vllm` installs and runs vLLM's CPU build.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import venv
import zipfile
from importlib.metadata import requires
from pathlib import Path

import pytest
from blocks import BLOCKS, INSTALLING, ROOT
from packaging.requirements import Requirement
from test_shell_blocks import NOT_COPIED, bash

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def new_user(tmp_path_factory) -> tuple[Path, dict[str, str]]:
    """A copy of the checkout, and the variables of a shell with a new environment."""
    folder = tmp_path_factory.mktemp("new_user")
    checkout = shutil.copytree(ROOT, folder / "checkout", ignore=shutil.ignore_patterns(*NOT_COPIED))
    venv.create(folder / "venv", with_pip=True, symlinks=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    path = os.pathsep.join([str(folder / "venv" / "bin"), os.environ["PATH"]])
    active = {"PATH": path, "VIRTUAL_ENV": str(folder / "venv"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    reached = subprocess.run(
        ["pip", "download", "-q", "--no-deps", "-d", str(folder), "jaxtyping"], env={**kept, **active}, timeout=120
    )
    if reached.returncode:
        pytest.skip("no package index is reachable")
    return checkout, {**kept, **active}


def newest_vllm(folder: Path) -> Path:
    """Write an empty wheel `vllm` of the newest version that TRL allows, which pip prefers to the index's."""
    wanted = next(r for r in map(Requirement, requires("trl")) if r.name == "vllm")
    newest = next(one.version for one in wanted.specifier if one.operator == "<=")
    info = f"vllm-{newest}+empty.dist-info"
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {newest}+empty\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(folder / f"vllm-{newest}+empty-py3-none-any.whl", "w") as wheel:
        for name, text in files.items():
            wheel.writestr(f"{info}/{name}", text)
        wheel.writestr(f"{info}/RECORD", "".join(f"{info}/{name},,\n" for name in [*files, "RECORD"]))
    return folder


def test_documented_installation_runs_unchanged(new_user, tmp_path):
    """Blocks run in one environment, the quickstart first: extras add to it, and it brings the CPU build of torch."""
    checkout, variables = new_user
    links = f"{os.environ.get('PIP_FIND_LINKS', '')} {newest_vllm(tmp_path)}"
    outputs = {}
    for block in sorted(INSTALLING, key=lambda block: block.page != "docs/quickstart.md"):
        outputs[block.page] = bash(block.text, checkout, {**variables, "PIP_FIND_LINKS": links}, timeout=600)
    compare_with_readme(outputs["docs/quickstart.md"])
    assert "docs/first_node.md" in outputs
    bash("pip show vllm && python -c 'import credit_trl.rollout.vllm_client'", checkout, variables)


def compare_with_readme(output: str) -> None:
    """Compare the figures in the README, in percent and nats, with those of a run."""
    (shown,) = (block.text for block in BLOCKS if block.text.startswith("held-out avg@4"))
    for line in filter(str.strip, shown.splitlines()[1:]):
        name = re.match(r"\s*([a-z_ ()]+?)\s{2,}", line)
        if name is None:
            continue
        (printed,) = re.findall(rf"^\s*{re.escape(name[1])}\s{{2,}}.*", output, flags=re.MULTILINE)
        theirs, ours = ([float(x) for x in re.findall(r"-?\d+\.\d+", text)] for text in (line, printed))
        assert ours[0] == pytest.approx(theirs[0], abs=0.5)  # before training: the shipped model
        assert ours[1] == pytest.approx(theirs[1], abs=8.0)  # after training: rounding depends on the machine
