"""Comparison of a program's output with the expected one, by the rules of LiveCodeBench's own checker.

Standard outputs are stripped and split into lines at line feeds, and the lines are stripped. They are the same if they
have as many lines, and each pair is equal as text or token by token as decimal numbers. Return values are the same if
they are equal as Python values.
"""

from __future__ import annotations

import json
from decimal import Decimal, InvalidOperation

from credit_trl.tasks.lcb_cases import exact_integer


def same_output(printed: str, expected: str) -> bool:
    """Whether a program's standard output is the expected one."""
    printed_lines, expected_lines = _lines(printed), _lines(expected)
    return len(printed_lines) == len(expected_lines) and all(map(_same_line, printed_lines, expected_lines))


def same_value(returned: str, expected: str) -> bool:
    """Whether a return value is the expected one, both as JSON text.

    As in Python, `1`, `1.0` and `true` are equal, `0.1 + 0.2` is not `0.3`, and NaN equals nothing. Tuples are arrays
    in JSON, so a tuple equals a list.
    """
    try:
        # `parse_constant=float` makes a new object of each NaN: lists with the same NaN object would be equal
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
    except (InvalidOperation, ValueError):  # not a number, or a signalling NaN
        return False
