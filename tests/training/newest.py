"""Try the newest transformers and torch on a part of the tests, once a week, and record what was tried.

    python tests/training/newest.py .venv .venv-newest

`.ci/newest.json` has the last try and its day; commit it. Where the installed torch is for CPUs, so is the newest: any
other brings gigabytes of CUDA libraries. A failure is printed and recorded, and does not end `.ci/run`.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from importlib.metadata import version
from pathlib import Path

from packaging.version import Version
from trl_versions import listed_versions

ROOT = Path(__file__).parents[2]
RECORD = ROOT / ".ci" / "newest.json"
WAIT = timedelta(days=7)
TESTS = "tests/test_trl_compat.py tests/test_trainer_parity.py tests/loss/test_model_families.py"


def is_due(tried: str, day: date) -> bool:
    """Whether a commit of this day tries again."""
    return day - date.fromisoformat(tried) >= WAIT


def newest_release(available: Sequence[str], installed: str) -> str:
    """The newest release, of the builds for CPUs alone where the installed one is one."""
    is_cpu = installed.endswith("+cpu")
    versions = [Version(text) for text in [*available, installed] if text.endswith("+cpu") == is_cpu]
    return str(max(release for release in versions if not release.is_prerelease))


def head_day() -> date:
    """Day of HEAD's commit, and today without a repository."""
    command = ["git", "log", "-1", "--format=%cs"]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    return date.fromisoformat(output) if output else datetime.now(UTC).date()


def try_versions(versions: dict[str, str], folders: Sequence[str]) -> str:
    """Run the tests with these versions; returns `passed: …` or `failed: …` with the end of the output."""
    requirements = [f"{name}=={text}" for name, text in versions.items()]
    command = ["tests/training/other_trl.sh", *folders, version("trl"), *requirements]
    ran = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"TESTS": TESTS}, stdout=subprocess.PIPE, text=True, check=False
    )
    print(ran.stdout)
    lines = ran.stdout.strip().splitlines() or ["no output"]
    return f"{'failed' if ran.returncode else 'passed'}: {lines[-1].strip('= ')}"


def main(folders: Sequence[str]) -> int:
    record = json.loads(RECORD.read_text("utf-8"))
    day = head_day()
    if is_due(record["date"], day):
        available = {name: listed_versions(name) for name in ("transformers", "torch")}
        versions = {name: newest_release(texts, version(name)) for name, texts in available.items()}
        record = {"date": str(day), **versions, "result": try_versions(versions, folders)}
        RECORD.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    print("newest versions:", json.dumps(record))
    if record["result"].startswith("failed"):
        print("THE NEWEST VERSIONS FAIL, which blocks no change: mend it, or cap the requirement.", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
