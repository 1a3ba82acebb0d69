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
SHORT = """\
ZeroDivisionError: division by zero
Line 3 in mean (program.py)
    return sum(values) / len(values)
Line 12 in solve (program.py)
    return mean(values)
Line 18 in main (program.py)
    print(solve(read()))"""


def cases_of(count: int, inputs=None) -> Cases:
    inputs = inputs or [f"in{place}" for place in range(count)]
    return Cases(tuple(inputs), tuple(f"out{place}" for place in range(count)), None, 6.0)


def wrong(place: int) -> str:
    return f"Test {place + 1}: Wrong Answer\nInput: in{place}\nOutput: x\nExpected: out{place}"


def errs(place: int) -> str:
    return f"Test {place + 1}: Runtime Error\n{SHORT}\nInput: in{place}"


def late(place: int) -> str:
    return f"Test {place + 1}: Time Limit Exceeded (6 seconds)\nInput: in{place}"


SHOWN = {  # reason: (statuses of the tests, failures that the feedback shows)
    "none failed": ("passed passed", []),
    "the paper's box": ("wrong runtime_error", [wrong(0), errs(1)]),
    "the first of each kind, by test": ("runtime_error wrong runtime_error wrong passed", [errs(0), wrong(1)]),
    "a wrong answer and an error before a time-out": ("timeout wrong runtime_error", [wrong(1), errs(2)]),
    "one error": ("passed runtime_error runtime_error", [errs(1)]),
    "an error and a time-out": ("timeout runtime_error skipped", [late(0), errs(1)]),
    "a wrong answer and a time-out": ("wrong wrong timeout skipped", [wrong(0), late(2)]),
    "one time-out": ("passed timeout skipped deadline", [late(1)]),
    "two wrong answers": ("wrong passed wrong wrong", [wrong(0), wrong(2)]),
}


@pytest.mark.parametrize(("statuses", "shown"), SHOWN.values(), ids=SHOWN)
def test_two_kinds_of_failure_are_shown(statuses, shown):
    results = [Result(status, "x", TRACEBACK) for status in statuses.split()]
    assert feedback(cases_of(len(results)), results) == ("\n\n".join(shown) or None)
    cut_off = feedback(cases_of(len(results)), results, truncated=True)
    assert cut_off == ("\n\n".join([CUT_OFF, *shown]) if shown else None)


@pytest.mark.parametrize(
    ("status", "heading"), [("memory", "Memory Limit Exceeded"), ("output_limit", "Output Limit Exceeded")]
)
def test_memory_and_output_limits_count_as_errors(status, heading):
    said = feedback(cases_of(2), [Result("passed"), Result(status, error="more than 1 MiB")])
    assert said == f"Test 2: {heading}\nmore than 1 MiB\nInput: in1"


def test_shortest_wrong_answers_are_shown():
    cases = cases_of(3, inputs=["a" * 9, "b", "c\nc"])
    assert feedback(cases, [Result.shortened("wrong", output) for output in ("x", "\n", "z")]) == (
        "Test 2: Wrong Answer\nInput: b\nOutput:\nExpected: out1\n\n"
        "Test 3: Wrong Answer\nInput:\nc\nc\nOutput: z\nExpected: out2"
    )


STATUSES = st.sampled_from(["passed", "wrong", "runtime_error", "timeout", "memory", "output_limit", "skipped"])


@given(
    rows=st.lists(st.tuples(STATUSES, st.text(max_size=9), st.integers(1, 3000)), min_size=1, max_size=6),
    truncated=st.booleans(),
)
def test_feedback_has_at_most_2000_characters(rows, truncated):
    texts = [text * times for _, text, times in rows]
    results = [Result(status, text, text) for (status, _, _), text in zip(rows, texts, strict=True)]
    said = feedback(Cases(tuple(texts), tuple(texts), None, 6.0), results, truncated)
    assert (said is not None) == any(status not in ("passed", "skipped") for status, _, _ in rows)
    assert len((said or "").encode().decode()) <= 2000  # and it has no lone surrogate


ERRORS = {  # reason: (error, short form)
    "none": ("", ""),
    "a reason": ("more than 6 seconds", "more than 6 seconds"),
    "no frames": ("NameError: the program defines no 'f'", "NameError: the program defines no 'f'"),
    "three innermost frames": (TRACEBACK, SHORT),
    "a syntax error": (
        FRAME + "\n    x=(\nSyntaxError: '(' was never closed",
        "SyntaxError: '(' was never closed\nLine 1 (program.py)\n    x=(",
    ),
    "a message of two lines": (
        FRAME + ", in <module>\n    f()\nValueError: two\nlines",
        "ValueError: two\nlines\nLine 1 (program.py)\n    f()",
    ),
    "a message like a frame": (
        FRAME + ', in f\n    x\nE: m\n  File "y", line 2, in z\nend',
        "end\nLine 2 in z (y)\nLine 1 in f (program.py)\n    x",
    ),
}


@pytest.mark.parametrize(("error", "short"), ERRORS.values(), ids=ERRORS)
def test_short_error_has_exception_and_frames(error, short):
    assert short_error(error) == short
