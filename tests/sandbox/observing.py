"""Helpers of the tests: the outcome of one program, and whether a process has ended."""

from __future__ import annotations

import textwrap
import time

from credit_trl.sandbox import Outcome, Program, Sandbox


def run_one(sandbox: Sandbox, source: str, **fields: object) -> Outcome:
    [outcome] = sandbox.run([Program(textwrap.dedent(source), **fields)], deadline=60)
    return outcome


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
