"""Available cores: the smaller of a process's affinity and its container's quota."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from credit_trl.sandbox import cores


@pytest.fixture(autouse=True)
def twelve_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)), raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("0::/", {}, 12),
        ("0::/", {"cpu.max": "max 100000"}, 12),
        ("0::/", {"cpu.max": "250000 100000"}, 3),
        ("0::/", {"cpu.max": "50000 100000"}, 1),
        ("0::/", {"cpu.max": "6400000 100000"}, 12),
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "400000 100000", "cpu.max": "500000 100000"}, 4),
        ("0::/a", {"other/cpu.max": "100000 100000"}, 12),
        ("3:cpu,cpuacct:/a", {"a/cpu.max": "100000 100000"}, 12),
        ("0::/", {"cpu.max": "no numbers here"}, 12),
    ],
    ids=["no file", "no quota", "rounded up", "half a core", "more than there are", "of a parent", "of another group",
         "version 1", "damaged"],
)  # fmt: skip
def test_available_cores_respects_container_quota(tmp_path: Path, own: str, files: dict, expected: int) -> None:
    (tmp_path / "own").write_text(own + "\n")
    for name, text in files.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(text + "\n")
    assert cores.available_cores(tmp_path / "groups", tmp_path / "own") == expected


def test_available_cores_without_cgroups_is_the_affinity(tmp_path: Path) -> None:
    assert cores.available_cores(tmp_path / "none", tmp_path / "nowhere") == 12


def test_worker_count_divides_cores_by_local_world_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "available_cores", lambda: 12)
    assert cores.worker_count() == 12
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert cores.worker_count() == 1
