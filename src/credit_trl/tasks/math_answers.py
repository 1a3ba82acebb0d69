r"""Equality of final answers in mathematics: an answer is read wholly, or compared as text.

Each answer is brought to one canonical text, with `math_notation.yaml`. Lists, brackets, equations and ratios are
split; a part of known tokens is an expression, which math-verify's parser reads, and becomes its values; other parts
stay texts.
"""

from __future__ import annotations

import multiprocessing
import re
import resource
import time
from decimal import Decimal
from pathlib import Path
from typing import Any
from zlib import crc32

import yaml

from credit_trl.sandbox.cgroups import worker_count

SECONDS_PER_PAIR = 3  # that a comparison may take
DIGITS = 50
WORKER_BYTES = 2 << 30
NOTATION = yaml.safe_load(Path(__file__).with_name("math_notation.yaml").read_text("utf-8"))
SIGNS = {way: sign for sign, *ways in map(str.split, NOTATION["signs"].splitlines()) for way in ways}
PATTERNS = {
    name: re.compile(re.sub("<(functions|greek|units)>", lambda word: NOTATION["words"][word[1]], pattern), re.VERBOSE)
    for name, pattern in NOTATION["patterns"].items()
}


def same_answer(gold: str, given: str) -> bool:
    """Whether two answers are equal. A name or unit that only one of them has is ignored."""
    sides = [clean(gold), clean(given)]
    for kind in ("name", "unit"):
        pattern = PATTERNS[kind]
        marks = [{re.sub(r"[{}() ]|\\text", "", found["mark"]) for found in pattern.finditer(side)} for side in sides]
        is_relation = kind == "name" and not all(marks) and all("=" in side for side in sides)
        if len(marks[0] | marks[1]) == 1 and not is_relation:
            sides = [pattern.sub(r"\g<value>", side) for side in sides]
    if sum(r"\ln" in side for side in sides) == 1:  # then a logarithm without a base is natural
        sides = [re.sub(r"\\log(?!_)", r"\\ln", side) for side in sides]
    texts = [canonical(re.sub(r"^«([^«»]+,[^«»]+)»$", r"\1", side)) for side in sides]
    return texts[0] == texts[1] or is_rounded(*sorted(texts, key=len))


def clean(text: str) -> str:
    """An answer in one notation; braces of sets become `«»`."""
    text = re.sub(r"^[\s$]*(\*+|`+|\"|')(.*)\1[\s$.]*$", r"\2", text)
    signs = re.findall(r"\\?[A-Za-z]+|\\.|\*\*|[<>!]=|\.{3}|.", " ".join(text.split()))
    text = "".join(SIGNS.get(sign, sign) for sign in signs)
    text = re.sub(r"\\[A-Za-z]+", r"\g<0> ", text)
    for pattern, replacement in NOTATION["rewrites"]:
        text = re.sub(pattern, replacement, text.strip())
    return ",".join(dict.fromkeys([text.replace("±", "+"), text.replace("±", "-")]))


def split(text: str, separators: str) -> list[str]:
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


def canonical(text: str) -> str:
    """One text for all cleaned answers, or parts of them, that are equal."""
    parts = split(text, ",∪")
    if len(parts) > 1:
        items = [canonical(part) for part in parts if part.strip()]
        is_union = len(split(text, "∪")) > 1 and re.search("[,A-Z]", text)
        return ("∪" if is_union else ",").join(items if "…" in items else sorted(items))
    if text[:1] in tuple("([{«") and split(text, ")]}»")[1:] == [""]:
        items = [canonical(item) for item in split(text[1:-1], ",")]
        if len(items) == 1 and text[0] in "({":
            return items[0]
        return text[0] + ",".join(sorted(items) if text[0] == "«" else items) + text[-1]
    ratio = split(text, ":")
    if len(ratio) > 1 and all(map(is_expression, ratio)) and not re.search(r":\d\d(?!\d)", text):
        return ":".join(canonical(rf"\frac{{{part}}}{{{ratio[0]}}}") for part in ratio)
    equation = split(text, "=")
    if len(equation) == 2 and all(map(is_expression, equation)):
        numbers = values("({})-({})".format(*equation))
        return "=" + " ".join(exact(number / numbers[0]) for number in numbers)
    if is_expression(text):
        numbers = list(map(exact, values(text)))
        # At negative points the real part of a complex number depends on the branch.
        numbers[2:] = [re.sub(".*I", "I", number) for number in numbers[2:]]
        return numbers[0] if len(set(numbers)) == 1 else " ".join(numbers)
    bare = re.sub(r"\\text\{([^{}]*)\}|\{(\w)\}|(?<!\d)\s|\s(?!\d)", r"\1\2", text).strip()
    return bare.lower() if re.fullmatch("[A-Z]?[a-z]{2,}|NO|YES|TRUE|FALSE", bare) else bare


def is_expression(text: str) -> bool:
    """Whether each token of a text is known, so that the parser drops none, and its value is computed fast."""
    return bool(text.strip()) and not PATTERNS["unread"].match(text) and PATTERNS["tokens"].fullmatch(text) is not None


def values(text: str) -> list[Any]:
    """An expression by SymPy at positive and negative values of its symbols; raises what the parser raises."""
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
    from sympy import Expr, I, Rational, Symbol

    text = re.sub(r"(\d+(?:\.\d+)?)°", r"(\1*\\frac{\\pi}{180})", text)
    text = re.sub(r"(\d*)\.(\d+)", lambda found: rf"\frac{{{found[1]}{found[2]}}}{{1{'0' * len(found[2])}}}", text)
    text = PATTERNS["factors"].sub(lambda found: found[1] or "*", text)
    config = ConversionConfig(interpret_as_mixed_fractions=False, lowercase_symbols=False)
    parsed = latex2sympy(text, normalization_config=None, conversion_config=config)
    parsed = parsed.subs({I: Symbol("I"), Symbol("i"): I}, simultaneous=True).doit()
    if not isinstance(parsed, Expr):
        raise TypeError(f"{text!r} is no expression.")
    point = {symbol: Rational(crc32(str(symbol).encode()) % 99_991, 10_007) for symbol in parsed.free_symbols}
    points = [point, {symbol: 40 * number for symbol, number in point.items()}]
    points += [point | {symbol: -point[symbol]} for symbol in sorted(point, key=str)]
    return [parsed.subs(one) for one in points]


def exact(number: Any) -> str:
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


def is_rounded(text: str, long: str) -> bool:
    """Whether a canonical number of at least six digits is one with many decimal places, rounded or cut."""
    digits = re.sub(r"\D", "", text).lstrip("0")
    if not re.fullmatch(r"-?\d+\.\d+", text) or not re.fullmatch(r"-?\d+\.\d{30,}", long) or len(digits) < 6:
        return False
    return long.startswith(text) or str(round(Decimal(long), len(text.partition(".")[2]))) == text


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
