r"""Mathematics with a final `\boxed{}` answer.

The reward is 1 if the last box of the response's answer part equals the gold answer, else 0; the feedback is the
correct answer. An answer is read wholly, or compared as text: `math_notation.yaml` brings it to one notation, and
lists, brackets, equations and ratios are split. A part of known tokens is an expression, which math-verify's parser
reads, and becomes its values; other parts stay texts.
"""

from __future__ import annotations

import multiprocessing
import re
import resource
import time
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import yaml

from credit_trl.rollout.deadline import remaining_seconds
from credit_trl.rollout.in_process import in_process
from credit_trl.rollout.thinking import answer_part
from credit_trl.rollout.verdict import Verdict
from credit_trl.sandbox.cgroups import worker_count
from credit_trl.tasks.records import Row, dataset_of, read_rows
from credit_trl.tasks.task import BATCH_SECONDS, response_text

if TYPE_CHECKING:
    from datasets import Dataset

HUB = "trl-lib/DeepMath-103K"
INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."
NO_BOX = r"No final answer was found. The final answer must be given in the format \boxed{answer}. "
TRUNCATED = "The response was cut off because it reached the maximum length. "
LONGEST = 250  # characters of an answer above which only equal texts are equal
LONGEST_BOX = 10_000  # characters after which a box that is not closed is none
SECONDS_PER_PAIR = 3  # that a comparison may take
WORKER_BYTES = 2 << 30
DIGITS = 50

_NOTATION = yaml.safe_load(Path(__file__).with_name("math_notation.yaml").read_text("utf-8"))
_SIGNS = {way: sign for sign, *ways in map(str.split, _NOTATION["signs"].splitlines()) for way in ways}
_PATTERNS = {
    name: re.compile(re.sub("@(.*?)@", lambda word: _NOTATION["words"][word[1]], pattern), re.VERBOSE)
    for name, pattern in _NOTATION["patterns"].items()
}


def build(split: str, path: str | Path | None = None, *, instruction: str = INSTRUCTION, hub: str = HUB) -> Dataset:
    r"""Problems as conversational rows: `prompt`, which ends with `instruction`, `answer`, `task` and `id`.

    Questions are texts, or messages that end with a user's. The answer of a worked solution is its last box, or the
    text after `####`. See `records.read_rows` for `split`, `path` and `hub`; a row without these is a `ValueError`.
    """

    def convert(row: Row) -> dict[str, Any]:
        given = {name: value for name, value in row.items() if value is not None}
        problem = given.get("problem", given.get("question", given.get("prompt", "")))
        turns = [{"role": "user", "content": problem}] if isinstance(problem, str) else problem
        if turns[-1]["role"] != "user" or not turns[-1]["content"].strip():
            raise row.error("problem", "it, `question` or `prompt` must be a text or messages that end with a user's")
        question = {"role": "user", "content": f"{turns[-1]['content']}\n\n{instruction}".rstrip()}
        text = str(given.get("answer", given.get("final_answer", given.get("solution", ""))))
        gold = (last_boxed(text) or text.rpartition("####")[2]).strip()
        is_unread = len(gold) > LONGEST and gold == str(given.get("solution")).strip()
        if not gold or "\n\n" in gold or is_unread:
            raise row.error("answer", r"no final answer (or `solution`): neither \boxed{...} nor ####, nor a line")
        identity = given.get("id", given.get("idx", given.get("unique_id", row.number)))
        return {"prompt": [*turns[:-1], question], "answer": gold, "task": "math", "id": f"math-{identity}"}

    return dataset_of(map(convert, read_rows("math", split, path, hub)), f"math {split}")


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
    boxes = [last_boxed(answer_part(response_text(completion)) or "") for completion in completions]
    pairs = list(zip(answer, boxes, strict=True))
    results = {(gold, box): "equal" if gold.strip() == box else "different" for gold, box in pairs}
    unread = [pair for pair in results if results[pair] != "equal" and pair[1] and max(map(len, pair)) <= LONGEST]
    seconds = remaining_seconds(BATCH_SECONDS) - 1.0  # to answer before `in_process` ends the process
    results |= dict.fromkeys(unread, "undecided")
    if unread and seconds > 0:
        results |= zip(unread, _compare(unread, time.monotonic() + seconds), strict=True)
    flags = truncated or [False] * len(pairs)
    return [_verdict(results[pair], *pair, flag) for pair, flag in zip(pairs, flags, strict=True)]


def _verdict(result: str, gold: str, box: str | None, truncated: bool) -> Verdict:
    if result == "undecided":
        return Verdict(None, None, {"undecided": 1.0})
    metrics = {"answer_format": float(box is not None)}
    if result == "failed":
        metrics["comparison_failed"] = 1.0
    remark = TRUNCATED if truncated else NO_BOX if box is None else ""
    return Verdict(float(result == "equal"), f"{remark}Correct answer: {gold}", metrics)


def last_boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{...}`, `\fbox{...}` or `\boxed 7`; `None` without one or where it is not closed."""
    start = max(text.rfind(r"\boxed"), text.rfind(r"\fbox"), 0)
    box = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|([^\s{$]+))").match(text, start)
    if box is None or box[1]:
        return box and box[1].rstrip(".,;:)\\")
    depth = 0
    for brace in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, box.end(), box.end() + LONGEST_BOX):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth < 0:
            return text[box.end() : brace.start()].strip()
    return None


def compare(pairs: list[tuple[str, str]], deadline: float) -> list[str]:
    """Compare in killable processes: "equal", "different", "failed" or, after the deadline, "undecided"."""
    from pebble import ProcessExpired, ProcessPool

    same_answer(r"\frac{x}{2}", "0.5x")  # imports what the forked workers need
    context = multiprocessing.get_context("fork")
    limits = (resource.RLIMIT_AS, (WORKER_BYTES, WORKER_BYTES))
    results = []
    with ProcessPool(worker_count(), context=context, initializer=resource.setrlimit, initargs=limits) as pool:
        for future in [pool.schedule(same_answer, args=pair, timeout=SECONDS_PER_PAIR) for pair in pairs]:
            try:
                results.append("equal" if future.result(deadline - time.monotonic()) else "different")
            except (ProcessExpired, TimeoutError):
                results.append("failed" if time.monotonic() < deadline else "undecided")
            except Exception:  # the parser's errors have no class of their own: equality was not shown
                results.append("different")
        pool.stop()
    return results


_compare = in_process(compare)


def same_answer(gold: str, given: str) -> bool:
    """Whether two answers are equal. A name or unit that only one of them has is ignored."""
    sides = [_clean(gold), _clean(given)]
    for kind in ("name", "unit"):
        found = [list(_PATTERNS[kind].finditer(side)) for side in sides]
        marks = {re.sub(r"[{}() ]|\\text", "", one["mark"]) for one in found[0] + found[1]}
        is_relation = kind == "name" and not all(found) and all("=" in side for side in sides)
        if len(marks) == 1 and not is_relation:
            sides = [_PATTERNS[kind].sub(r"\g<value>", side) for side in sides]
    if sum(r"\ln" in side for side in sides) == 1:  # then a logarithm without a base is natural
        sides = [re.sub(r"\\log(?!_)", r"\\ln", side) for side in sides]
    texts = [_canonical(re.sub(r"^«([^«»]+,[^«»]+)»$", r"\1", side)) for side in sides]
    return texts[0] == texts[1] or _is_rounded(*sorted(texts, key=len))


def _clean(text: str) -> str:
    """An answer in one notation; braces of sets become `«»`."""
    text = re.sub(r"^[\s$]*(\*+|`+|\"|')(.*)\1[\s$.]*$", r"\2", text)
    signs = re.findall(r"\\?[A-Za-z]+|\\.|\*\*|[<>!]=|\.{3}|.", " ".join(text.split()))
    text = re.sub(r"\\[A-Za-z]+", r"\g<0> ", "".join(_SIGNS.get(sign, sign) for sign in signs))
    for pattern, replacement in _NOTATION["rewrites"]:
        text = re.sub(pattern, replacement, text.strip())
    return ",".join(dict.fromkeys([text.replace("±", "+"), text.replace("±", "-")]))


def _split(text: str, separators: str) -> list[str]:
    """Parts of a text between separators outside brackets."""
    parts = [""]
    depth = 0
    for character in text:
        depth += (character in "([{«") - (character in ")]}»")
        if depth == 0 and character in separators:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _canonical(text: str) -> str:
    """One text for all cleaned answers, or parts of them, that are equal."""
    parts = _split(text, ",∪")
    if len(parts) > 1:
        items = [_canonical(part) for part in parts if part.strip()]
        is_union = len(_split(text, "∪")) > 1 and re.search("[,A-Z]", text)
        return ("∪" if is_union else ",").join(items if "…" in items else sorted(items))
    if text[:1] in tuple("([{«") and _split(text, ")]}»")[1:] == [""]:
        items = [_canonical(item) for item in _split(text[1:-1], ",")]
        if len(items) == 1 and text[0] in "({":
            return items[0]
        return text[0] + ",".join(sorted(items) if text[0] == "«" else items) + text[-1]
    ratio = _split(text, ":")
    if len(ratio) > 1 and all(map(_is_expression, ratio)) and not re.search(r":\d\d(?!\d)", text):
        return ":".join(_canonical(rf"\frac{{{part}}}{{{ratio[0]}}}") for part in ratio)
    equation = _split(text, "=")
    if len(equation) == 2 and all(map(_is_expression, equation)):
        return "=" + _values("({})-({})".format(*equation), is_equation=True)
    if _is_expression(text):
        return _values(text)
    bare = re.sub(r"\\text\{([^{}]*)\}|\{(\w)\}|(?<!\d)\s|\s(?!\d)", r"\1\2", text).strip()
    return bare.lower() if re.fullmatch("[A-Z]?[a-z]{2,}|NO|YES|TRUE|FALSE", bare) else bare


def _is_expression(text: str) -> bool:
    """Whether each token of a text is known, so that the parser drops none, and its value is computed fast."""
    return text.strip() != "" and bool(_PATTERNS["tokens"].fullmatch(text)) and not _PATTERNS["unread"].match(text)


def _values(text: str, is_equation: bool = False) -> str:
    """An expression by SymPy at positive and negative values of its symbols, of an equation up to a factor."""
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
    from sympy import I, Rational, Symbol

    text = re.sub(r"(\d+(?:\.\d+)?)°", r"(\1*\\frac{\\pi}{180})", text)
    text = re.sub(r"(\d*)\.(\d+)", lambda found: rf"\frac{{{found[1]}{found[2]}}}{{1{'0' * len(found[2])}}}", text)
    text = _PATTERNS["factors"].sub(lambda found: found[1] or "*", text)
    config = ConversionConfig(interpret_as_mixed_fractions=False, lowercase_symbols=False)
    parsed = latex2sympy(text, normalization_config=None, conversion_config=config)
    parsed = parsed.subs({I: Symbol("I"), Symbol("i"): I}, simultaneous=True).doit()
    point = {symbol: Rational(crc32(str(symbol).encode()) % 99_991, 10_007) for symbol in parsed.free_symbols}
    points = [point, {symbol: 40 * number for symbol, number in point.items()}]
    points += [point | {symbol: -point[symbol]} for symbol in sorted(point, key=str)]
    numbers = [parsed.subs(one) for one in points]
    texts = [_exact(number / numbers[0] if is_equation else number) for number in numbers]
    # At negative points the real part of a complex number depends on the branch.
    texts[2:] = [re.sub(".*I", "I", text) for text in texts[2:]]
    return texts[0] if len(set(texts)) == 1 else " ".join(texts)


def _exact(number: Any) -> str:
    """A number as a text, an integer wholly and others by `DIGITS` digits; a `ValueError` where it is undefined."""
    from sympy import nan, sstr

    if number is nan:
        raise ValueError("The value is undefined.")
    if number.is_Integer:
        return str(number)
    parts = number.evalf(DIGITS + 20, maxn=500).as_real_imag()
    rounded = [0 if part.is_Float and part._prec < 10 else part.evalf(DIGITS) for part in parts]
    real, imaginary = (sstr(part, full_prec=False) for part in rounded)
    return real.removesuffix(".0") if imaginary == "0" else f"{real}+{imaginary}I"


def _is_rounded(text: str, long: str) -> bool:
    """Whether a canonical number of at least six digits is one with many decimal places, rounded or cut."""
    digits = re.sub(r"\D", "", text).lstrip("0")
    if not re.fullmatch(r"-?\d+\.\d+", text) or not re.fullmatch(r"-?\d+\.\d{30,}", long) or len(digits) < 6:
        return False
    return long.startswith(text) or str(round(Decimal(long), len(text.partition(".")[2]))) == text
