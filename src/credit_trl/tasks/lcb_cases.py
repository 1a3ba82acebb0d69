"""A programming problem's tests: the checked form that a verifier runs, and the encoded form that the hub stores."""

from __future__ import annotations

import base64
import binascii
import json
import pickletools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

LARGEST = 1 << 30  # bytes of unpacked tests; a few kilobytes can be packed to say any number of gigabytes

_DIGITS = 4300  # of an integer that `int` reads by default

# A pickle that holds one text and nothing else: how protocols 0 to 5 write `pickle.dumps("...")`.
_TEXT = {"UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"}
_AROUND_IT = {"PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "STOP"}


@dataclass(frozen=True)
class Cases:
    """The tests of one problem, `inputs[i]` with `outputs[i]`.

    Args:
        inputs: standard input, or the arguments as JSON, one a line.
        outputs: standard output, or the return value as JSON.
        fn_name: function to call; `None` where programs read standard input.
        time_limit: seconds for one test.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    fn_name: str | None
    time_limit: float

    def __len__(self) -> int:
        return len(self.inputs)

    def arguments(self, index: int) -> str:
        """The arguments of a functional test as the JSON text of an array."""
        return f"[{', '.join(self.inputs[index].split(chr(10)))}]"


def parse_answer(answer: str | dict[str, Any]) -> Cases:
    """Read a data set's `answer`: JSON text, or the object itself.

    Raises:
        ValueError: not `{"inputs", "outputs", "testtype", "fn_name", "time_limit"}`; the message names what is wrong
            with which of them.
    """
    try:
        data = json.loads(answer) if isinstance(answer, str) else answer
    except (ValueError, RecursionError) as error:
        raise ValueError(f"A code answer is the JSON text of an object with tests: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"A code answer is an object with tests, got {type(data).__name__}.")
    inputs, outputs = _texts(data, "inputs"), _texts(data, "outputs")
    if len(inputs) != len(outputs) or not inputs:
        raise ValueError(
            f"A code answer needs as many outputs as inputs, one at least: {len(inputs)}, {len(outputs)}."
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
    for index, (given, expected) in enumerate(zip(inputs, outputs, strict=True)):
        _check_functional(index, given, expected)
    return Cases(inputs, outputs, fn_name, float(limit))


def answer_of(cases: Sequence[dict[str, Any]], fn_name: str, time_limit: float) -> str:
    """The `answer` for test cases in the hub's form, `{"input", "output", "testtype"}`.

    Raises:
        ValueError: no tests, tests of several types, or any that `parse_answer` refuses.
    """
    for index, case in enumerate(cases):
        if not isinstance(case, dict) or not all(isinstance(case.get(key), str) for key in ("input", "output")):
            raise ValueError(f"Test {index} is no object with the texts `input` and `output`.")
        if not isinstance(case.get("testtype"), str | None):
            raise ValueError(f"Test {index} has a `testtype` that is no text.")
    kinds = {case.get("testtype") for case in cases}
    if len(kinds) != 1:
        raise ValueError(
            f"Cases have one `testtype`, these have {sorted(map(repr, kinds)) or 'none: there are none'}."
        )
    answer = json.dumps(
        {
            "inputs": [case["input"] for case in cases],
            "outputs": [case["output"] for case in cases],
            "testtype": kinds.pop(),
            "fn_name": fn_name,
            "time_limit": time_limit,
        }
    )
    parse_answer(answer)
    return answer


def decode_cases(text: str) -> list[Any]:
    """Test cases as the hub stores them: a JSON list, or base64 of zlib of a pickle of such a text.

    The pickle is never loaded. Its opcodes are read one by one, and it is refused unless they spell one text and
    nothing else, which is all that the hub's files hold.

    Raises:
        ValueError: it is neither form, or unpacks to more than `LARGEST` bytes.
    """
    try:
        try:
            cases = json.loads(text)
        except ValueError:
            cases = json.loads(_pickled_text(_unpacked(text)))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(cases, list):
        raise ValueError(f"a list of tests is needed, got {type(cases).__name__}")
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
        raise ValueError("cut off: the packed data has no end")
    return data


def _pickled_text(data: bytes) -> str:
    texts: list[str] = []
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name in _TEXT:
            texts.append(argument)
        elif opcode.name not in _AROUND_IT:
            raise ValueError(f"refused: a pickle with the opcode {opcode.name}; only one of a single text is read")
    if len(texts) != 1:
        raise ValueError(f"refused: a pickle with {len(texts)} texts; only one of a single text is read")
    return texts[0]


def _texts(data: dict[str, Any], field: str) -> tuple[str, ...]:
    values = data.get(field)
    if not isinstance(values, list | tuple) or not all(isinstance(value, str) for value in values):
        raise ValueError(f"A code answer's `{field}` is a list of texts.")
    return tuple(values)


def exact_integer(digits: str) -> int | tuple[str]:
    """An integer in JSON; one with more digits than `int` takes is `(digits,)`, which equals nothing else in JSON."""
    return int(digits) if len(digits) <= _DIGITS else (digits,)


def _check_functional(index: int, given: str, expected: str) -> None:
    try:
        for line in given.split("\n"):
            json.loads(line)
        json.loads(expected, parse_int=exact_integer)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"Functional test {index} is not JSON, one argument a line: {error}") from error
