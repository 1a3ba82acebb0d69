"""Helpers of the tests: the outcome of one program, and whether a process has ended."""

import shutil
import textwrap
import time
import tomllib
from pathlib import Path

import pytest

from credit_trl.sandbox import Limits, Outcome, Program, Sandbox, pool

# Without bubblewrap its tests are not collected, and the summary has one line on it.
PROTECTED = [tier for tier in ("bubblewrap", "landlock") if tier != "bubblewrap" or shutil.which("bwrap")]
PROGRAMS = tomllib.loads(Path(__file__).with_name("programs.toml").read_text("utf-8"))["program"]
CASES = tomllib.loads(Path(__file__).with_name("cases.toml").read_text("utf-8"))
SOURCES = CASES["sources"]


def run_in_servers(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Run code in every sandbox server that starts, before it imports the sandbox."""
    start = "from credit_trl.sandbox.server"
    monkeypatch.setattr(pool, "_BOOT", pool._BOOT.replace(start, f"{code}\n{start}"))


def run_one(sandbox: Sandbox, source: str, **fields: object) -> Outcome:
    [outcome] = sandbox.run([Program(textwrap.dedent(source), **fields)], deadline=60)
    return outcome


def parametrize(names: str, table: str) -> pytest.MarkDecorator:
    """Parametrize a test with the rows of a table of `cases.toml`, which begin with the name of the case."""
    rows = CASES[table]
    return pytest.mark.parametrize(names.split(), [row[1:] for row in rows], ids=[row[0] for row in rows])


def check_outcome(sandbox: Sandbox, row: dict) -> None:
    """Run a program of the table `programs.toml` and compare the fields that the row has."""
    program_fields = {key: row[key] for key in ("source", "stdin", "fn_name", "arguments", "prelude") if key in row}
    outcome = run_one(sandbox, **program_fields, limits=Limits(**row.get("limits", {})))
    observed = vars(outcome) | {"printed": len(outcome.stdout)}
    expected = {"status": "ok"} | {key: value for key, value in row.items() if key in observed}
    assert {key: observed[key] for key in expected} == expected, row["name"]


def gone(pid: int, within: float = 5.0) -> bool:
    give_up = time.monotonic() + within
    while time.monotonic() < give_up:
        try:
            with open(f"/proc/{pid}/stat") as stat:
                if stat.read().rsplit(")", 1)[1].split()[0] == "Z":
                    return True
        except OSError:
            return True
        time.sleep(0.01)
    return False
