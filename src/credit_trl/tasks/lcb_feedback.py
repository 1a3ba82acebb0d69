"""What a verifier says of a program that fails: one thing at a time, short, in the words of the paper's examples."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from credit_trl.tasks.lcb_cases import Cases

FIELD = 250  # characters of an input, an output, an expected output, an exception's message
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


@dataclass(frozen=True)
class Result:
    """One test's outcome: `"passed"`, `"wrong"`, or a status of the sandbox.

    Args:
        output: what the program printed or returned (JSON); `shortened` keeps no more of it than is shown.
        error: the sandbox's traceback or remark.
        length: characters of the whole output.
    """

    status: str
    output: str = ""
    error: str = ""
    length: int = 0

    @classmethod
    def shortened(cls, status: str, output: str = "", error: str = "") -> Result:
        """A batch's results are held until its end, and there are many: of each, what feedback may show."""
        return cls(status, _field(output), error, len(output))


def feedback(cases: Cases, results: Sequence[Result], truncated: bool = False) -> str | None:
    """The first runtime error with a short traceback, else the first time-out, else the two shortest wrong answers.

    `None` where no test failed. At most `TOTAL` characters; an expected output is shown for wrong answers only. Of a
    response that was cut off it is said first that it was.
    """
    said = _failure(cases, results)
    return _capped(f"{CUT_OFF}\n\n{said}" if truncated else said) if said else None


def _failure(cases: Cases, results: Sequence[Result]) -> str:
    places = range(len(results))
    crashed = next((place for place in places if results[place].status in ERRORS), None)
    if crashed is not None:
        return _error(crashed, cases, results[crashed])
    slow = next((place for place in places if results[place].status == "timeout"), None)
    if slow is not None:
        head = f"Test {slow + 1}: Time Limit Exceeded ({cases.time_limit:g} seconds)"
        return f"{head}\n{_shown('Input', cases.inputs[slow])}"
    wrong = [place for place in places if results[place].status == "wrong"]
    wrong.sort(key=lambda place: len(cases.inputs[place]) + results[place].length + len(cases.outputs[place]))
    return "\n\n".join(_wrong(place, cases, results[place]) for place in wrong[:SHOWN_WRONG])


def _error(place: int, cases: Cases, result: Result) -> str:
    parts = [f"Test {place + 1}: {ERRORS[result.status]}", short_error(result.error)]
    return "\n".join([*filter(None, parts), _shown("Input", cases.inputs[place])])


def _wrong(place: int, cases: Cases, result: Result) -> str:
    texts = {"Input": cases.inputs[place], "Output": result.output, "Expected": cases.outputs[place]}
    return "\n".join([f"Test {place + 1}: Wrong Answer", *(_shown(name, text) for name, text in texts.items())])


def _shown(name: str, text: str) -> str:
    text = _field(text)
    return f"{name}:\n{text}" if "\n" in text else f"{name}: {text}".rstrip()


def short_error(traceback: str) -> str:
    """A Python traceback as the exception, then the innermost frames, innermost first; other text just cut.

    That is `ZeroDivisionError: division by zero`, then for each frame `Line 15 in separateSquares (program.py)` and
    the line itself.
    """
    frames, exception, frame = [], [], re.compile(r'^ +File "([^"]*)", line (\d+)(?:, in (.*))?$')
    for line in traceback.split("\n"):
        if match := frame.match(line):
            file, number, function = match.groups()
            inside = "" if function in (None, "<module>") else f" in {function}"
            frames.append(f"Line {number}{inside} ({file})")
            exception = []
        elif frames and line.startswith("    ") and not exception:
            frames[-1] += f"\n    {_field(line.strip())}"
        elif line != "Traceback (most recent call last):" and not re.match(r"  \.\.\. \d+ more \.\.\.$", line):
            exception.append(line)
    return "\n".join([_field("\n".join(exception)), *reversed(frames[-FRAMES:])]).strip()


def _field(text: str) -> str:
    """A text as feedback shows it: stripped, at most `FIELD` characters, and text that a tokenizer takes."""
    text = text.strip().encode("utf-8", "replace").decode("utf-8")
    return text if len(text) <= FIELD else f"{text[: FIELD - 3]}..."


def _capped(text: str) -> str:
    return text if len(text) <= TOTAL else f"{text[: TOTAL - 3]}..."
