import base64
import collections
import contextlib
import json
import pickle
import tracemalloc
import zlib
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from credit_trl.tasks.lcb_cases import decode_cases, parse_answer, same_output, same_return_value
from tables import rows_of, tables_of

TABLES = tables_of(__file__)


CASES = [{"input": "1\n", "output": "2\n", "testtype": "stdin"}]


def packed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 1)).decode()


@given(
    cases=st.lists(st.fixed_dictionaries({"input": st.text(), "output": st.text()}), max_size=3),
    protocol=st.integers(0, pickle.HIGHEST_PROTOCOL),
)
def test_packed_tests_round_trip(cases, protocol):
    text = json.dumps(cases, ensure_ascii=False)
    assert decode_cases(packed(pickle.dumps(text, protocol))) == cases


class Boom:
    def __reduce__(self):
        return (print, ("executed",))


REFUSED = {
    "a call": pickle.dumps(Boom()),
    "a call before the text": pickle.dumps(Boom(), 0)[:-1] + pickle.dumps(json.dumps(CASES), 0),
    "a global": pickle.dumps(collections.OrderedDict),
    "a list instead of its text": pickle.dumps(CASES),
    "cut off": pickle.dumps(json.dumps(CASES))[:-5],
    "no pickle": b"[]",
    "empty": b"",
    "an extension": b"\x80\x02\x82\x01.",
    "a persistent object": b"Pmodule\n.",
    "a text that is no JSON": pickle.dumps("not json"),
    "a text that is no list": pickle.dumps('{"input": "1"}'),
    "nested a hundred thousand deep": pickle.dumps("[" * 100_000),
}


@pytest.mark.parametrize("data", REFUSED.values(), ids=REFUSED)
def test_other_pickles_raise_and_are_not_executed(data, capfd):
    with pytest.raises(ValueError, match=r"\S"):
        decode_cases(packed(data))
    assert "executed" not in capfd.readouterr().out


@given(data=st.binary(max_size=200))
def test_any_packed_bytes_give_a_list_or_value_error(data):
    with contextlib.suppress(ValueError):
        assert isinstance(decode_cases(packed(data)), list)


MIB = 1 << 20
OVERSIZED = {  # of 65 MiB, or with values that take a hundred times as much memory as their text
    "one long text": lambda: packed(pickle.dumps(json.dumps([" " * 65 * MIB]))),
    "a list that is not packed": lambda: f"[{' ' * 65 * MIB}]",
    "base64 that is longer than all it can hold": lambda: "A" * 180 * MIB,
    "spaces before the list": lambda: " " * 180 * MIB + "[]",
    "millions of lists": lambda: packed(pickle.dumps(f"[{'[],' * 2 * MIB}[]]")),
    "millions of texts": lambda: packed(pickle.dumps('["a"' + ',"b"' * 2 * MIB + "]")),
    "millions of quotes": lambda: packed(pickle.dumps("[" + '"' * 2 * MIB)),
    "millions of opcodes": lambda: packed(b"\x80\x04" + b"\x94" * 60 * MIB),
}


@pytest.mark.parametrize("form_text", OVERSIZED.values(), ids=OVERSIZED)
def test_oversized_tests_raise_within_a_bounded_memory(form_text):
    text = form_text()
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"more than (67108864|1048576)|single text"):
        decode_cases(text)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * 64 * MIB


def test_tests_of_sixty_mebibytes_are_read():
    cases = [{"input": "1 2\n" * 8 * MIB, "output": '\\"' * 5 * MIB, "testtype": "stdin"}]
    assert decode_cases(packed(pickle.dumps(json.dumps(cases)))) == cases


@pytest.mark.parametrize(("answer", "message"), TABLES["malformed"])
def test_malformed_answer_raises(answer, message):
    with pytest.raises(ValueError, match=message):
        parse_answer(answer)


OUTPUTS = [
    *rows_of(__file__, "outputs"),
    {"case": "a million digits", "printed": "1" * 1_000_000, "expected": "1" * 1_000_000 + ".0", "same": True},
    {"case": "huge output", "printed": "6\n" * 1_000_000, "expected": "6", "same": False},
]


@pytest.mark.parametrize("row", OUTPUTS, ids=lambda row: row["case"])
def test_outputs_compare_by_line_as_text_or_numbers(row):
    assert same_output(row["printed"], row["expected"]) is row["same"]


@given(printed=st.text(alphabet="01. \n\ra-e_+"), expected=st.text(alphabet="01. \n\ra-e_+"))
def test_same_output_matches_reference_implementation(printed, expected):
    def number(token):
        try:
            return Decimal(token)
        except ArithmeticError:
            return None

    ours = [line.strip() for line in printed.strip().split("\n")]
    theirs = [line.strip() for line in expected.strip().split("\n")]
    same = len(ours) == len(theirs)
    for our_line, their_line in zip(ours, theirs, strict=False):
        values = [[number(token) for token in line.split()] for line in (our_line, their_line)]
        same = same and (our_line == their_line or (None not in values[0] + values[1] and values[0] == values[1]))
    assert same_output(printed, expected) == same


LONG = "9" * 5_000  # digits; `int` reads 4,300
VALUES = TABLES["values"] | {
    "an integer that is too long for int": (LONG, LONG, True),
    "another of that length": (LONG, f"{LONG[:-1]}8", False),
    "one of the other sign, in a list": (f"[-{LONG}]", f"[{LONG}]", False),
    "a list of a text of these digits": (f'["{LONG}"]', LONG, False),
    "too deep": ("[" * 100_000, "[1]", False),
    "too long a number": ("9" * 10_000, "9", False),
}


@pytest.mark.parametrize(("returned", "expected", "same"), VALUES.values(), ids=VALUES)
def test_return_values_compare_as_python_values(returned, expected, same):
    assert same_return_value(returned, expected) is same


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(value=JSON, expected=JSON)
def test_same_value_matches_python_equality(value, expected):
    assert same_return_value(json.dumps(value), json.dumps(value, ensure_ascii=False))
    assert same_return_value(json.dumps(value), json.dumps(expected)) == (value == expected)
