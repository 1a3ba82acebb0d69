"""Control groups: available cores by a container's quota, and the memory of a program's processes."""

import os
import threading
import time
from pathlib import Path

import pytest
from observing import SOURCES, parametrize, run_in_servers, run_one

from credit_trl.sandbox import Limits, Program, cgroups
from credit_trl.sandbox.pool import PoolSandbox

MIB = 1024 * 1024


@pytest.fixture
def twelve_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)), raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


def put(folder: Path, files: dict[str, str], own_group: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Pretend a file system of control groups with these files, and this process in the group `own`."""
    (folder / "groups").mkdir()
    (folder / "own").write_text(own_group + "\n")
    for name, text in files.items():
        (folder / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "groups" / name).write_text(text + "\n")
    monkeypatch.setattr(cgroups, "CGROUPS", folder / "groups")
    monkeypatch.setattr(cgroups, "OWN_CGROUP", folder / "own")
    return folder / "groups"


@parametrize("own_group files expected", "quotas")
def test_available_cores_respects_container_quota(twelve_cores, tmp_path, monkeypatch, own_group, files, expected):
    put(tmp_path, files, own_group, monkeypatch)
    assert cgroups.available_cores() == expected


def test_available_cores_without_cgroups_is_the_affinity(twelve_cores, tmp_path, monkeypatch):
    monkeypatch.setattr(cgroups, "OWN_CGROUP", tmp_path / "nowhere")
    assert cgroups.available_cores() == 12
    assert cgroups.delegated_group() is None


def test_worker_count_divides_cores_by_local_world_size(twelve_cores, monkeypatch):
    monkeypatch.setattr(cgroups, "available_cores", lambda: 12)
    assert cgroups.worker_count() == 12
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert cgroups.worker_count() == 1


@parametrize("own_group files expected", "delegations")
def test_group_is_delegated_where_it_limits_memory_and_can_be_written(
    tmp_path, monkeypatch, own_group, files, expected
):
    groups = put(tmp_path, files, own_group, monkeypatch)
    assert cgroups.delegated_group() == (groups / expected if expected else None)


@pytest.fixture
def delegated(tmp_path, monkeypatch):
    files = {"cgroup.subtree_control": "memory", "cgroup.procs": ""}
    groups = put(tmp_path, files, "0::/", monkeypatch)
    pretend = f"cgroups.CGROUPS, cgroups.OWN_CGROUP = map(pathlib.Path, {(str(groups), str(tmp_path / 'own'))!r})"
    run_in_servers(monkeypatch, f"import pathlib; from credit_trl.sandbox import cgroups; {pretend}")
    return groups


def test_each_program_has_a_group_that_limits_its_memory(delegated):
    with PoolSandbox("unprotected", 1) as opened:
        [outcome] = opened.run([Program("print(42)", limits=Limits(memory_bytes=200 * MIB))])
        assert outcome.stdout == "42\n"
        [group] = delegated.glob(f"credit-trl-{opened.server_pid}-*")
        assert (group / "memory.max").read_text() == str(200 * MIB)
        assert (group / "cgroup.procs").read_text() == "0"  # the process that wrote it
        for file in group.iterdir():  # which end with the processes of a group
            file.unlink()
        run_one(opened, "print(42)")
        assert not group.exists()


def test_program_that_the_kernel_ended_for_its_memory_has_that_status(delegated):
    def kill():
        while not (actual := list(delegated.glob("credit-trl-*/cgroup.procs"))):
            time.sleep(0.01)
        (actual[0].parent / "memory.events").write_text("low 0\nmax 9\noom 1\noom_kill 2\noom_group_kill 1\n")

    with PoolSandbox("unprotected", 1) as opened:
        kernel = threading.Thread(target=kill)
        kernel.start()
        outcome = run_one(opened, "import os, time; time.sleep(0.5); os.kill(os.getpid(), 9)")
        kernel.join()
    assert (outcome.status, outcome.error) == ("memory", f"more than {1024 * MIB} bytes of memory")


def test_server_without_a_group_that_it_can_divide_limits_memory_by_samples(delegated):
    (delegated / "cgroup.subtree_control").write_text("cpu")
    with PoolSandbox("unprotected", 1) as opened:
        assert run_one(opened, "print(42)").stdout == "42\n"
    assert not list(delegated.glob("credit-trl-*"))


def test_groups_of_a_server_are_removed_with_it(tmp_path):
    for name in ("credit-trl-7-a", "credit-trl-7-b", "credit-trl-77-a"):
        (tmp_path / name).mkdir()
    cgroups.remove_groups(tmp_path, 7)
    assert [path.name for path in tmp_path.iterdir()] == ["credit-trl-77-a"]


@pytest.mark.skipif(cgroups.delegated_group() is None, reason="no control group is delegated to this process")
def test_real_group_holds_the_memory_of_all_processes():
    with PoolSandbox("unprotected", 1) as opened:
        assert run_one(opened, SOURCES["eight_processes"], limits=Limits(memory_bytes=192 * MIB)).status == "memory"
        assert not list(cgroups.delegated_group().glob(f"credit-trl-{opened.server_pid}-*"))
