"""Whether a program's output is the expected one, by the rules of LiveCodeBench's own checker.

Standard output: both texts are stripped and cut into lines at line feeds, lines are stripped; there must be as many,
and each must be equal as text, or equal token by token as decimal numbers. Return values: equal as Python values.
"""

from __future__ import annotations

import json
from decimal import Decimal, InvalidOperation

from credit_trl.tasks.lcb_cases import exact_integer


def same_output(printed: str, expected: str) -> bool:
    """Whether what a program printed is the expected output."""
    printed_lines, expected_lines = _lines(printed), _lines(expected)
    return len(printed_lines) == len(expected_lines) and all(map(_same_line, printed_lines, expected_lines))


def same_value(returned: str, expected: str) -> bool:
    """Whether a return value is the expected one, both as JSON text.

    Values compare as Python's do: `1`, `1.0` and `true` are equal, `0.1 + 0.2` is not `0.3`, NaN equals nothing.
    Tuples have become arrays in JSON, so a tuple counts as a list at any depth.
    """
    try:
        # float makes a new object of every NaN: lists of one and the same NaN would be equal by identity
        given = json.loads(returned, parse_constant=float, parse_int=exact_integer)
        return bool(given == json.loads(expected, parse_int=exact_integer))
    except (ValueError, RecursionError):
        return False


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().split("\n")]


def _same_line(printed: str, expected: str) -> bool:
    if printed == expected:
        return True
    tokens, wanted = printed.split(), expected.split()
    if len(tokens) != len(wanted):
        return False
    try:
        return all(Decimal(token) == Decimal(other) for token, other in zip(tokens, wanted, strict=True))
    except (InvalidOperation, ValueError):  # not a number, or a signalling NaN, which does not even compare
        return False
