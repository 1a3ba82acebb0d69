"""Feedback on a program that fails: two of its failures, short, in the form of the paper's examples."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from credit_trl.tasks.lcb_cases import Cases

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


@dataclass(frozen=True)
class Result:
    """Result of one test: `"passed"`, `"wrong"`, or a status of the sandbox, with the sandbox's traceback or message.

    `output` is what the program printed, or returned as JSON; `length` counts the characters of the whole output.
    """

    status: str
    output: str = ""
    error: str = ""
    length: int = 0

    @classmethod
    def shortened(cls, status: str, output: str = "", error: str = "") -> Result:
        """A result with as much of the output as feedback shows: a batch holds many results until its end."""
        return cls(status, _cut(output), error, len(output))


def feedback(cases: Cases, results: Sequence[Result], truncated: bool = False) -> str | None:
    """The shortest wrong answer and the first error, in the order of their tests.

    Where one of these kinds is missing, the first time-out is shown in its place, else the next shortest wrong answer.
    Errors have a short traceback, and only wrong answers show an expected output. Feedback on a truncated response
    begins with `CUT_OFF`. It has at most `TOTAL` characters, and is `None` if no test failed.
    """

    def length(index: int) -> int:
        return len(cases.inputs[index]) + results[index].length + len(cases.outputs[index])

    def with_status(*statuses: str) -> list[int]:
        return [index for index, result in enumerate(results) if result.status in statuses]

    wrong = sorted(with_status("wrong"), key=length)
    shown = [*wrong[:1], *with_status(*ERRORS)[:1], *with_status("timeout")[:1], *wrong[1:]][:SHOWN_FAILURES]
    failures = [_failure(index, cases, results[index]) for index in sorted(shown)]
    if truncated and failures:
        failures.insert(0, CUT_OFF)
    return _cut("\n\n".join(failures), TOTAL) or None


def _failure(index: int, cases: Cases, result: Result) -> str:
    seconds = f" ({cases.time_limit:g} seconds)" if result.status == "timeout" else ""
    lines = [f"Test {index + 1}: {HEADINGS[result.status]}{seconds}"]
    if result.status in ERRORS:
        lines.append(short_error(result.error))
    lines.append(_shown("Input", cases.inputs[index]))
    if result.status == "wrong":
        lines += [_shown("Output", result.output), _shown("Expected", cases.outputs[index])]
    return "\n".join(filter(None, lines))


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
            inside = "" if function in (None, "<module>") else f" in {function}"
            frames.append(f"Line {number}{inside} ({file})")
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
