from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from credit_trl.tasks.lcb_cases import Cases
from credit_trl.tasks.lcb_feedback import CUT_OFF, Result, feedback, short_error

FRAME = 'Traceback (most recent call last):\n  File "program.py", line 1'
TRACEBACK = """\
Traceback (most recent call last):
  File "program.py", line 20, in <module>
    main()
  File "program.py", line 18, in main
    print(solve(read()))
  ... 7 more ...
  File "program.py", line 12, in solve
    return mean(values)
  File "program.py", line 3, in mean
    return sum(values) / len(values)
ZeroDivisionError: division by zero"""


def cases_of(count: int, inputs=None, outputs=None) -> Cases:
    inputs = inputs or [f"in{place}" for place in range(count)]
    outputs = outputs or [f"out{place}" for place in range(count)]
    return Cases(tuple(inputs), tuple(outputs), None, 6.0)


def test_passing_program_has_no_feedback():
    assert feedback(cases_of(2), [Result("passed", "out0"), Result("passed", "out1")]) is None


def test_runtime_error_precedes_other_failures():
    results = [
        Result.shortened("wrong", "x"),
        Result("timeout"),
        Result("runtime_error", error=TRACEBACK),
        Result("memory"),
    ]
    said = feedback(cases_of(4), results)
    assert said == (
        "Test 3: Runtime Error\n"
        "ZeroDivisionError: division by zero\n"
        "Line 3 in mean (program.py)\n    return sum(values) / len(values)\n"
        "Line 12 in solve (program.py)\n    return mean(values)\n"
        "Line 18 in main (program.py)\n    print(solve(read()))\n"
        "Input: in2"
    )
    assert "out2" not in said


@pytest.mark.parametrize(
    ("status", "heading"), [("memory", "Memory Limit Exceeded"), ("output_limit", "Output Limit Exceeded")]
)
def test_memory_and_output_limits_count_as_errors(status, heading):
    said = feedback(cases_of(2), [Result("timeout"), Result(status, error="more than 1 MiB")])
    assert said == f"Test 2: {heading}\nmore than 1 MiB\nInput: in1"


def test_time_out_precedes_wrong_answers():
    results = [Result.shortened("wrong", "x"), Result("timeout"), Result("skipped")]
    assert feedback(cases_of(3), results) == "Test 2: Time Limit Exceeded (6 seconds)\nInput: in1"


def test_two_shortest_wrong_answers_are_shown():
    cases = cases_of(3, inputs=["a" * 9, "b", "c\nc"], outputs=["1", "2", "3"])
    said = feedback(
        cases, [Result.shortened("wrong", "x"), Result.shortened("wrong", "y"), Result.shortened("wrong", "z")]
    )
    assert said == (
        "Test 2: Wrong Answer\nInput: b\nOutput: y\nExpected: 2\n\n"
        "Test 3: Wrong Answer\nInput:\nc\nc\nOutput: z\nExpected: 3"
    )


def test_empty_output_is_shown_as_empty():
    assert feedback(cases_of(1), [Result.shortened("wrong", "\n")]) == (
        "Test 1: Wrong Answer\nInput: in0\nOutput:\nExpected: out0"
    )


def test_truncation_is_reported_first():
    said = feedback(cases_of(1), [Result.shortened("wrong", "x")], truncated=True)
    assert said.startswith(f"{CUT_OFF}\n\nTest 1: Wrong Answer")
    assert feedback(cases_of(1), [Result("passed", "out0")], truncated=True) is None


STATUSES = st.sampled_from(["passed", "wrong", "runtime_error", "timeout", "memory", "output_limit", "skipped"])


@given(
    rows=st.lists(st.tuples(STATUSES, st.text(max_size=9), st.integers(1, 3000)), min_size=1, max_size=6),
    truncated=st.booleans(),
)
def test_feedback_is_short_for_any_results(rows, truncated):
    texts = [text * times for _, text, times in rows]
    cases = Cases(tuple(texts), tuple(texts), None, 6.0)
    said = feedback(
        cases, [Result(status, text, text) for (status, _, _), text in zip(rows, texts, strict=True)], truncated
    )
    failed = any(status not in ("passed", "skipped") for status, _, _ in rows)
    assert (said is not None) == failed
    if said is not None:
        assert len(said) <= 2000
        said.encode("utf-8")


def test_field_has_at_most_250_characters():
    said = feedback(cases_of(1, inputs=["i" * 999], outputs=["e" * 999]), [Result.shortened("wrong", "o" * 999)])
    assert [len(line.partition(": ")[2]) for line in said.split("\n")[1:]] == [250, 250, 250]
    assert said.endswith("e...")


@pytest.mark.parametrize(
    ("error", "short"),
    [
        ("", ""),
        ("more than 6 seconds", "more than 6 seconds"),
        ("NameError: the program defines no function 'f'", "NameError: the program defines no function 'f'"),
        (
            FRAME + "\n    x=(\nSyntaxError: '(' was never closed",
            "SyntaxError: '(' was never closed\nLine 1 (program.py)\n    x=(",
        ),
        (
            FRAME + ", in <module>\n    f()\nValueError: two\nlines",
            "ValueError: two\nlines\nLine 1 (program.py)\n    f()",
        ),
    ],
)
def test_short_error_has_exception_and_frames(error, short):
    assert short_error(error) == short


def test_short_error_with_message_like_a_frame():
    error = FRAME + ', in f\n    x\nE: m\n  File "y", line 2, in z\nend'
    assert "end" in short_error(error)
    assert len(short_error(error)) < 300
