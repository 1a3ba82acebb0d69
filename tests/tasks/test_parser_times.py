"""Every parser of texts that a model, a program or a service writes answers within a second on a megabyte."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable

import pytest

from credit_trl.contexts.privileged import demonstration_text
from credit_trl.sandbox import Outcome, running
from credit_trl.tasks import (
    lcb_cases,
    lcb_checker,
    lcb_feedback,
    lcb_program,
    math,
    math_operations,
    math_worker,
    sciknoweval,
    toolalpaca_protocols,
)
from credit_trl.tasks.printable import plain

MEGABYTE = 1_000_000
GOLDEN = toolalpaca_protocols.golden_calls(json.dumps([{"Action": "get", "Action_Input": '{"a": 1}'}]))
PARSERS = {
    "find_program": lcb_program.find_program,
    "prelude_for": lcb_program.prelude_for,
    "parse_answer": lcb_cases.parse_answer,
    "decode_cases": lcb_cases.decode_cases,
    "same_output": lambda text: lcb_checker.same_output(f"1 {text}", f"1.0 {text}"),
    "same_value": lambda text: lcb_checker.same_value(text, "1"),
    "short_error": lcb_feedback.short_error,
    "last_boxed": math.last_boxed,
    "marked": math._marked,
    "finished_part": lambda text: math_operations.finished_part("1", text),
    "as_tex": math_worker.as_tex,
    "sciknoweval": lambda text: sciknoweval.verify(text, "A"),
    "grade_by_field": lambda text: toolalpaca_protocols.grade_by_field(text, GOLDEN),
    "grade_strictly": lambda text: toolalpaca_protocols.grade_strictly(text, GOLDEN),
    "thinking": lambda text: [demonstration_text(text, part) for part in ("solution", "think")],
    "ending": lambda text: running._ending(Outcome("ok", exit_code=1), text[-running.ERROR_CHARACTERS :]),
    "is_json": running.is_json,
    "plain": plain,
}
# Repeated, they nest, overlap with themselves, or begin what a pattern looks for and never end it.
UNITS = [
    *(
        "\\boxed{",
        "\\boxed ",
        "{",
        "}",
        "{a}",
        "\\",
        "$",
        "```\n",
        "```python\n",
        "``` `",
        "([1,",
        "=",
        "\\approx",
        " ",
    ),
    *(
        "\n",
        "\t \n",
        "d",
        "d/",
        "/d",
        "d ",
        "\\frac{d",
        "\\frac{d{a}{a}",
        "{d}",
        "\\cfrac",
        "\\text{",
        "\\operatorname{",
    ),
    *("1", "1 ", "1e", "a", "ab ", "<think>", "</think>", "<think>a", "<answer>", "<answer> A </answer>", "Action:"),
    *(
        "Action: get\n",
        "Action Input: {",
        'Action: get\nAction Input: {"a": 1}\n',
        '{"a":',
        '"',
        'File "/',
        "é",
        "\u2028",
    ),
    *('  File "a", line 1, in f\n', "<", "|", "\x00", "####", "d^2", "-", "1.", "_", "^", "\\mod", "think>"),
]


def slowest(parse: Callable[[str], object], texts: Iterable[str]) -> tuple[float, str]:
    """Processor time of a parser on the worst of the texts, and that text's beginning."""
    worst = (0.0, "")
    for text in texts:
        started = time.process_time()
        with contextlib.suppress(ValueError, RecursionError):
            parse(text)
        worst = max(worst, (time.process_time() - started, text[:40]))
    return worst


@pytest.mark.slow
@pytest.mark.parametrize("name", PARSERS)
def test_parser_answers_within_a_second_on_a_megabyte(name: str) -> None:
    frames = (("", ""), ("\\boxed{1", ""), ("```python\n", "\n```"))
    texts = (before + unit * (MEGABYTE // len(unit)) + after for unit in UNITS for before, after in frames)
    seconds, text = slowest(PARSERS[name], texts)
    assert seconds < 1, repr(text)


@pytest.mark.parametrize("name", PARSERS)
def test_parser_time_grows_linearly(name: str) -> None:
    """100 kB of each repeated text; a quadratic parser would need minutes."""
    seconds, text = slowest(PARSERS[name], (f"a{unit * (MEGABYTE // 10 // len(unit))}\na" for unit in UNITS))
    assert seconds < 0.5, repr(text)
