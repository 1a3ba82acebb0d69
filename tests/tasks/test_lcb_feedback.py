import pytest
from hypothesis import given
from hypothesis import strategies as st

from credit_trl.tasks.lcb_cases import CUT_OFF, Cases, feedback, result_of, short_error
from tables import tables_of

TABLES = tables_of(__file__)

TRACEBACK, SHORT = TABLES["errors"]["three innermost frames"].values()


def cases_of(count: int, inputs=None) -> Cases:
    inputs = inputs or [f"in{place}" for place in range(count)]
    return Cases(inputs, [f"out{place}" for place in range(count)], "stdin", "", 6.0)


FORMS = {
    "wrong": "Test {number}: Wrong Answer\nInput: in{place}\nOutput: x\nExpected: out{place}",
    "error": "Test {number}: Runtime Error\n{short}\nInput: in{place}",
    "late": "Test {number}: Time Limit Exceeded (6 seconds)\nInput: in{place}",
}


def form(failure: str) -> str:
    """Text of a failure, given by its kind and the place of its test."""
    kind, place = failure.split()
    return FORMS[kind].format(number=int(place) + 1, place=place, short=SHORT)


@pytest.mark.parametrize(("statuses", "expected"), TABLES["shown"].values(), ids=TABLES["shown"])
def test_two_kinds_of_failure_are_shown(statuses, expected):
    expected = [form(failure) for failure in expected]
    cases = cases_of(len(statuses.split()))
    results = [result_of(cases, place, status, "x", TRACEBACK) for place, status in enumerate(statuses.split())]
    assert feedback(results) == ("\n\n".join(expected) or None)
    cut_off = feedback(results, truncated=True)
    assert cut_off == ("\n\n".join([CUT_OFF, *expected]) if expected else None)


@pytest.mark.parametrize(
    ("status", "heading"), [("memory", "Memory Limit Exceeded"), ("output_limit", "Output Limit Exceeded")]
)
def test_memory_and_output_limits_count_as_errors(status, heading):
    cases = cases_of(2)
    said = feedback([result_of(cases, 0, "passed"), result_of(cases, 1, status, error="more than 1 MiB")])
    assert said == f"Test 2: {heading}\nmore than 1 MiB\nInput: in1"


def test_shortest_wrong_answers_are_shown():
    cases = cases_of(3, inputs=["a" * 9, "b", "c\nc"])
    assert feedback([result_of(cases, place, "wrong", output) for place, output in enumerate(["x", "\n", "z"])]) == (
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
    cases = Cases(texts, texts, "stdin", "", 6.0)
    results = [result_of(cases, place, row[0], texts[place], texts[place]) for place, row in enumerate(rows)]
    said = feedback(results, truncated)
    assert (said is not None) == any(status not in ("passed", "skipped") for status, _, _ in rows)
    assert len((said or "").encode().decode()) <= 2000  # and it has no lone surrogate


@pytest.mark.parametrize("row", TABLES["errors"].values(), ids=TABLES["errors"])
def test_short_error_has_exception_and_frames(row):
    assert short_error(row["error"]) == row["short"]
