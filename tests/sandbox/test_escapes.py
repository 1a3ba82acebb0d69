"""The escape suite: in every tier no program escapes, and the outcomes of later programs are right."""

import platform

import pytest
from bait import Bait, judge
from escape import DATA, ESCAPES, Escape

from credit_trl.sandbox import open_sandbox


@pytest.mark.parametrize("escape", ESCAPES, ids=lambda escape: escape.name.replace(" ", "_"))
def test_escape_fails_and_later_outcomes_are_right(held, escape: Escape) -> None:
    sandbox, bait = held
    if "syscall(" in escape.source and platform.machine() != "x86_64":
        pytest.skip("raw system call numbers of x86_64")
    status, faults = judge(sandbox, bait, escape)
    assert not faults, f"{escape.name}, {status}: {faults}"


def test_suite_has_distinct_programs() -> None:
    assert len({escape.name for escape in ESCAPES}) == len(ESCAPES) >= 98


def test_suite_detects_unprotected_escapes() -> None:
    by_name = {escape.name: escape for escape in ESCAPES}
    sandbox = open_sandbox("unprotected", workers=2)
    with sandbox, Bait() as bait:
        for name in DATA["noticed_unprotected"]:
            _, faults = judge(sandbox, bait, by_name[name])
            assert faults, f"{name} escaped undetected"
