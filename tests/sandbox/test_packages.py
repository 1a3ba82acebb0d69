"""Installed packages that programs may import, and those that they may not."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from observing import run_one

from credit_trl import sandbox as package
from credit_trl.sandbox import Program, SandboxError, choose_sandbox, interpreter, open_sandbox, packages
from credit_trl.sandbox.packages import Packages, find_packages, public_packages

USES_NUMPY = "import numpy as np\nprint(np.arange(4).reshape(2, 2) @ np.ones(2), np.linalg.det(np.eye(2)))"


@pytest.fixture(scope="module", params=["bubblewrap", "landlock"])
def with_numpy(request: pytest.FixtureRequest) -> Iterator[object]:
    try:
        opened = open_sandbox(request.param, workers=1, packages=["numpy"])
    except SandboxError as error:
        pytest.skip(str(error).splitlines()[1])
    with opened:
        yield opened


def test_chosen_package_is_importable(with_numpy, sandbox) -> None:
    outcome = run_one(with_numpy, USES_NUMPY)
    assert (outcome.status, outcome.stdout) == ("ok", "[1. 5.] 1.0\n"), outcome.error
    assert run_one(sandbox, USES_NUMPY).error.endswith("ModuleNotFoundError: No module named 'numpy'")


def test_other_packages_and_the_project_stay_hidden(with_numpy) -> None:
    project = os.path.dirname(package.__path__[0])
    source = f"""
    import glob, os, sys
    import numpy
    for name in ("yaml", "torch", "tqdm", "credit_trl"):
        try:
            __import__(name)
        except ImportError:
            print("refused")
    beside = os.path.dirname(os.path.dirname(numpy.__file__))
    files = [os.path.join(beside, name) for name in ("yaml/__init__.py", "torch/__init__.py", "six.py")]
    for path in [*files, {project!r} + "/tasks/examples/problems.jsonl", {project!r} + "/__init__.py"]:
        try:
            open(path).close()
        except OSError:
            print("refused")
    for path in (numpy.__file__, os.path.join(os.path.dirname(numpy.__file__), "planted.py")):
        try:
            open(path, "a").close()
        except OSError:
            print("refused")
    print(sorted(name for name in sys.modules if "." not in name and "trl" in name))
    """
    assert run_one(with_numpy, source).stdout.split("\n") == ["refused"] * 11 + ["[]", ""]


def test_threads_and_memory_of_a_package_stay_within_limits(with_numpy) -> None:
    source = "import numpy as np, os\nprint(np.ones((300, 300)) @ np.ones(300))\nprint(os.environ['OMP_NUM_THREADS'])"
    assert run_one(with_numpy, source).stdout.endswith("1\n")


def test_scalars_of_numpy_are_return_values(with_numpy) -> None:
    source = "import numpy as np\ndef f(): return [np.sum([1, 2]), np.float32(0.5), {'b': np.True_}]"
    [outcome] = with_numpy.run([Program(source, fn_name="f")])
    assert outcome.value == '[3, 0.5, {"b": true}]'


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no-such-distribution", "no-such-distribution is not installed"),
        ("credit-trl", "no modules|not installed|project"),
    ],
)
def test_unknown_package_and_the_project_are_refused(name: str, message: str) -> None:
    with pytest.raises(SandboxError, match=message):
        find_packages([name])


def test_package_around_the_project_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    [numpy] = [path for path in find_packages(["numpy"]).paths if path.endswith("/numpy")]
    for inside in (numpy, numpy + "/linalg"):
        monkeypatch.setattr(packages, "_PROJECT", inside)
        with pytest.raises(SandboxError, match="contains this project"):
            find_packages(["numpy"])


def test_package_that_fails_to_import_is_refused_at_opening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    (site / "broken").mkdir(parents=True)
    (site / "broken" / "__init__.py").write_text("import no_such_module\n")
    for path in (tmp_path, site, site / "broken"):
        path.chmod(0o755)
    patch = (
        "from credit_trl.sandbox import server\n"
        "from credit_trl.sandbox.packages import Packages\n"
        f"server.find_packages = lambda *_: Packages(('broken',), ({str(site / 'broken')!r},))\n"
        "from credit_trl.sandbox.server"
    )
    from credit_trl.sandbox import pool

    monkeypatch.setattr(pool, "_BOOT", pool._BOOT.replace("from credit_trl.sandbox.server", patch))
    monkeypatch.setattr(packages, "find_packages", lambda *_: None)
    with pytest.raises(SandboxError, match=r"(?s)^Programs cannot import broken: .*no_such_module"):
        open_sandbox(workers=1, packages=["broken"])


def test_missing_package_never_leads_to_another_tier() -> None:
    for tier in (None, "unprotected"):
        with pytest.raises(SandboxError, match="no-such is not installed"):
            open_sandbox(tier, workers=1, packages=["no-such"])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root needs a copy that others can read")
def test_private_packages_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private = tmp_path / "private"
    (private / "made").mkdir(parents=True)
    (private / "made" / "__init__.py").write_text("value = 7\n")
    (private / "single.py").write_text("value = 8\n")
    private.chmod(0o700)
    monkeypatch.setattr(interpreter, "COPIES", str(tmp_path / "copies"))
    chosen = Packages(("made",), (str(private / "made"), str(private / "single.py")))
    copied = public_packages(chosen)
    assert copied.modules().keys() == {"made", "single"}
    assert all(path.startswith(str(tmp_path / "copies")) for path in copied.paths)
    assert Path(copied.modules()["single"]).read_text() == "value = 8\n"
    assert public_packages(chosen) == copied


def test_modules_are_named_and_placed() -> None:
    [numpy] = [path for path in find_packages(["numpy"]).paths if path.endswith("/numpy")]
    chosen = Packages((), (numpy, numpy + ".libs", "/site/six.py", "/site/_fast.cpython-311-x86_64-linux-gnu.so"))
    assert chosen.modules("/packages") == {
        "numpy": "/packages/numpy",
        "six": "/packages/six.py",
        "_fast": "/packages/_fast.cpython-311-x86_64-linux-gnu.so",
    }
    assert chosen.modules()["numpy"] == numpy


def test_packages_are_chosen_by_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (package.CHOICE, package.UNPROTECTED, package.PACKAGES):
        monkeypatch.setenv(name, "")
    choose_sandbox(packages=["numpy"])
    assert os.environ[package.PACKAGES] == "numpy"
    with open_sandbox(workers=1) as opened:
        assert opened.run([Program("import numpy; print(1)")])[0].stdout == "1\n"
    with pytest.raises(ValueError, match="local sandboxes"):
        open_sandbox("http://127.0.0.1:9", packages=["numpy"])
    with pytest.raises(ValueError, match="local sandboxes"):
        open_sandbox("http://127.0.0.1:9")
    choose_sandbox(packages="numpy, torch")
    for given in (None, "numpy, torch"):
        with pytest.raises(ValueError, match=r"Packages \(numpy, torch\)"):
            open_sandbox("http://127.0.0.1:9", packages=given)


def test_find_packages_asks_the_interpreter_of_the_programs() -> None:
    assert find_packages(["numpy"], sys.executable) == find_packages(["numpy"])
    with pytest.raises(SandboxError, match="is not installed"):
        find_packages(["no-such"], sys.executable)
