"""Tests of a programming problem: the verifier's form, the hub's encoding, the comparison of outputs, and feedback.

Outputs are compared by the rules of LiveCodeBench's own checker. Feedback has the form of the paper's examples.
"""

import base64
import json
import pickletools
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

LARGEST = 64 << 20  # bytes of a problem's unpacked tests; a few packed kilobytes could unpack to gigabytes
LARGEST_STRUCTURE = 1 << 20  # characters of their JSON outside of texts; each could be a value of a hundred bytes
Answer = str | dict[str, Any]  # of the data set, as JSON text or as an object
FIELDS = ("inputs", "outputs", "testtype", "fn_name", "time_limit")  # of an answer

FIELD = 250  # characters of an input, an output, an expected output, or an exception's message
TOTAL = 2_000
SHOWN_FAILURES = 2
FRAMES = 3

WRONG_FORMAT = (
    "Wrong Format: no program was found. Give the whole program in one fenced code block:\n```python\n# program\n```"
)
CUT_OFF = (
    "Response Cut Off: the response reached the maximum length before it was finished. Give a shorter response that "
    "ends with the whole program."
)
ERRORS = {
    "runtime_error": "Runtime Error",
    "memory": "Memory Limit Exceeded",
    "output_limit": "Output Limit Exceeded",
}
HEADINGS = {"wrong": "Wrong Answer", "timeout": "Time Limit Exceeded", **ERRORS}

_DIGITS = 4300  # largest number of digits of an integer that `int` reads by default
# Opcodes of `pickle.dumps("...")` in the protocols 0 to 5.
_TEXT = {"UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"}
_AROUND_IT = {"PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "STOP"}
_MOST_OPCODES = 8


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


def parse_answer(answer: Answer) -> Cases:
    """Read an `answer` of the data set, as JSON text or as an object; the `ValueError` names the wrong field."""
    try:
        data = json.loads(answer) if isinstance(answer, str) else answer
        cases = Cases(*(data[field] for field in FIELDS))
    except (ValueError, RecursionError, TypeError, KeyError) as error:
        expected_form = f"{', '.join(FIELDS)}, or its JSON text, got {answer!r:.100}"
        raise ValueError(f"A code answer is an object with {expected_form}.") from error
    are_lists = isinstance(cases.inputs, list) and isinstance(cases.outputs, list)
    are_texts = are_lists and {str}.issuperset(map(type, cases.inputs + cases.outputs))
    is_number = isinstance(cases.time_limit, int | float)
    rules = {
        "`inputs` and `outputs` are lists of texts": are_texts,
        "`inputs` and `outputs` have the same length, 1 or more": are_texts
        and 0 < len(cases.inputs) == len(cases.outputs),
        "`time_limit` is a number of seconds": is_number and 0 < cases.time_limit < 3600,
        "`testtype` is 'stdin' or 'functional'": cases.testtype in ("stdin", "functional"),
        "`fn_name` is the name of a function": not cases.is_functional or str(cases.fn_name).isidentifier(),
    }
    for rule, is_met in rules.items():
        if not is_met:
            raise ValueError(f"A code answer's {rule}, got {data!r:.200}.")
    functional = zip(cases.inputs, cases.outputs, strict=True) if cases.is_functional else ()
    for index, (arguments, expected) in enumerate(functional):
        try:
            for line in (*arguments.split("\n"), expected):
                json.loads(line, parse_int=_exact_integer)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"Functional test {index} is not JSON, one argument per line: {error}") from error
    return cases


def decode_cases(text: str) -> list[Any]:
    """Read test cases in the hub's encoding: a JSON list, or base64 of zlib of a pickle of such a text.

    The pickle is never loaded. Its opcodes are read one by one, and it is refused unless it consists of one text.

    Raises:
        ValueError: another encoding, or tests of more than `LARGEST` bytes or `LARGEST_STRUCTURE` characters.
    """
    is_packed = not text[:100].lstrip().startswith("[")
    if len(text) > (2 * LARGEST if is_packed else LARGEST):  # base64 is longer by a third
        raise ValueError(f"has {len(text)} characters, with more than {LARGEST} bytes of tests")
    tests = _pickled_text(_unpacked(text)) if is_packed else text
    unescaped = tests.replace("\\\\", "").replace('\\"', "")
    if unescaped.count('"') > LARGEST_STRUCTURE or sum(map(len, unescaped.split('"')[::2])) > LARGEST_STRUCTURE:
        raise ValueError(f"has more than {LARGEST_STRUCTURE} quotes, or as many characters outside of them")
    try:
        cases = json.loads(tests)
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
    for count, (opcode, argument, _) in enumerate(pickletools.genops(data), 1):
        if opcode.name in _TEXT and not texts:
            texts.append(argument)
        elif opcode.name not in _AROUND_IT or count > _MOST_OPCODES:
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
    ours = printed.strip().split("\n")
    theirs = expected.strip().split("\n")
    return len(ours) == len(theirs) and all(map(_same_line, ours, theirs))


def same_return_value(returned: str, expected: str) -> bool:
    """Whether a return value is the expected one, both as JSON text.

    As in Python, `1`, `1.0` and `true` are equal, `0.1 + 0.2` is not `0.3`, and NaN equals nothing. Tuples are arrays
    in JSON, so a tuple equals a list.
    """
    try:
        # `parse_constant=float` makes a new object of each NaN: lists with the same NaN object would be equal
        value = json.loads(returned, parse_constant=float, parse_int=_exact_integer)
        return bool(value == json.loads(expected, parse_int=_exact_integer))
    except (ValueError, RecursionError):
        return False


def _same_line(printed: str, expected: str) -> bool:
    if printed.strip() == expected.strip():
        return True
    try:
        return list(map(Decimal, printed.split())) == list(map(Decimal, expected.split()))
    except (InvalidOperation, ValueError):  # not a number, a signalling NaN, or another number of tokens
        return False


@dataclass(frozen=True)
class Result:
    """Result of one test: `"passed"`, `"wrong"`, or a status of the sandbox.

    `failure` is the text that feedback shows of it; `length` counts the characters of input, output and expected
    output.
    """

    status: str
    failure: str = ""
    length: int = 0


def result_of(cases: Cases, index: int, status: str, output: str = "", error: str = "") -> Result:
    """Result of a test with what its program printed or returned, or with the sandbox's traceback or message.

    Errors have a short traceback, and only wrong answers show an expected output.
    """
    if status not in HEADINGS:
        return Result(status)
    seconds = f" ({cases.time_limit:g} seconds)" if status == "timeout" else ""
    lines = [f"Test {index + 1}: {HEADINGS[status]}{seconds}"]
    if status in ERRORS:
        lines.append(short_error(error))
    lines.append(_shown("Input", cases.inputs[index]))
    if status == "wrong":
        lines += [_shown("Output", output), _shown("Expected", cases.outputs[index])]
    length = len(cases.inputs[index]) + len(output) + len(cases.outputs[index])
    return Result(status, "\n".join(filter(None, lines)), length)


def feedback(results: Sequence[Result], truncated: bool = False) -> str | None:
    """The shortest wrong answer and the first error, in the order of their tests.

    Where one of these kinds is missing, the first time-out is shown in its place, else the next shortest wrong answer.
    Feedback on a truncated response begins with `CUT_OFF`. It has at most `TOTAL` characters, and is `None` if no test
    failed.
    """

    def with_status(*statuses: str) -> list[int]:
        return [index for index, result in enumerate(results) if result.status in statuses]

    wrong = sorted(with_status("wrong"), key=lambda index: results[index].length)
    selected = [*wrong[:1], *with_status(*ERRORS)[:1], *with_status("timeout")[:1], *wrong[1:]][:SHOWN_FAILURES]
    failures = [results[index].failure for index in sorted(selected)]
    if truncated and failures:
        failures.insert(0, CUT_OFF)
    return _cut("\n\n".join(failures), TOTAL) or None


def _shown(name: str, text: str) -> str:
    text = _cut(text)
    return f"{name}:\n{text}" if "\n" in text else f"{name}: {text}".rstrip()


def short_error(traceback: str) -> str:
    """A Python traceback as the exception and then the innermost frames, innermost first. Other text is cut.

    The result has the form `ZeroDivisionError: division by zero`, then for each frame
    `Line 15 in separateSquares (program.py)` and the line itself.
    """
    frames, exception = [], []
    for line in traceback.split("\n"):
        if match := re.match(r' +File "([^"]*)", line (\d+)(?:, in (.*))?$', line):
            file, number, function = match.groups()
            place = "" if function in (None, "<module>") else f" in {function}"
            frames.append(f"Line {number}{place} ({file})")
            exception = []
        elif frames and line.startswith("    ") and not exception:
            frames[-1] += f"\n    {_cut(line)}"
        elif not re.match(r"Traceback \(most recent call last\):$|  \.\.\. \d+ more \.\.\.$", line):
            exception.append(line)
    return "\n".join([_cut("\n".join(exception)), *reversed(frames[-FRAMES:])]).strip()


def _cut(text: str, length: int = FIELD) -> str:
    """A stripped text of at most `length` characters, without lone surrogates, which tokenizers refuse."""
    text = text.strip().encode("utf-8", "replace").decode("utf-8")
    return text if len(text) <= length else f"{text[: length - 3]}..."
