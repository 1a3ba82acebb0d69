"""The weekly try of the newest transformers and torch: when, which versions, and what a failure does."""

import json
from datetime import date
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def newest(monkeypatch):
    """The script."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    import newest

    return newest


@pytest.mark.parametrize(("day", "due"), [("2026-11-28", False), ("2026-12-04", False), ("2026-12-05", True)])
def test_a_try_is_due_a_week_after_the_last(newest, day, due):
    assert newest.is_due("2026-11-28", date.fromisoformat(day)) is due


@pytest.mark.parametrize(
    ("available", "installed", "expected"),
    [
        (["5.24.0", "5.23.0", "6.0.0rc1"], "5.23.0", "5.24.0"),
        (["5.9.0", "5.10.0"], "5.9.0", "5.10.0"),
        (["2.15.0", "2.14.0+cpu", "2.13.0+cpu"], "2.13.0+cpu", "2.14.0+cpu"),
        (["2.15.0"], "2.13.0+cpu", "2.13.0+cpu"),
    ],
)
def test_newest_release_is_chosen_and_no_torch_with_cuda(newest, available, installed, expected):
    assert newest.newest_release(available, installed) == expected


@pytest.mark.parametrize(("code", "result"), [(0, "passed: 2 of 2"), (1, "failed: 2 of 2")])
def test_try_is_recorded_once_and_its_failure_ends_nothing(newest, monkeypatch, tmp_path, capsys, code, result):
    record = tmp_path / "newest.json"
    record.write_text('{"date": "2020-01-01", "result": "passed"}', "utf-8")
    script = tmp_path / "tests/training/other_trl.sh"
    script.parent.mkdir(parents=True)
    script.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/calls\necho "=== 2 of 2 ==="\nexit {code}\n')
    script.chmod(0o700)
    for name, value in {
        "ROOT": tmp_path,
        "RECORD": record,
        "listed_versions": lambda name: ["99.0", "99.0+cpu"],
    }.items():
        monkeypatch.setattr(newest, name, value)
    for _ in range(2):
        assert newest.main([".venv", "folder"]) == 0
        assert ("THE NEWEST VERSIONS FAIL" in capsys.readouterr().err) == (code == 1)
    written = json.loads(record.read_text("utf-8"))
    assert (written["transformers"], written["result"]) == ("99.0", result)
    [call] = (tmp_path / "calls").read_text().splitlines()
    assert "transformers==99.0 torch==99.0" in call


def test_last_try_is_recorded_and_ci_makes_the_next():
    record = json.loads((ROOT / ".ci" / "newest.json").read_text("utf-8"))
    assert sorted(record) == ["date", "result", "torch", "transformers"]
    assert "make test-newest" in (ROOT / ".ci" / "run").read_text("utf-8")
    assert "tests/training/newest.py" in (ROOT / "Makefile").read_text("utf-8")
