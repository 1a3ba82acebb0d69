"""Tests of a programming problem: the verifier's form, the hub's encoding, and the comparison of outputs.

Outputs are compared by the rules of LiveCodeBench's own checker. Standard outputs are stripped and split into lines at
line feeds, and the lines are stripped. They are the same if they have as many lines, and each pair is equal as text or
token by token as decimal numbers. Return values are the same if they are equal as Python values.
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

_FIELDS = ("inputs", "outputs", "testtype", "fn_name", "time_limit")  # of an answer
_DIGITS = 4300  # largest number of digits of an integer that `int` reads by default

# Opcodes of `pickle.dumps("...")` in the protocols 0 to 5.
_TEXT = {"UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"}
_AROUND_IT = {"PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "STOP"}


@dataclass(frozen=True)
class Cases:
    """Tests of one problem: `inputs[i]` and `outputs[i]` belong together.

    Inputs are texts on standard input, and outputs what a program prints. With `fn_name`, the function to call, they
    are arguments as JSON, one per line, and return values as JSON. `time_limit` is in seconds per test.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    fn_name: str | None
    time_limit: float

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def arguments(self) -> list[str]:
        """Arguments of the functional tests, each as the JSON text of an array."""
        return [f"[{', '.join(given.split(chr(10)))}]" for given in self.inputs]


def parse_answer(answer: str | dict[str, Any]) -> Cases:
    """Read an `answer` of the data set, as JSON text or as an object; the `ValueError` names the wrong field."""
    try:
        data = json.loads(answer) if isinstance(answer, str) else answer
        inputs, outputs, kind, fn_name, limit = (data.get(field) for field in _FIELDS)
    except (ValueError, RecursionError, AttributeError) as error:
        shown = f"{', '.join(_FIELDS)}, or its JSON text, got {answer!r:.100}"
        raise ValueError(f"A code answer is an object with {shown}.") from error
    problem = None
    if not _are_texts(inputs) or not _are_texts(outputs) or len(inputs) != len(outputs) or not inputs:
        problem = "`inputs` and `outputs` are lists of texts with the same length, 1 or more"
    elif isinstance(limit, bool) or not isinstance(limit, int | float) or not 0 < limit < 3600:
        problem = f"`time_limit` is a number of seconds, got {limit!r}"
    elif kind not in ("stdin", "functional"):
        problem = f"`testtype` is 'stdin' or 'functional', got {kind!r}"
    elif kind == "functional" and not (isinstance(fn_name, str) and fn_name.isidentifier()):
        problem = f"`fn_name` is the name of the function that is tested, got {fn_name!r}"
    if problem is not None:
        raise ValueError(f"A code answer's {problem}.")
    if kind == "stdin":
        return Cases(tuple(inputs), tuple(outputs), None, float(limit))
    for index, (given, expected) in enumerate(zip(inputs, outputs, strict=True)):
        try:
            for line in (*given.split("\n"), expected):
                json.loads(line, parse_int=_exact_integer)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"Functional test {index} is not JSON, one argument per line: {error}") from error
    return Cases(tuple(inputs), tuple(outputs), fn_name, float(limit))


def _are_texts(values: Any) -> bool:
    return isinstance(values, list | tuple) and all(isinstance(value, str) for value in values)


def answer_of(cases: Sequence[dict[str, Any]], fn_name: str, time_limit: float) -> str:
    """The `answer` for test cases in the hub's form, `{"input", "output", "testtype"}`, which must be of one type."""
    kinds = sorted({str(case["testtype"]) for case in cases})
    if len(kinds) != 1:
        raise ValueError(f"The tests of a problem need one `testtype`, got {', '.join(kinds) or 'no tests'}.")
    inputs, outputs = ([case[key] for case in cases] for key in ("input", "output"))
    answer = dict(zip(_FIELDS, (inputs, outputs, kinds[0], fn_name, time_limit), strict=True))
    parse_answer(answer)
    return json.dumps(answer)


def decode_cases(text: str) -> list[Any]:
    """Read test cases in the hub's encoding: a JSON list, or base64 of zlib of a pickle of such a text.

    The pickle is never loaded. Its opcodes are read one by one, and it is refused unless it consists of one text.
    """
    try:
        try:
            cases = json.loads(text)
        except ValueError:
            cases = json.loads(_pickled_text(_unpacked(text)))
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
        if opcode.name in _TEXT:
            texts.append(argument)
        elif opcode.name not in _AROUND_IT:
            raise ValueError(f"a pickle of tests must be a single text, got the opcode {opcode.name}")
    if len(texts) != 1:
        raise ValueError(f"a pickle of tests must be a single text, got {len(texts)} texts")
    return texts[0]


def _exact_integer(digits: str) -> int | tuple[str]:
    """Parse an integer in JSON. Too many digits for `int` give `(digits,)`, which equals no other JSON value."""
    return int(digits) if len(digits) <= _DIGITS else (digits,)


def same_output(printed: str, expected: str) -> bool:
    """Whether a program's standard output is the expected one."""
    printed_lines, expected_lines = _lines(printed), _lines(expected)
    return len(printed_lines) == len(expected_lines) and all(map(_same_line, printed_lines, expected_lines))


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
