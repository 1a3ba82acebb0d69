from __future__ import annotations

import json
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from credit_trl.tasks.lcb_checker import same_output, same_value

OUTPUTS = {  # reason: (printed, expected, same)
    "equal": ("6\n", "6\n", True),
    "no line feed at the end": ("6", "6\n", True),
    "line feeds and blanks around": ("\n\n  6 \n\n", "6", True),
    "different": ("7", "6", False),
    "CRLF": ("1\r\n2\r\n", "1\n2\n", True),
    "lone carriage returns are no lines": ("1\r2", "1\n2", False),
    "blank line inside": ("1\n\n2", "1\n2", False),
    "blank line inside, both": ("1\n\n2", "1\n \n2", True),
    "blanks around every line": ("  1  \n\t2\t", "1\n2", True),
    "blanks inside a line, numbers": ("1   2", "1 2", True),
    "blanks inside a line, words": ("a   b", "a b", False),
    "a line too many": ("1\n2\n3", "1\n2", False),
    "a line too few": ("1", "1\n2", False),
    "tokens on other lines": ("1 2", "1\n2", False),
    "a token too many": ("1 2 3", "1 2", False),
    "decimal for integer": ("2.0", "2", True),
    "trailing zeros": ("2.50", "2.5", True),
    "leading zeros": ("007", "7", True),
    "plus sign": ("+7", "7", True),
    "scientific": ("1e3", "1000", True),
    "no tolerance": ("0.30000000000000004", "0.3", False),
    "large integers are exact": ("50000000000000001", "50000000000000000", False),
    "large integers as decimals": ("50000000000000000.0", "50000000000000000", True),
    "negative zero": ("-0", "0", True),
    "underscores are digits to Decimal": ("1_000", "1000", True),
    "full-width digits are digits to Decimal": ("１２", "12", True),
    "thousands separator": ("1,000", "1000", False),
    "hexadecimal": ("0x10", "16", False),
    "fraction": ("1/2", "0.5", False),
    "NaN equals nothing": ("nan", "NaN", False),
    "NaN, the same text": ("NaN", "NaN", True),
    "signalling NaN": ("sNaN", "1", False),
    "infinity": ("inf", "Infinity", True),
    "infinity of the other sign": ("-inf", "inf", False),
    "a huge exponent": ("1e999999999999", "1", False),
    "a huge exponent twice": ("1e999999999", "10e999999998", True),
    "a million digits": ("1" * 1_000_000, "1" * 1_000_000 + ".0", True),
    "words in another case": ("YES", "Yes", False),
    "a word among numbers": ("1 x", "1 x", True),
    "a word among numbers, number written otherwise": ("1.0 x", "1 x", False),
    "cyrillic look-alike": ("УES", "YES", False),
    "no-break spaces around": ("\u00a06\u00a0", "6", True),
    "zero-width space": ("\u200b6", "6", False),
    "nothing printed": ("", "6", False),
    "nothing printed, nothing expected": ("\n", "", True),
    "something printed, nothing expected": ("0", "", False),
    "null byte": ("6\x00", "6", False),
    "huge output": ("6\n" * 1_000_000, "6", False),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize(("printed", "expected", "same"), OUTPUTS.values(), ids=OUTPUTS)
def test_outputs_compare_by_line_as_text_or_numbers(printed, expected, same):
    assert same_output(printed, expected) is same


LINES = st.lists(st.lists(st.decimals(allow_nan=False, allow_infinity=False, places=2), min_size=1), min_size=1)


@given(lines=LINES, blanks=st.sampled_from([" ", "  ", "\t"]), end=st.sampled_from(["", "\n", " \n\n"]))
def test_number_formats_are_equivalent(lines, blanks, end):
    expected = "\n".join(" ".join(map(str, line)) for line in lines)
    printed = "\n".join(blanks.join(f"{number:E}" for number in line) for line in lines) + end
    assert same_output(printed, expected)


@given(one=st.lists(st.integers(-3, 3), min_size=1, max_size=3), other=st.lists(st.integers(-3, 3), min_size=1))
def test_lines_of_integers_compare_as_lists(one, other):
    assert same_output(" ".join(map(str, one)), " ".join(f"{number}.0" for number in other)) == (one == other)


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
    "a text of these digits": (f'"{LONG}"', LONG, False),
    "a list of a text of these digits": (f'["{LONG}"]', LONG, False),
    "equal": ("[1, 2]", "[1,2]", True),
    "order of a list": ("[2, 1]", "[1,2]", False),
    "order of an object": ('{"b": 1, "a": 2}', '{"a": 2, "b": 1}', True),
    "integer and float": ("1.0", "1", True),
    "true and 1": ("true", "1", True),
    "text and number": ('"1"', "1", False),
    "null and zero": ("null", "0", False),
    "null and an empty list": ("null", "[]", False),
    "no tolerance": ("0.30000000000000004", "0.3", False),
    "NaN equals nothing": ("NaN", "NaN", False),
    "NaN in a list equals nothing": ("[NaN]", "[NaN]", False),
    "infinity": ("Infinity", "Infinity", True),
    "text in another case": ('"Yes"', '"yes"', False),
    "escaped text": ('"\\u00e9"', '"é"', True),
    "surrounding white space in a text counts": ('" a"', '"a"', False),
    "white space around the JSON": (" [1]\n", "[1]", True),
    "nested": ("[[1], [2, [3]]]", "[[1],[2,[3]]]", True),
    "not JSON": ("[1", "[1]", False),
    "empty": ("", "[1]", False),
    "too deep": ("[" * 100_000, "[1]", False),
    "too long a number": ("9" * 10_000, "9", False),
}


@pytest.mark.parametrize(("returned", "expected", "same"), VALUES.values(), ids=VALUES)
def test_return_values_compare_as_python_values(returned, expected, same):
    assert same_value(returned, expected) is same


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(one=JSON, other=JSON)
def test_same_value_matches_python_equality(one, other):
    assert same_value(json.dumps(one), json.dumps(one, ensure_ascii=False))
    assert same_value(json.dumps(one), json.dumps(other)) == (one == other)
