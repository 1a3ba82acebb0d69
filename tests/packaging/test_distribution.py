"""Contents of wheel and sdist, and use of the wheel in a new environment.

The environment contains only the wheel. A path to this environment's packages, behind its own, provides the
dependencies, so that torch is not installed again. The tests assert that `credit_trl` comes from the wheel.
"""

import json
import os
import re
import resource
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

from notebook_outputs import FOLDER, NAMES, differences

ROOT = Path(__file__).parents[2]

pytest.importorskip("build", reason="needs build and hatchling: pip install 'credit-trl[dev]'")
nbformat = pytest.importorskip("nbformat", reason="needs nbclient: pip install 'credit-trl[dev]'")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder)]
    build = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800, check=False)
    assert build.returncode == 0, build.stdout + build.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(built):
    (path,) = built.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def in_wheel(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def in_sdist(built):
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        files = [member for member in archive.getmembers() if member.isfile()]
        return {member.name.partition("/")[2]: archive.extractfile(member).read() for member in files}


def tracked(*folders: str) -> set[str]:
    """Files of the repository below these folders; in an unpacked sdist, which has no repository, all files."""
    if (ROOT / ".git").exists():
        command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *folders]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
        return {name for name in listed if (ROOT / name).is_file()}
    files = (path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file())
    return {str(path.relative_to(ROOT)) for path in files if "__pycache__" not in path.parts}


def test_wheel_contains_the_package_and_its_recipes(in_wheel):
    expected = {name.removeprefix("src/") for name in tracked("src/credit_trl")}
    shipped = tracked("examples/recipes", "examples/accelerate")
    expected |= {name.replace("examples/", "credit_trl/", 1) for name in shipped}
    assert {name for name in in_wheel if ".dist-info/" not in name} == expected
    recipe = "livecodebench_qwen3_8b.yaml"
    assert in_wheel[f"credit_trl/recipes/{recipe}"] == (ROOT / "examples" / "recipes" / recipe).read_bytes()
    for name in tracked("src/credit_trl"):
        assert in_wheel[name.removeprefix("src/")] == (ROOT / name).read_bytes(), name


def test_wheel_metadata_has_commands_license_requirements(in_wheel):
    (entry_points,) = (text.decode() for name, text in in_wheel.items() if name.endswith("entry_points.txt"))
    assert "trl = credit_trl.cli:main" in entry_points
    assert "credit-trl = credit_trl.cli:main" in entry_points
    (metadata,) = (text.decode() for name, text in in_wheel.items() if name.endswith("/METADATA"))
    needed = re.findall(r"^Requires-Dist: ([\w-]+)(?!.*extra ==)", metadata, re.MULTILINE)
    assert {"torch", "trl", "transformers", "accelerate", "datasets", "peft"} <= set(needed)
    assert any(name.endswith("licenses/LICENSE") for name in in_wheel)


def test_sdist_contains_sources_tests_and_docs(in_sdist):
    folders = ("src", "tests", "examples", "notebooks", "docs", "benchmarks", ".ci")
    assert tracked(*folders) <= in_sdist.keys()
    assert {"pyproject.toml", "README.md", "LICENSE", "Makefile", "constraints.txt", "CITATION.cff"} <= in_sdist.keys()
    strays = [name for name in in_sdist if name.startswith(("runs/", "site/", ".venv", "dist/", ".hypothesis/"))]
    assert strays == []


def install(folder: Path, command: str, *wheels: Path) -> Path:
    """Programs of an environment with these wheels, installed by a command each."""
    if not folder.exists():
        venv.create(folder, with_pip=False, symlinks=True)
    place = dict.fromkeys(["PIP_PYTHON", "UV_PYTHON"], str(folder / "bin" / "python"))
    for wheel in wheels:
        words = [sys.executable, "-m", *command.split(), str(wheel)]
        subprocess.run(words, check=True, timeout=800, capture_output=True, env=os.environ | place)
    (site_packages,) = (folder / "lib").glob("python3.*/site-packages")
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


@pytest.fixture(scope="module")
def clean(wheel, tmp_path_factory):
    return install(tmp_path_factory.mktemp("clean") / "venv", "pip install --no-deps --no-index --no-compile", wheel)


def run(program: Path, *argv: str, cwd: Path, code: int = 0, timeout: float = 1000) -> str:
    """Output of a program of the new environment, run outside the checkout."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PATH": f"{program.parent}:{os.environ['PATH']}"}
    ran = subprocess.run(
        [str(program), *argv], cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert ran.returncode == code, ran.stdout[-2000:] + ran.stderr[-3000:]
    return ran.stdout + ran.stderr


@pytest.fixture(scope="module")
def wheel_of_trl(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trl")
    download = [sys.executable, "-m", "pip", "download", "--no-deps", "-d", str(folder), f"trl=={version('trl')}"]
    if subprocess.run(download, capture_output=True, timeout=800, check=False).returncode:
        pytest.skip("no index has TRL's wheel")
    return next(folder.glob("*.whl"))


@pytest.mark.slow
@pytest.mark.timeout(1100)
@pytest.mark.parametrize("is_first", [True, False], ids=["ours first", "TRL first"])
@pytest.mark.parametrize("installer", ["pip", "uv pip"])
def test_version_says_whose_trl_stands_on_the_path(installer, is_first, wheel, wheel_of_trl, tmp_path):
    if installer == "uv pip":
        pytest.importorskip("uv", reason="needs uv: pip install uv")
    wheels = [wheel, wheel_of_trl] if is_first else [wheel_of_trl, wheel]
    bin_folder = install(tmp_path / "venv", f"{installer} install --no-deps", *wheels)

    def is_ours() -> bool:
        says = "is of credit-trl" in run(bin_folder / "credit-trl", "--version", cwd=tmp_path)
        run(bin_folder / "trl", "credit-init", "--help", cwd=tmp_path, code=0 if says else 2)
        return says

    assert is_ours() is not is_first  # the script of the later one
    advice = (ROOT / "README.md").read_text("utf-8").partition("stands on the path")[2]
    repair = re.search(rf"`({installer} install [^`]*) -e \.`", advice)
    install(tmp_path / "venv", repair[1], wheel)
    assert is_ours()


@pytest.mark.slow
@pytest.mark.timeout(1100)
def test_quickstart_runs_from_the_wheel(clean, tmp_path):
    output = run(clean / "credit-trl", "credit-quickstart", "--steps", "3", cwd=tmp_path)
    assert re.search(r"unknown cues +\d+\.\d -> +\d+\.\d", output)
    assert (tmp_path / "runs" / "quickstart" / "report.html").is_file()
    where = run(clean / "python", "-c", "import credit_trl; print(credit_trl.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(clean.parent)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_first_run_needs_four_commands(clean, tmp_path):
    """Written, trained and opened within ten minutes of a processor, and better after training than before."""
    started = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    run(clean / "trl", "credit-init", "first", cwd=tmp_path)
    run(clean / "trl", "credit", "--config", "run.yaml", cwd=tmp_path / "first", timeout=3000)
    folder = tmp_path / "first" / "runs" / "first"
    assert "Correct option: " in (folder / "report.html").read_text("utf-8")
    scores = [json.loads(line)["score"] for line in (folder / "evaluations.jsonl").read_text().splitlines()]
    assert scores[-1] >= scores[0] + 0.3
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - started < 600


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", NAMES)
def test_notebook_prints_what_is_committed_with_the_wheel_alone(clean, tmp_path, name):
    code = (
        "import runpy, sys, nbformat; folder, name = sys.argv[1:]; "
        "notebook = nbformat.read(f'{folder}/{name}.ipynb', as_version=4); "
        "notebook.cells.append(nbformat.v4.new_code_cell('import credit_trl; print(credit_trl.__file__)')); "
        "runpy.run_path(f'{folder}/run.py')['execute'](notebook, timeout=3000); "
        "nbformat.write(notebook, 'executed.ipynb')"
    )
    run(clean / "python", "-c", code, str(ROOT / "notebooks"), name, cwd=tmp_path, timeout=3500)
    executed = nbformat.read(tmp_path / "executed.ipynb", as_version=4)
    assert f"{clean.parent.name}/lib/" in executed.cells[-1].outputs[0].text
    assert differences(nbformat.read(FOLDER / f"{name}.ipynb", as_version=4), executed) == []
