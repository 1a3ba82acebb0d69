"""Tests of a programming problem: the verifier's form, the hub's encoding, and the comparison of outputs.

Outputs are compared by the rules of LiveCodeBench's own checker.
"""

from __future__ import annotations

import base64
import json
import pickletools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

LARGEST = 1 << 30  # bytes of unpacked tests; a few packed kilobytes could unpack to gigabytes
FIELDS = ("inputs", "outputs", "testtype", "fn_name", "time_limit")  # of an answer

_DIGITS = 4300  # largest number of digits of an integer that `int` reads by default
# Opcodes of `pickle.dumps("...")` in the protocols 0 to 5.
_TEXT = {"UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"}
_AROUND_IT = {"PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "STOP"}


@dataclass(frozen=True)
class Cases:
    """Tests of one problem: `inputs[i]` and `outputs[i]` belong together.

    Inputs are texts on standard input, and outputs what a program prints. If `testtype` is `"functional"`, inputs are
    arguments of the function `fn_name` as JSON, one per line, and outputs return values as JSON. `time_limit` is in
    seconds per test.
    """

    inputs: list[str]
    outputs: list[str]
    testtype: str
    fn_name: str
    time_limit: float

    @property
    def is_functional(self) -> bool:
        return self.testtype == "functional"


def parse_answer(answer: str | dict[str, Any]) -> Cases:
    """Read an `answer` of the data set, as JSON text or as an object; the `ValueError` names the wrong field."""
    try:
        data = json.loads(answer) if isinstance(answer, str) else answer
        cases = Cases(*(data[field] for field in FIELDS))
    except (ValueError, RecursionError, TypeError, KeyError) as error:
        shown = f"{', '.join(FIELDS)}, or its JSON text, got {answer!r:.100}"
        raise ValueError(f"A code answer is an object with {shown}.") from error
    given, expected = cases.inputs, cases.outputs
    if not _are_texts(given) or not _are_texts(expected) or len(given) != len(expected):
        problem = "`inputs` and `outputs` are lists of texts with the same length, 1 or more"
    elif not isinstance(cases.time_limit, int | float) or not 0 < cases.time_limit < 3600:
        problem = f"`time_limit` is a number of seconds, got {cases.time_limit!r}"
    elif cases.testtype not in ("stdin", "functional"):
        problem = f"`testtype` is 'stdin' or 'functional', got {cases.testtype!r}"
    elif cases.is_functional and not str(cases.fn_name).isidentifier():
        problem = f"`fn_name` is the name of the function that is tested, got {cases.fn_name!r}"
    else:
        problem = _problem_of_json(cases) if cases.is_functional else None
    if problem is not None:
        raise ValueError(f"A code answer's {problem}.")
    return cases


def _are_texts(values: Any) -> bool:
    return isinstance(values, list) and values != [] and all(isinstance(value, str) for value in values)


def _problem_of_json(cases: Cases) -> str | None:
    for index, (given, expected) in enumerate(zip(cases.inputs, cases.outputs, strict=True)):
        try:
            for line in (*given.split("\n"), expected):
                json.loads(line, parse_int=_exact_integer)
        except (ValueError, RecursionError) as error:
            return f"functional test {index} is not JSON, one argument per line: {error}"
    return None


def answer_of(cases: Sequence[dict[str, Any]], fn_name: str, time_limit: float) -> str:
    """The `answer` for test cases in the hub's form, `{"input", "output", "testtype"}`, which must be of one type."""
    kinds = sorted({str(case["testtype"]) for case in cases})
    if len(kinds) != 1:
        raise ValueError(f"The tests of a problem need one `testtype`, got {', '.join(kinds) or 'no tests'}.")
    inputs, outputs = ([case[key] for case in cases] for key in ("input", "output"))
    answer = json.dumps(dict(zip(FIELDS, (inputs, outputs, kinds[0], fn_name, time_limit), strict=True)))
    parse_answer(answer)
    return answer


def decode_cases(text: str) -> list[Any]:
    """Read test cases in the hub's encoding: a JSON list, or base64 of zlib of a pickle of such a text.

    The pickle is never loaded. Its opcodes are read one by one, and it is refused unless it consists of one text.
    """
    try:
        cases = json.loads(text if text.lstrip().startswith("[") else _pickled_text(_unpacked(text)))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(cases, list):
        raise ValueError(f"tests must be a list, got {type(cases).__name__}")
    return cases


def _unpacked(text: str) -> bytes:
    unpacker = zlib.decompressobj()
    try:
        data = unpacker.decompress(base64.b64decode(text, validate=True), LARGEST)
    except (zlib.error, ValueError) as error:
        raise ValueError(f"neither JSON nor base64 of zlib: {error}") from error
    if not unpacker.eof:
        raise ValueError(f"unpacks to more than {LARGEST} bytes" if unpacker.unconsumed_tail else "is cut off")
    return data


def _pickled_text(data: bytes) -> str:
    """The only text of a pickle, without loading it."""
    texts: list[str] = []
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name in _TEXT and not texts:
            texts.append(argument)
        elif opcode.name not in _AROUND_IT:
            raise ValueError(f"a pickle of tests must be a single text, got the opcode {opcode.name}")
    return "".join(texts)


def _exact_integer(digits: str) -> int | tuple[str]:
    """Parse an integer in JSON. Too many digits for `int` give `(digits,)`, which equals no other JSON value."""
    return int(digits) if len(digits) <= _DIGITS else (digits,)


def same_output(printed: str, expected: str) -> bool:
    """Whether a program's standard output is the expected one.

    Both are stripped and split into lines at line feeds, and the lines are stripped. There are as many lines, and each
    pair is equal as text or token by token as decimal numbers.
    """
    ours, theirs = ([line.strip() for line in text.strip().split("\n")] for text in (printed, expected))
    return len(ours) == len(theirs) and all(map(_same_line, ours, theirs))


def same_return_value(returned: str, expected: str) -> bool:
    """Whether a return value is the expected one, both as JSON text.

    As in Python, `1`, `1.0` and `true` are equal, `0.1 + 0.2` is not `0.3`, and NaN equals nothing. Tuples are arrays
    in JSON, so a tuple equals a list.
    """
    try:
        # `parse_constant=float` makes a new object of each NaN: lists with the same NaN object would be equal
        given = json.loads(returned, parse_constant=float, parse_int=_exact_integer)
        return bool(given == json.loads(expected, parse_int=_exact_integer))
    except (ValueError, RecursionError):
        return False


def _same_line(printed: str, expected: str) -> bool:
    if printed == expected:
        return True
    try:
        pairs = zip(printed.split(), expected.split(), strict=True)
        return all(Decimal(token) == Decimal(other) for token, other in pairs)
    except (InvalidOperation, ValueError):  # not a number, a signalling NaN, or another number of tokens
        return False
