from __future__ import annotations

import base64
import collections
import contextlib
import json
import pickle
import zlib
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from credit_trl.tasks import lcb_cases
from credit_trl.tasks.lcb_cases import decode_cases, parse_answer, same_output, same_return_value


def packed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data)).decode()


CASES = [{"input": "1\n", "output": "2\n", "testtype": "stdin"}]

# ---- the hub's encoding ----


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


def test_oversized_packed_tests_raise(monkeypatch):
    monkeypatch.setattr(lcb_cases, "LARGEST", 1_000_000)
    with pytest.raises(ValueError, match="unpacks to more than 1000000 bytes"):
        decode_cases(packed(pickle.dumps(json.dumps([" " * 2_000_000]))))


# ---- the answer ----

ANSWER = {"inputs": ["1"], "outputs": ["2"], "testtype": "stdin", "fn_name": "", "time_limit": 6.0}
FUNCTIONAL = ANSWER | {"inputs": ["1\n[2]"], "testtype": "functional", "fn_name": "f"}


MALFORMED = [  # (answer, what the message names)
    ("no json", "JSON text"),
    (ANSWER | {"inputs": "1"}, "`inputs`"),
    (ANSWER | {"outputs": []}, "the same length"),
    (ANSWER | {"inputs": [], "outputs": []}, "1 or more"),
    (ANSWER | {"time_limit": 0}, "`time_limit`"),
    (ANSWER | {"testtype": "code"}, "`testtype`"),
    (FUNCTIONAL | {"fn_name": "a.b"}, "`fn_name`"),
    (FUNCTIONAL | {"inputs": ["1], [2"]}, "test 0 is not JSON"),
    (FUNCTIONAL | {"outputs": ["two"]}, "test 0 is not JSON"),
]


@pytest.mark.parametrize(("answer", "named"), MALFORMED)
def test_malformed_answer_raises(answer, named):
    with pytest.raises(ValueError, match=named):
        parse_answer(answer)


# ---- outputs ----

OUTPUTS = {  # reason: (printed, expected, same)
    "equal": ("6\n", "6\n", True),
    "no line feed at the end": ("6", "6\n", True),
    "different": ("7", "6", False),
    "CRLF": ("1\r\n2\r\n", "1\n2\n", True),
    "lone carriage returns are no lines": ("1\r2", "1\n2", False),
    "blank line inside": ("1\n\n2", "1\n2", False),
    "blanks around every line": ("  1  \n\t2\t", "1\n2", True),
    "blanks inside a line, numbers": ("1   2", "1 2", True),
    "blanks inside a line, words": ("a   b", "a b", False),
    "a line too many": ("1\n2\n3", "1\n2", False),
    "tokens on other lines": ("1 2", "1\n2", False),
    "decimal for integer": ("2.0", "2", True),
    "scientific": ("1e3", "1000", True),
    "no tolerance": ("0.30000000000000004", "0.3", False),
    "large integers are exact": ("50000000000000001", "50000000000000000", False),
    "large integers as decimals": ("50000000000000000.0", "50000000000000000", True),
    "underscores are digits to Decimal": ("1_000", "1000", True),
    "full-width digits are digits to Decimal": ("１２", "12", True),
    "NaN equals nothing": ("nan", "NaN", False),
    "signalling NaN": ("sNaN", "1", False),
    "infinity": ("inf", "Infinity", True),
    "a huge exponent": ("1e999999999999", "1", False),
    "a huge exponent twice": ("1e999999999", "10e999999998", True),
    "a million digits": ("1" * 1_000_000, "1" * 1_000_000 + ".0", True),
    "a word among numbers": ("1 x", "1 x", True),
    "a word among numbers, number written otherwise": ("1.0 x", "1 x", False),
    "cyrillic look-alike": ("УES", "YES", False),
    "no-break spaces around": ("\u00a06\u00a0", "6", True),
    "zero-width space": ("\u200b6", "6", False),
    "nothing printed": ("", "6", False),
    "nothing printed, nothing expected": ("\n", "", True),
    "huge output": ("6\n" * 1_000_000, "6", False),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize(("printed", "expected", "same"), OUTPUTS.values(), ids=OUTPUTS)
def test_outputs_compare_by_line_as_text_or_numbers(printed, expected, same):
    assert same_output(printed, expected) is same


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
    for one, other in zip(ours, theirs, strict=False):
        values = [[number(token) for token in line.split()] for line in (one, other)]
        same = same and (one == other or (None not in values[0] + values[1] and values[0] == values[1]))
    assert same_output(printed, expected) == same


LONG = "9" * 5_000  # digits; `int` reads 4,300
VALUES = {  # reason: (returned, expected, same)
    "an integer that is too long for int": (LONG, LONG, True),
    "another of that length": (LONG, f"{LONG[:-1]}8", False),
    "one of the other sign, in a list": (f"[-{LONG}]", f"[{LONG}]", False),
    "a list of a text of these digits": (f'["{LONG}"]', LONG, False),
    "integer and float": ("1.0", "1", True),
    "true and 1": ("true", "1", True),
    "no tolerance": ("0.30000000000000004", "0.3", False),
    "NaN equals nothing": ("NaN", "NaN", False),
    "infinity": ("Infinity", "Infinity", True),
    "surrounding white space in a text counts": ('" a"', '"a"', False),
    "white space around the JSON": (" [1]\n", "[1]", True),
    "not JSON": ("[1", "[1]", False),
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


@given(one=JSON, other=JSON)
def test_same_value_matches_python_equality(one, other):
    assert same_return_value(json.dumps(one), json.dumps(one, ensure_ascii=False))
    assert same_return_value(json.dumps(one), json.dumps(other)) == (one == other)
