"""Opening a sandbox: the probe, the choice of a tier, its errors, users and interpreters."""

import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import warnings
from functools import cache
from pathlib import Path

import pytest
from observing import CASES, PROTECTED, SOURCES, run_in_servers

from credit_trl import sandbox as package
from credit_trl.sandbox import bubblewrap, choose_sandbox, interpreter, landlock, open_sandbox
from credit_trl.sandbox.pool import PoolSandbox
from credit_trl.sandbox.probe import probe
from credit_trl.sandbox.protocol import Program, SandboxError

TIERS = (*PROTECTED, "unprotected")
UNISOLATED = {name: row for name, row in CASES["unisolated"].items() if row["tier"] in TIERS}


def pretend_missing(monkeypatch: pytest.MonkeyPatch, *missing: str) -> None:
    """Pretend a machine without these tiers."""

    def make(tier: str, workers: int) -> PoolSandbox:
        if tier in missing:
            raise SandboxError(f"no {tier} on this machine")
        return PoolSandbox(tier, workers)

    monkeypatch.setattr("credit_trl.sandbox.pool.PoolSandbox", make)


@pytest.fixture
def no_tier(monkeypatch):
    pretend_missing(monkeypatch, "bubblewrap", "landlock")


@cache
def works(tier: str) -> bool:
    """Whether a tier works on this machine. Containers may forbid namespaces although bubblewrap is installed."""
    try:
        open_sandbox(tier, workers=1).close()
    except SandboxError:
        return False
    return True


def require(tier: str) -> None:
    if not works(tier):
        pytest.skip(f"{tier} does not work on this machine")


def test_auto_opens_first_working_tier_and_runs_the_example_of_the_package():
    expected = next(filter(works, ("bubblewrap", "landlock")), None)
    if expected is None:
        pytest.skip("neither bubblewrap nor Landlock works on this machine")
    with open_sandbox(workers=1) as opened:
        assert opened.tier == expected
        assert expected.lower() in opened.description.lower()
    exec(package.__doc__.split("\n\n", 1)[1], {"open_sandbox": open_sandbox, "Program": Program})


def test_auto_falls_back_to_landlock(monkeypatch, caplog):
    pretend_missing(monkeypatch, "bubblewrap")
    with open_sandbox(workers=1) as opened:
        assert opened.tier == "landlock"
    [record] = caplog.records
    assert "no bubblewrap on this machine. Using landlock instead." in record.getMessage()


def test_no_tier_raises_with_reasons_and_remedies(no_tier):
    with pytest.raises(SandboxError) as caught:
        open_sandbox(workers=1)
    message = str(caught.value)
    for part in ("no bubblewrap on", "no landlock on", "apt-get install bubblewrap", "http://", "--allow_unsandboxed"):
        assert part in message


@pytest.fixture
def choices(monkeypatch):
    for name in (package.CHOICE, package.UNPROTECTED):
        monkeypatch.setenv(name, "")


def test_choose_sandbox_sets_the_default(choices):
    choose_sandbox("landlock")
    with open_sandbox(workers=1) as opened:
        assert opened.tier == "landlock"
    choose_sandbox("http://127.0.0.1:9")
    with pytest.raises(SandboxError, match=r"127\.0\.0\.1:9"):  # nothing listens there
        open_sandbox()
    with open_sandbox("landlock", workers=1) as opened:  # an argument takes precedence
        assert opened.tier == "landlock"


def test_unprotected_fallback_is_allowed_and_logged(no_tier, choices, caplog):
    with pytest.raises(SandboxError, match="--allow_unsandboxed"):
        open_sandbox(workers=1)
    choose_sandbox(allow_unsandboxed=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the filter of `python -W ignore`
        opened = open_sandbox(workers=1)
    [record] = caplog.records
    assert re.search(r"UNPROTECTED.*no bubblewrap on this machine", record.getMessage())
    assert record.levelname == "WARNING"
    with opened:
        assert opened.tier == "unprotected"
        assert opened.run([Program("print(1)")])[0].stdout == "1\n"


@pytest.mark.parametrize("sandbox", ["docker", "remote", "unprotected", "file:///tmp/x"])
def test_invalid_choice_raises_and_changes_nothing(sandbox, choices):
    with pytest.raises(ValueError, match="--sandbox"):
        choose_sandbox(sandbox)
    assert not os.environ[package.CHOICE]


@pytest.mark.parametrize("tier", ["bubblewrap", "landlock"])
def test_named_tier_is_never_replaced_by_unprotected(tier, no_tier, choices):
    choose_sandbox(allow_unsandboxed=True)
    with pytest.raises(SandboxError, match=f"no {tier} on this machine"):
        open_sandbox(tier, workers=1)
    choose_sandbox(tier)
    with pytest.raises(SandboxError, match=f"no {tier} on this machine"):
        open_sandbox(workers=1)


def test_allow_unsandboxed_prefers_a_working_tier(choices):
    choose_sandbox(allow_unsandboxed=True)
    with open_sandbox(workers=1) as opened:
        assert opened.tier in ("bubblewrap", "landlock")


def test_probe_opens_its_bait_to_others_when_it_is_complete(monkeypatch):
    """Before that, another user could put a link in place of a file, which root would then write to."""
    chmod, opened = os.chmod, []

    def observed(path, mode):
        opened.append({name: os.stat(os.path.join(path, name)).st_mode & 0o777 for name in os.listdir(path)})
        chmod(path, mode)

    with open_sandbox(workers=1) as sandbox:
        monkeypatch.setattr(os, "chmod", observed)
        probe(sandbox)
    assert opened == [{"secret": 0o666, "removable": 0o666}]


@pytest.mark.parametrize("row", UNISOLATED.values(), ids=UNISOLATED)
def test_probe_rejects_missing_isolation(monkeypatch, row):
    require(row["tier"])
    run_in_servers(monkeypatch, row["change"])
    with PoolSandbox(row["tier"], 1) as bare, pytest.raises(SandboxError) as caught:
        probe(bare)
    for escape in row["escapes"]:
        assert escape in str(caught.value)


@pytest.mark.parametrize("descriptors", [10, 20, 60])
def test_lack_of_descriptors_is_no_fault_of_a_tier(descriptors):
    """Nor does it lead to a run without protection, in the trainer or in the server."""
    environment = {**os.environ, package.CHOICE: "", package.UNPROTECTED: "1"}
    command = [sys.executable, "-c", SOURCES["few_descriptors"], str(descriptors)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert re.search(r"^exhausted .*Too many open files", ended.stdout, re.DOTALL), ended.stdout + ended.stderr
    assert "does not isolate" not in ended.stdout


def test_open_sandbox_rejects_leaky_isolation(monkeypatch):
    closed = []

    class Leaky(PoolSandbox):
        def __init__(self, tier, workers):
            super().__init__("unprotected", workers)
            self.tier = tier

        def close(self):
            closed.append(self.tier)
            super().close()

    monkeypatch.setattr("credit_trl.sandbox.pool.PoolSandbox", Leaky)
    with pytest.raises(SandboxError, match="does not isolate programs"):
        open_sandbox(workers=1)
    assert {"bubblewrap", "landlock"} <= set(closed)


@pytest.mark.parametrize(
    ("isolation", "place", "replacement", "message"),
    [
        (bubblewrap.Bubblewrap, "bubblewrap.shutil.which", None, "apt-get install bubblewrap"),
        (bubblewrap.Bubblewrap, "bubblewrap._version", (0, 4, 1), r"version 0\.4\.1"),
        (landlock.Landlock, "landlock.version", 0, r"Linux 5\.13"),
    ],
    ids=["no bubblewrap", "old bubblewrap", "no Landlock"],
)
def test_machine_without_what_a_tier_needs_raises(monkeypatch, isolation, place, replacement, message):
    own_interpreter = interpreter.find_interpreter()
    monkeypatch.setattr(bubblewrap.shutil, "which", lambda name, path: "/usr/bin/bwrap")
    monkeypatch.setattr(f"credit_trl.sandbox.{place}", lambda *arguments, **options: replacement)
    with pytest.raises(SandboxError, match=message):
        isolation(own_interpreter)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives programs another user")
def test_a_user_id_that_no_user_namespace_maps_is_an_error(monkeypatch):
    run_in_servers(monkeypatch, "from credit_trl.sandbox import launch; launch.USER = 1 << 33")
    with PoolSandbox("unprotected", 1) as opened, pytest.raises(SandboxError, match=r"could not run.*Error"):
        opened.run([Program("print(1)")])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root needs a copy that others can read")
def test_private_interpreter_is_copied(monkeypatch, tmp_path, system_python):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    executable = shutil.copy(os.path.realpath(system_python), closed / "python")
    monkeypatch.setattr(sys, "executable", str(executable))
    own_interpreter = interpreter.find_interpreter()
    monkeypatch.setattr(interpreter, "COPIES", str(tmp_path / "copies"))
    copied = interpreter.public_copy(own_interpreter)
    [home] = (tmp_path / "copies").iterdir()
    assert copied.executable.startswith(str(home))
    assert stat.S_IMODE(home.stat().st_mode) == 0o755
    assert os.path.isfile(os.path.join(copied.stdlib[0], "os.py"))
    assert not os.path.exists(os.path.join(copied.stdlib[0], "test"))
    assert interpreter.public_copy(own_interpreter) == copied
    monkeypatch.setattr(interpreter, "COPIES", "/proc/copies")
    with pytest.raises(SandboxError, match="Use an interpreter that every user can read"):
        interpreter.public_copy(own_interpreter)


@pytest.fixture
def relocated(monkeypatch, system_python):
    """Home of an interpreter with packages inside its standard library, as in images and conda."""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        home = Path(directory) / "python"
        monkeypatch.setattr(interpreter, "COPIES", directory)
        monkeypatch.setattr(sys, "executable", system_python)
        own_interpreter = interpreter.find_interpreter()
        interpreter._copy(own_interpreter, [], str(home), os.path.basename(own_interpreter.stdlib[0]))
        [stdlib] = (home / "lib").glob("python*")
        for kind in ("site-packages", "dist-packages"):
            package = stdlib / kind / "planted"
            package.mkdir(parents=True)
            (package / "tests.jsonl").write_text("expected")
        yield home


@pytest.mark.parametrize("tier", PROTECTED)
def test_installed_packages_are_inaccessible(tier, relocated, monkeypatch):
    require(tier)
    [executable] = (relocated / "bin").glob("python*")
    monkeypatch.setattr(sys, "executable", str(executable))
    with PoolSandbox(tier, 1) as opened:
        [outcome] = opened.run([Program(SOURCES["installed_packages"])])
    home, read_attempts, written = outcome.stdout.splitlines()
    assert home.startswith(str(relocated))
    assert read_attempts == written == "['refused', 'refused']"


def test_package_directories_resolves_links(tmp_path):
    library, outside, link = tmp_path / "lib", tmp_path / "outside", tmp_path / "link"
    packages = library / "python3" / "dist-packages"
    (packages / "site-packages").mkdir(parents=True)  # inside a package directory
    outside.mkdir()
    (library / "python").symlink_to("python3")
    (library / "site-packages").symlink_to(outside)
    link.symlink_to(library)
    find = interpreter.package_directories
    assert find(map(str, (library, library / "python3"))) == [str(packages)]
    assert find([str(link)]) == [str(link / "python3" / "dist-packages")]
