"""The escape suite: in every tier no program escapes, and the outcomes of later programs are right."""

import platform

import pytest
from bait import GOOD, Bait, judge
from escape import DATA, ESCAPES
from observing import PROTECTED, SOURCES, run_in_servers
from tiers import open_tier

from credit_trl.sandbox import Program, open_sandbox

USERS = [name for tier in PROTECTED for name in (tier, f"{tier} as an ordinary user")]
CHANNEL = {fields["name"] for fields in DATA["group"]["channel"]}


@pytest.mark.parametrize("escape", ESCAPES, ids=lambda escape: escape.name.replace(" ", "_"))
def test_escape_fails_and_later_outcomes_are_right(opened_tier, escape):
    sandbox, bait = opened_tier
    if "syscall(" in escape.source and platform.machine() != "x86_64":
        pytest.skip("raw system call numbers of x86_64")
    status, faults = judge(sandbox, bait, escape)
    assert not faults, f"{escape.name}, {status}: {faults}"


@pytest.mark.parametrize("name", USERS)
def test_thieves_of_the_begin_mark_harm_nobody(name, monkeypatch):
    """The server gets a processor only when a program has ended, or after a second: it reads what a thief leaves."""
    run_in_servers(monkeypatch, SOURCES["late_server"])
    with open_tier(name) as sandbox, Bait() as bait:
        thieves = [escape for escape in ESCAPES if escape.name in CHANNEL]
        programs = []
        for thief in thieves:
            call = {"fn_name": thief.call, "limits": thief.limits}
            programs += [GOOD, Program(thief.source, prelude=bait.prelude(sandbox), **call)]
        outcomes = sandbox.run(programs, deadline=120)
    assert len(thieves) >= 10
    assert [outcome.stdout for outcome in outcomes[::2]] == ["42\n"] * len(thieves)
    assert not any("ESCAPED" in outcome.stdout for outcome in outcomes)
    statuses = {thief.name: outcome.status for thief, outcome in zip(thieves, outcomes[1::2], strict=True)}
    assert {thief.name for thief in thieves if statuses[thief.name] not in thief.statuses} == set(), statuses


def test_suite_has_distinct_programs():
    assert len({escape.name for escape in ESCAPES}) == len(ESCAPES) >= 108


def test_suite_detects_unprotected_escapes():
    by_name = {escape.name: escape for escape in ESCAPES}
    sandbox = open_sandbox("unprotected", workers=2)
    with sandbox, Bait() as bait:
        for name in DATA["noticed_unprotected"]:
            _, faults = judge(sandbox, bait, by_name[name])
            assert faults, f"{name} escaped undetected"
