"""Feedback on a program that fails: one kind of failure, short, in the form of the paper's examples."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from credit_trl.tasks.lcb_cases import Cases

FIELD = 250  # characters of an input, an output, an expected output, or an exception's message
TOTAL = 2_000
SHOWN_WRONG = 2
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

_FRAME = re.compile(r'^ +File "([^"]*)", line (\d+)(?:, in (.*))?$')


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
    """The first runtime error with a short traceback, else the first time-out, else the two shortest wrong answers.

    At most `TOTAL` characters, or `None` if no test failed. Only wrong answers show an expected output. Feedback on a
    truncated response begins with `CUT_OFF`.
    """
    failure = _failure(cases, results)
    return _cut(f"{CUT_OFF}\n\n{failure}" if truncated else failure, TOTAL) if failure else None


def _failure(cases: Cases, results: Sequence[Result]) -> str:
    indices = range(len(results))
    for index in indices:
        if (status := results[index].status) in ERRORS:
            parts = [f"Test {index + 1}: {ERRORS[status]}", short_error(results[index].error)]
            return "\n".join([*filter(None, parts), _shown("Input", cases.inputs[index])])
    for index in indices:
        if results[index].status == "timeout":
            head = f"Test {index + 1}: Time Limit Exceeded ({cases.time_limit:g} seconds)"
            return f"{head}\n{_shown('Input', cases.inputs[index])}"
    wrong = [index for index in indices if results[index].status == "wrong"]
    wrong.sort(key=lambda index: len(cases.inputs[index]) + results[index].length + len(cases.outputs[index]))
    return "\n\n".join(_wrong(index, cases, results[index]) for index in wrong[:SHOWN_WRONG])


def _wrong(index: int, cases: Cases, result: Result) -> str:
    texts = {"Input": cases.inputs[index], "Output": result.output, "Expected": cases.outputs[index]}
    return "\n".join([f"Test {index + 1}: Wrong Answer", *(_shown(name, text) for name, text in texts.items())])


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
        if match := _FRAME.match(line):
            file, number, function = match.groups()
            inside = "" if function in (None, "<module>") else f" in {function}"
            frames.append(f"Line {number}{inside} ({file})")
            exception = []
        elif frames and line.startswith("    ") and not exception:
            frames[-1] += f"\n    {_cut(line)}"
        elif line != "Traceback (most recent call last):" and not re.match(r"  \.\.\. \d+ more \.\.\.$", line):
            exception.append(line)
    return "\n".join([_cut("\n".join(exception)), *reversed(frames[-FRAMES:])]).strip()


def _cut(text: str, length: int = FIELD) -> str:
    """A stripped text of at most `length` characters, without lone surrogates, which tokenizers refuse."""
    text = text.strip().encode("utf-8", "replace").decode("utf-8")
    return text if len(text) <= length else f"{text[: length - 3]}..."
