"""Programs, limits, outcomes, batches and messages."""

import dataclasses
import socket
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from observing import CASES

from credit_trl.sandbox import STATUSES, Limits, Outcome, Program
from credit_trl.sandbox.batch import Batch
from credit_trl.sandbox.protocol import Channel, excerpt
from credit_trl.sandbox.running import _parse_report


def test_program_has_no_field_for_expected_output():
    fields = {field.name for field in dataclasses.fields(Program)}
    assert fields == {"source", "stdin", "fn_name", "arguments", "prelude", "limits", "group"}


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Limits)])
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), 2**63])
def test_limits_out_of_range_raise(field, value):
    with pytest.raises(ValueError, match=f"Limits.{field}"):
        Limits(**{field: value})


@pytest.mark.parametrize(("fields", "message"), CASES["invalid_programs"])
def test_invalid_programs_raise(fields, message):
    with pytest.raises(ValueError, match=message):
        Program("pass", **fields)


@pytest.mark.parametrize(("limits", "message"), CASES["small_limits"])
def test_limits_too_small_for_interpreter_raise(limits, message):
    Limits(memory_bytes=64 << 20, processes=1)
    with pytest.raises(ValueError, match=message):
        Limits(**limits)


@given(st.text(max_size=50), st.integers(0, 9000))
def test_excerpt_keeps_both_ends(text, middle):
    text += "x" * middle + text
    short = excerpt(text)
    assert short == text if len(text) <= 8192 else len(short) < 8192 + 40
    assert (short[:4096], short[-4096:]) == (text[:4096], text[-4096:])


@given(
    groups=st.lists(st.sampled_from(["a", "b", "c", None]), max_size=30),
    statuses=st.lists(st.sampled_from(STATUSES[:4]), min_size=30, max_size=30),
    stop=st.sets(st.sampled_from(STATUSES[:4])),
    at_once=st.integers(1, 5),
)
def test_batch_runs_each_program_once_or_skips_it(groups, statuses, stop, at_once):
    batch = Batch([Program("pass", group=group) for group in groups], stop)
    running, ran = [], []
    stopped: set[object] = set()
    while True:
        while (index := batch.take(at_once)) is not None:
            assert groups[index] not in stopped
            running.append(index)
        if not running:
            break
        index = running.pop(0)
        ran.append(index)
        batch.done(index, Outcome(statuses[index], stdout=str(index)))
        if statuses[index] in stop and groups[index] is not None:
            stopped.add(groups[index])
    assert batch.finished
    assert len(set(ran)) == len(ran)
    for index, outcome in batch.outcomes.items():
        if index in ran:
            assert outcome == Outcome(statuses[index], stdout=str(index))
        else:
            assert outcome.status == "skipped"
            assert groups[index] in stopped


def run_batch(batch: Batch, seconds: list[float], workers: int = 2) -> list[int]:
    """Run a batch by a clock of its own; return the indices in the order in which the programs end."""
    now, ended, running = 0.0, [], []
    while not batch.finished:
        while (index := batch.take(workers)) is not None:
            running.append((now + seconds[index], index))
        now, index = min(running)
        running.remove((now, index))
        ended.append(index)
        batch.done(index, Outcome("ok", seconds=seconds[index]))
    return ended


def test_failed_group_has_a_budget_of_seconds():
    programs = [Program("pass", group=n % 2) for n in range(40)]

    def keep(index, outcome):
        return replace(outcome, status="rejected") if index == 4 else outcome

    batch = Batch(programs, failed_group_seconds=3.5, keep=keep)
    run_batch(batch, [1.0] * 40, workers=1)
    statuses = [batch.outcomes[index].status for index in range(40)]
    assert statuses[1::2] == ["ok"] * 20
    assert statuses[0::2] == ["ok", "ok", "rejected", *["ok"] * 4, *["skipped"] * 13]


@given(st.lists(st.dictionaries(st.text(), st.text() | st.integers() | st.none(), max_size=3), max_size=10))
def test_messages_arrive_whole_and_in_order(messages):
    ours, theirs = (Channel(end) for end in socket.socketpair())
    for message in messages:
        ours.send(message)
    arrived: list[dict] = []
    while ours.unsent:
        ours.flush()
        arrived += theirs.pump()
    arrived += theirs.pump()
    assert arrived == messages
    ours.close()
    theirs.pump()
    assert theirs.closed
    theirs.close()


@given(st.binary(max_size=40))
def test_parse_report_accepts_any_bytes(report):
    kind, _ = _parse_report(report)
    assert kind == "" or report[1:9] == (len(report) - 9).to_bytes(8, "big")
