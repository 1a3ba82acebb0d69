"""Local sandboxes: input, output, return values, errors and limits of programs."""

import json
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from observing import PROGRAMS, SOURCES, check_outcome, run_one

from credit_trl.sandbox import Program

MIB = 1024 * 1024


@pytest.mark.parametrize("row", PROGRAMS, ids=lambda row: row["name"].replace(" ", "_"))
def test_program_has_the_outcome_of_the_table(sandbox, row):
    check_outcome(sandbox, row)


def test_outcomes_keep_program_order(any_sandbox):
    programs = [Program(f"import time; time.sleep({(7 * n) % 5 / 100}); print({n})") for n in range(12)]
    assert [outcome.stdout for outcome in any_sandbox.run(programs)] == [f"{n}\n" for n in range(12)]


def test_keep_replaces_each_outcome(any_sandbox):
    lengths: dict[int, int] = {}

    def keep(index, outcome):
        lengths[index] = len(outcome.stdout)
        return replace(outcome, stdout="")

    outcomes = any_sandbox.run([Program(f"print('x' * {n})") for n in range(5)], keep=keep)
    assert lengths == {n: n + 1 for n in range(5)}
    assert [(outcome.status, outcome.stdout) for outcome in outcomes] == [("ok", "")] * 5


def test_error_in_keep_propagates(any_sandbox):
    with pytest.raises(ZeroDivisionError):
        any_sandbox.run([Program("print(1)")] * 3, keep=lambda index, outcome: 1 // 0)
    assert run_one(any_sandbox, "print(2)").stdout == "2\n"


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=200))
def test_stdin_round_trips_any_text(sandbox, text):
    echo = "import sys; sys.stdout.buffer.write(sys.stdin.buffer.read())"
    assert run_one(sandbox, echo, stdin=text).stdout == text


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
        max_leaves=12,
    )
)
def test_call_round_trips_any_json_value(sandbox, value):
    outcome = run_one(sandbox, "def same(x): return x", fn_name="same", arguments=json.dumps([value]))
    assert outcome.status == "ok"
    assert json.loads(outcome.value) == value


def test_lone_surrogates_and_invalid_utf8(sandbox):
    assert run_one(sandbox, "print(ascii(input()))", stdin="\ud800").status == "ok"
    assert run_one(sandbox, "'\ud800'").status == "runtime_error"


def test_large_input_and_output(sandbox):
    text = "0123456789abcde\n" * (3 * MIB // 16)
    assert run_one(sandbox, "import sys; sys.stdout.write(sys.stdin.read())", stdin=text).stdout == text


def test_traceback_is_short_without_paths(sandbox):
    error = run_one(sandbox, SOURCES["traceback"], prelude="a = 1\n" * 50).error
    assert 'File "program.py", line 3, in inner' in error
    assert "JSONDecodeError" in error.splitlines()[-1]
    assert "/" not in error
    deep = run_one(sandbox, "def f(n): return f(n + 1)\nf(0)").error
    assert len(deep.splitlines()) < 25
