"""The slow tests in three shards, of which `.ci/run` runs one within a budget of minutes.

    python tests/slow_suite.py                  # the shard of this commit
    python tests/slow_suite.py --shard faults   # this one; `slow` and `optional` are the others

A shard that fails ends CI, once a commit is recorded on which it passed.

As a pytest plugin (`PYTHONPATH=tests pytest -p slow_suite --shard NAME`) it stops a session at the end of its budget,
and writes when a shard passed, and which files remain, to `.ci/slow_suite.json`. They come first in the next run.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
MINUTES = 20.0

# Shard -> command that runs its tests.
SHARDS = {
    "slow": [sys.executable, "-m", "pytest", "-m", "slow", "--ignore=tests/faults"],
    "faults": [sys.executable, "-m", "pytest", "-m", "slow or not slow", "tests/faults"],
    "optional": ["tests/distributed/optional.sh", ".venv", ".venv-optional"],
}


def git(*arguments: str) -> str:
    """Output of git, empty in a folder without a repository."""
    result = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return result.stdout.strip()


def commit_number() -> int:
    """Number of commits up to this one, from which shard and order follow; 0 without a repository.

    A shallow clone does not have it: there the number follows from the hash.
    """
    if git("rev-parse", "--is-shallow-repository") == "true":
        return int(git("rev-parse", "HEAD"), 16)
    return int(git("rev-list", "--count", "HEAD") or 0)


def read_state(path: Path) -> dict[str, dict[str, Any]]:
    """Shard -> `passed`, commit and date, and `remaining`, the files that come first in the next run."""
    state = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    return {shard: {"passed": None, "remaining": []} | state.get(shard, {}) for shard in SHARDS}


def ordered_files(files: Sequence[str], remaining: Sequence[str], number: int) -> list[str]:
    """Files in the order of a run: those that remain, then all others from a place that changes with the commit."""
    urgent = [file for file in remaining if file in files]
    later = sorted(set(files) - set(urgent))
    start = number % len(later) if later else 0
    return [*urgent, *later[start:], *later[:start]]


@dataclass(eq=False)
class Shard:
    """A session that stops at the end of its budget, and remembers what it did not reach."""

    name: str
    seconds: float
    state_file: Path
    number: int
    clock: Callable[[], float] = time.monotonic
    files: list[str] = field(default_factory=list)
    unfinished: dict[str, int] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.deadline = self.clock() + self.seconds

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        remaining = read_state(self.state_file)[self.name]["remaining"]
        by_file: dict[str, list[pytest.Item]] = {}
        for item in items:
            by_file.setdefault(item.nodeid.partition("::")[0], []).append(item)
        self.files = ordered_files(list(by_file), remaining, self.number)
        self.unfinished = {file: len(by_file[file]) for file in self.files}
        items[:] = [item for file in self.files for item in by_file[file]]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.add(report.nodeid.partition("::")[0])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        result = yield
        file = item.nodeid.partition("::")[0]
        self.unfinished[file] -= 1
        if self.clock() > self.deadline and any(self.unfinished.values()):
            item.session.shouldstop = f"the budget of shard {self.name} is used; the rest comes first in the next run"
        return result

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        state = read_state(self.state_file)
        due = state[self.name]["remaining"] or self.files
        remaining = [file for file in self.files if self.unfinished[file] or file in self.failed]
        is_interrupted = exitstatus not in (0, 1, 2, 5)
        if not is_interrupted and not self.failed and not set(due) & set(remaining):
            state[self.name]["passed"] = f"{git('rev-parse', '--short', 'HEAD')} {datetime.now(UTC):%Y-%m-%d %H:%M}"
        state[self.name]["remaining"] = remaining
        self.state_file.write_text(json.dumps(state, indent=1) + "\n", "utf-8")
        if session.shouldstop and not self.failed and exitstatus == 2:
            session.exitstatus = 0  # the budget is used, and nothing failed


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", choices=list(SHARDS), help="remember this shard of the slow tests")
    parser.addoption("--minutes", type=float, default=MINUTES, help="budget of the shard")
    parser.addoption("--state", type=Path, default=ROOT / ".ci" / "slow_suite.json", help="what ran, and what remains")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.shard:
        shard = Shard(config.option.shard, 60 * config.option.minutes, config.option.state, commit_number())
        config.pluginmanager.register(shard)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shard", choices=list(SHARDS), help="by default the commit chooses")
    parser.add_argument("--minutes", type=float, default=MINUTES)
    options = parser.parse_args()
    name = options.shard or list(SHARDS)[commit_number() % len(SHARDS)]
    state_file = ROOT / ".ci" / "slow_suite.json"
    for shard, values in read_state(state_file).items():
        print(f"{shard:9} passed: {values['passed'] or 'not yet'}; {len(values['remaining'])} files remain")
    print(f"shard {name}, up to {options.minutes:g} minutes", flush=True)
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "tests"), os.environ.get("PYTHONPATH")])),
        "PYTEST_ADDOPTS": f"-p slow_suite --shard {name} --minutes {options.minutes}",
    }
    code = subprocess.run(SHARDS[name], cwd=ROOT, env=environment).returncode
    return exit_code(name, code, has_passed=read_state(state_file)[name]["passed"] is not None)


def exit_code(name: str, code: int, *, has_passed: bool) -> int:
    """Exit code of a shard's run: 0 with a message where it fails and no commit is recorded on which it passed."""
    if code and not has_passed:
        print(
            f"SHARD {name.upper()} FAILS, see above. It has not passed yet, so this is no regression: mend its tests,"
        )
        print("run `make test-shard` until it passes, and commit .ci/slow_suite.json. After that a failure ends CI.")
        return 0
    return code


if __name__ == "__main__":
    sys.exit(main())
