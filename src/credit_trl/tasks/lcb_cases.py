"""Tests of a programming problem: the form that the verifier uses, and the encoding of the hub's files."""

from __future__ import annotations

import base64
import binascii
import json
import pickletools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

LARGEST = 1 << 30  # bytes of unpacked tests; a few packed kilobytes could unpack to gigabytes

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
    except (ValueError, RecursionError) as error:
        raise ValueError(f"A code answer is the JSON text of an object with tests: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"A code answer is an object with tests, got {type(data).__name__}.")
    inputs, outputs = (_texts(data, field) for field in ("inputs", "outputs"))
    if len(inputs) != len(outputs) or not inputs:
        raise ValueError(
            f"A code answer needs as many outputs as inputs, one at least, got {len(outputs)} and {len(inputs)}."
        )
    limit = data.get("time_limit")
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not 0 < limit < 3600:
        raise ValueError(f"A code answer's `time_limit` is a number of seconds, got {limit!r}.")
    if data.get("testtype") not in ("stdin", "functional"):
        raise ValueError(f"A code answer's `testtype` is 'stdin' or 'functional', got {data.get('testtype')!r}.")
    if data["testtype"] == "stdin":
        return Cases(inputs, outputs, None, float(limit))
    fn_name = data.get("fn_name")
    if not isinstance(fn_name, str) or not fn_name.isidentifier():
        raise ValueError(f"A functional code answer names its function in `fn_name`, got {fn_name!r}.")
    cases = Cases(inputs, outputs, fn_name, float(limit))
    for index, (given, expected) in enumerate(zip(inputs, outputs, strict=True)):
        try:
            for line in (*given.split("\n"), expected):
                json.loads(line, parse_int=exact_integer)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"Functional test {index} is not JSON, one argument per line: {error}") from error
    return cases


def answer_of(cases: Sequence[dict[str, Any]], fn_name: str, time_limit: float) -> str:
    """The `answer` for test cases in the hub's form, `{"input", "output", "testtype"}`, which must be of one type."""
    for index, case in enumerate(cases):
        if not isinstance(case, dict) or not all(isinstance(case.get(key), str) for key in ("input", "output")):
            raise ValueError(f"Test {index} is not an object with the texts `input` and `output`.")
    kinds = sorted({str(case.get("testtype")) for case in cases})
    if len(kinds) != 1:
        raise ValueError(f"The tests of a problem need one `testtype`, got {', '.join(kinds) or 'no tests'}.")
    inputs, outputs = ([case[key] for case in cases] for key in ("input", "output"))
    answer = {"inputs": inputs, "outputs": outputs, "testtype": kinds[0], "fn_name": fn_name, "time_limit": time_limit}
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
    try:
        packed = base64.b64decode(text, validate=True)
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(packed, LARGEST)
    except (binascii.Error, zlib.error, ValueError) as error:
        raise ValueError(f"neither JSON nor base64 of zlib: {error}") from error
    if unpacker.unconsumed_tail:
        raise ValueError(f"unpacks to more than {LARGEST} bytes")
    if not unpacker.eof:
        raise ValueError("the packed data is cut off")
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


def _texts(data: dict[str, Any], field: str) -> tuple[str, ...]:
    values = data.get(field)
    if not isinstance(values, list | tuple) or not all(isinstance(value, str) for value in values):
        raise ValueError(f"A code answer's `{field}` is a list of texts.")
    return tuple(values)


def exact_integer(digits: str) -> int | tuple[str]:
    """Parse an integer in JSON. Too many digits for `int` give `(digits,)`, which equals no other JSON value."""
    return int(digits) if len(digits) <= _DIGITS else (digits,)
