r"""Mathematics with a final `\boxed{}` answer.

The reward is 1 if the last box of the response's answer part equals the gold answer, else 0; the feedback is the
correct answer. An answer is read wholly, or compared as text: `math_notation.yaml` brings it to one notation, and
lists and brackets are split. A part of known tokens is an expression or equation, which math-verify's parser reads,
and becomes its values; other parts stay texts.
"""

from __future__ import annotations

import resource
import signal
import time
from collections.abc import Sequence
from concurrent.futures import wait
from contextlib import suppress
from decimal import ROUND_DOWN, Decimal
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import regex as re
import yaml
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
from pebble import ProcessPool
from sympy import Float, I, Pow, Rational, S, Symbol, nan, sstr

from credit_trl.rollout.thinking import split_thinking
from credit_trl.rollout.verdict import Verdict, remaining_seconds
from credit_trl.sandbox.cgroups import worker_count
from credit_trl.tasks.records import dataset_of, read_rows
from credit_trl.tasks.task import BATCH_SECONDS, in_process, response_text

if TYPE_CHECKING:
    from datasets import Dataset

HUB = "trl-lib/DeepMath-103K"
INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."
NO_BOX = r"No final answer was found. The final answer must be given in the format \boxed{answer}. "
TRUNCATED = "The response was cut off because it reached the maximum length. "
LONGEST = 250  # characters of an answer above which only equal texts are equal
LONGEST_BOX = 10_000  # characters after which a box that is not closed is none
SECONDS_PER_PAIR = 3  # of processor time, that a comparison may take
WORKER_LIMIT = (resource.RLIMIT_AS, (2 << 30, 2 << 30))  # of memory
DIGITS = 50

_NOTATION = yaml.safe_load(Path(__file__).with_name("math_notation.yaml").read_text("utf-8"))
_SIGNS = {way: sign for sign, *ways in map(str.split, _NOTATION["signs"].splitlines()) for way in ways}
_PATTERNS = {name: re.compile(_NOTATION["words"] + text, re.VERBOSE) for name, text in _NOTATION["patterns"].items()}


def build(split: str, path: str | Path | None = None, *, instruction: str = INSTRUCTION, hub: str = HUB) -> Dataset:
    r"""Problems as conversational rows: `prompt`, which ends with `instruction`, `answer`, `task` and `id`.

    Questions are texts, or messages that end with a user's. The answer of a worked solution is its last box, or the
    text after `####`. See `records.read_rows` for `split`, `path` and `hub`; a row without these is a `ValueError`.
    """
    rows = read_rows("math", split, path, hub)
    return dataset_of((row.question("math", instruction, last_boxed) for row in rows), f"math {split}")


def verify(response: str, answer: str, *, truncated: bool = False) -> Verdict:
    """Grade one response by its last box; see `reward`."""
    return reward([response], [answer], [truncated])[0]


def reward(
    completions: Sequence[Any], answer: Sequence[str], truncated: Sequence[bool] | None = None, **columns: Any
) -> list[Verdict]:
    """Grade a batch of texts or conversations, with parallel comparisons; for `reward_funcs`.

    A response that is not compared within `BATCH_SECONDS`, or before the deadline of the call, has the reward `None`
    and the metric `undecided` alone. Others have the metric `answer_format` (1 if there is a box), and
    `comparison_failed` if comparing the answer took too long or crashed.
    """
    for gold in answer:
        if not isinstance(gold, str) or not gold.strip():
            raise ValueError(f"A math answer must be a text that is not blank, got {gold!r}.")
    boxes = [last_boxed(split_thinking(response_text(completion))[1] or "") for completion in completions]
    pairs = list(zip(answer, boxes, strict=True))
    results: dict[Any, bool | str] = {(gold, box): gold.strip() == box for gold, box in pairs}
    unread = [pair for pair in results if not results[pair] and pair[1] and max(map(len, pair)) <= LONGEST]
    seconds = remaining_seconds(BATCH_SECONDS) - 1.0  # to answer before `in_process` ends the process
    results |= dict.fromkeys(unread, "undecided")
    if unread and seconds > 0:
        results |= zip(unread, compare(unread, time.monotonic() + seconds), strict=True)
    flags = truncated or [False] * len(pairs)
    return [_verdict(results[pair], *pair, flag) for pair, flag in zip(pairs, flags, strict=True)]


def _verdict(result: bool | str, gold: str, box: str | None, truncated: bool) -> Verdict:
    if result == "undecided":
        return Verdict(None, None, {"undecided": 1.0})
    metrics = {"answer_format": float(box is not None)}
    if result == "failed":
        metrics["comparison_failed"] = 1.0
    remark = TRUNCATED if truncated else NO_BOX if box is None else ""
    return Verdict(float(result is True), f"{remark}Correct answer: {gold}", metrics)


def last_boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{...}`, `\fbox{...}` or `\boxed 7`; `None` without one or where it is not closed."""
    start = max(text.rfind(r"\boxed"), text.rfind(r"\fbox"), 0)
    box = _PATTERNS["box"].match(text, start, start + LONGEST_BOX)
    return box and box["content"].strip()


@in_process
def compare(pairs: list[tuple[str, str]], deadline: float) -> list[bool | str]:
    """Whether each pair is equal, in killable processes, "failed", or "undecided" where others use the processors."""
    same_answer(r"\frac{x}{2}", "0.5x")  # fills the caches of the parser, which the forked workers inherit
    with ProcessPool(worker_count(), 0, resource.setrlimit, WORKER_LIMIT, get_context("fork")) as pool:
        futures = [pool.schedule(compare_briefly, args=pair, timeout=10 * SECONDS_PER_PAIR) for pair in pairs]
        results = dict.fromkeys(futures, "undecided")
        for future in wait(futures, deadline - time.monotonic()).done:
            error = future.exception()
            if not isinstance(error, TimeoutError):
                results[future] = "failed" if error else future.result()
        pool.stop()
    return list(results.values())


def compare_briefly(gold: str, given: str) -> bool:
    """`same_answer`, but the process ends after `SECONDS_PER_PAIR` of its processor time."""
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS_PER_PAIR)
    return same_answer(gold, given)


def same_answer(gold: str, given: str) -> bool:
    """Whether two answers are equal. What only one of them has, a name, a unit or a set's braces, is ignored."""
    sides = [_clean(gold), _clean(given)]
    if sides[0] == sides[1]:
        return True
    for kind in ("name", "unit", "set"):
        found = [list(_PATTERNS[kind].finditer(side)) for side in sides]
        ignored = r"[{}() ]|\\text" + ("" if all(found) else r"|_\{\d\}")  # roots are x_1 and x_2
        marks = {re.sub(ignored, "", one["mark"]) for one in found[0] + found[1]}
        is_relation = kind == "name" and not all(found) and all("=" in side for side in sides)
        is_angle = marks == {"°"} and any(r"\pi" in side for side in sides)
        if len(marks) == 1 and not is_relation and not is_angle:
            sides = [_PATTERNS[kind].sub(r"\g<value>", side) for side in sides]
    if sum(r"\ln" in side for side in sides) == 1:  # then a logarithm without a base is natural
        sides = [re.sub(r"\\log(?!_)", r"\\ln", side) for side in sides]
    texts = sorted(map(_canonical, sides), key=len)
    if not _PATTERNS["rounded"].fullmatch(" ".join(texts)):
        return texts[0] == texts[1]
    short, long = map(Decimal, texts)
    return short in (long.quantize(short), long.quantize(short, ROUND_DOWN))


def _clean(text: str) -> str:
    """An answer in one notation."""
    text = _PATTERNS["or"].sub(",", " ".join(text.split()))
    text = _PATTERNS["sign"].sub(lambda sign: _SIGNS.get(sign[0], sign[0]), text)
    for pattern, replacement in _NOTATION["rewrites"]:
        text = re.sub(pattern, replacement, text.strip())
    return ",".join(dict.fromkeys([text.replace("±", "+"), text.replace("±", "-")]))


def _canonical(text: str) -> str:
    """One text for all cleaned answers, or parts of them, that are equal."""
    for separator in "¶&∪,":  # rows of a matrix, its columns, sets and lists
        parts = _split(text, separator)
        if len(parts) > 1:
            items = [_canonical(part) for part in parts if part.strip()]
            return separator.join(items if separator in "¶&" or "…" in items else sorted(items))
    if _PATTERNS["brackets"].fullmatch(text):
        items = [_canonical(item) for item in _split(text[1:-1], "," if text[0] in "([" else "\n")]
        return items[0] if len(items) == 1 and text[0] in "({" else text[0] + ",".join(items) + text[-1]
    if _PATTERNS["tokens"].fullmatch(text) and not _PATTERNS["unread"].match(text):
        with suppress(Exception):  # the parser's errors have no class of their own; what it cannot read stays a text
            return _values(text)
    bare = re.sub(r"\\text\{([^{}]*)\}|\{(\w)\}|(?<!\d)\s|\s(?!\d)", r"\1\2", text).strip()
    return bare.lower() if re.fullmatch("[A-Z]?[a-z]{2,}|No|NO|YES|TRUE|FALSE|DNE", bare) else bare


def _split(text: str, separator: str) -> list[str]:
    """Parts of a text between separators outside brackets."""
    parts = re.split(rf"{_NOTATION['patterns']['brackets']}(*SKIP)(*FAIL)|{separator}", text)
    return [part for part in parts if part is not None]  # it is None for the group of the brackets


def _values(text: str) -> str:
    """An expression by SymPy at positive and negative values of its symbols, of an equation up to a factor."""
    text = re.sub(r"(\d*)\.(\d+)", lambda found: rf"\frac{{{found[1]}{found[2]}}}{{1{'0' * len(found[2])}}}", text)
    text = _PATTERNS["factors"].sub(lambda found: found["function"] or "*", text).replace("°", r"^{\circ}")
    config = ConversionConfig(interpret_as_mixed_fractions=False, lowercase_symbols=False)
    parsed = latex2sympy(text, convert_degrees=True, normalization_config=None, conversion_config=config)
    parsed = parsed.subs({I: Symbol("I"), Symbol("i"): I}, simultaneous=True).doit()  # the parser reads I as i
    point = {symbol: Rational(crc32(str(symbol).encode()) % 99_991, 10_007) for symbol in parsed.free_symbols}
    # The exact power of two fractions may be one of integers with millions of digits.
    exponents = [power.exp.free_symbols for power in parsed.atoms(Pow) if power.base.free_symbols]
    point |= {symbol: point[symbol].evalf(DIGITS + 60) for symbol in set().union(*exponents)}
    kind = "=" if parsed.is_Equality else ""
    if kind:
        parsed = (parsed.lhs - parsed.rhs) / (parsed.lhs - parsed.rhs).subs(point)
    texts = [_exact(parsed.subs({symbol: scale * number for symbol, number in point.items()})) for scale in (1, 40)]
    negative = [_exact(parsed.subs(point | {symbol: -point[symbol]})) for symbol in sorted(point, key=str)]
    texts += [re.sub(".*I", "I", text) for text in negative]  # the real part of a complex number depends on the branch
    return kind + (texts[0] if len(set(texts)) == 1 else " ".join(texts))


def _exact(number: Any) -> str:
    """A number as a text, an integer wholly and others by `DIGITS` digits; a `ValueError` where it is undefined."""
    if number is nan:
        raise ValueError("The value is undefined.")
    if number.is_Integer:
        return str(number)
    value = number.evalf(DIGITS + 20, maxn=500)
    zeros = {part: S.Zero for part in value.atoms(Float) if part._prec < 10}
    return sstr(value.xreplace(zeros).evalf(DIGITS), full_prec=False).removesuffix(".0")
