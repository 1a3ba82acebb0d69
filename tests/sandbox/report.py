"""Run the escape suite in every tier of this machine and write the table into tests/sandbox/escapes.md.

    python tests/sandbox/report.py tests/sandbox/escapes.md

Exits with status 1 if a program escaped. A tier that this machine lacks has empty cells and a note.
"""

from __future__ import annotations

import os
import platform
import sys
from datetime import date
from pathlib import Path

import pytest
from bait import Bait, judge
from escape_programs import ESCAPES, GROUPS

from conftest import ORDINARY_USER, open_tier

TIERS = ("bubblewrap", "bubblewrap as an ordinary user", "landlock", "landlock as an ordinary user")
BEGIN, END = "<!-- escapes: written by tests/sandbox/report.py -->", "<!-- escapes: end -->"


def run_tier(tier: str) -> tuple[str, dict[str, str], int]:
    """Description of the tier, a cell per escape, and the number of programs that escaped."""
    user = ORDINARY_USER if "ordinary" in tier else None
    cells, failures = {}, 0
    try:
        sandbox = open_tier(tier)
    except pytest.skip.Exception as reason:
        return f"not run: {reason}", {}, 0
    with sandbox, Bait(user) as bait:
        for escape in ESCAPES:
            if "syscall(" in escape.source and platform.machine() != "x86_64":
                continue
            status, faults = judge(sandbox, bait, escape)
            failures += bool(faults)
            cells[escape.name] = f"**{'; '.join(faults)}**" if faults else status.replace("_", " ")
            print(f"{tier}: {escape.name}: {cells[escape.name]}", file=sys.stderr)
        return sandbox.description, cells, failures


def table() -> tuple[str, int]:
    """The report in Markdown, and the number of programs that escaped."""
    results = {tier: run_tier(tier) for tier in TIERS}
    failures = sum(failed for _, _, failed in results.values())
    kernel = f"Linux {os.uname().release.split('-')[0]}, {platform.machine()}, {os.cpu_count()} cores"
    lines = [f"{date.today()}, {kernel}.", ""]
    for tier, (description, cells, failed) in results.items():
        outcome = f"; {len(cells)} programs, {failed} escaped" if cells else ""
        lines.append(f"- {tier}: {description}{outcome}")
    lines += ["", f"| | {' | '.join(TIERS)} |", f"| --- |{' --- |' * len(TIERS)}"]
    for group, escapes in GROUPS.items():
        lines.append(f"| **{group}** |{' |' * len(TIERS)}")
        for escape in escapes:
            cells = [results[tier][1].get(escape.name, "") for tier in TIERS]
            lines.append(f"| {escape.name} | {' | '.join(cells)} |")
    return "\n".join(lines), failures


def main() -> None:
    path = Path(sys.argv[1])
    text = path.read_text()
    before, rest = text.split(BEGIN)
    report, failures = table()
    path.write_text(f"{before}{BEGIN}\n\n{report}\n\n{END}{rest.split(END)[1]}")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
