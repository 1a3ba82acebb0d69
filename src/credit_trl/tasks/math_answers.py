r"""Equality of final answers in mathematics: an answer is read wholly, or compared as text.

Each answer is brought to one canonical text. Lists, brackets, equations and ratios are split; a part whose tokens are
all in `TOKENS` is an expression, which math-verify's parser reads, and becomes its values; other parts stay texts.
"""

from __future__ import annotations

import multiprocessing
import re
import resource
import time
from itertools import pairwise
from typing import Any
from zlib import crc32

from credit_trl.sandbox.cgroups import worker_count

SECONDS_PER_PAIR = 3  # that a comparison may take
DIGITS = 300
WORKER_BYTES = 2 << 30
FUNCTIONS = "sin|cos|tan|cot|sec|csc|sinh|cosh|tanh|arcsin|arccos|arctan|ln|log|exp|sqrt"
GREEK = "alpha|beta|gamma|delta|epsilon|theta|lambda|mu|nu|rho|sigma|tau|phi|psi|omega|Delta|Omega|Phi|Sigma"
UNITS = "[ckm]m|kg|kmh|ft|lb|mph|(?:unit|dollar|cent|year|day|week|month|hour|minute|second|mile|meter|way)s?"
NOTATION = dict(  # what is read for other ways to write it
    pair.split("→")
    for pair in r"""
    \left→ \right→ \big→ \Big→ \displaystyle→ \large→ \Large→ \Huge→ \underline→ \emph→ \bf→ \rm→ \mathbf→ \mathit→
    \boldsymbol→ \!→ \(→ \)→ \[→ \]→ $→ \quad→␣ \qquad→␣ \,→␣ \;→␣ \:→␣ \mathrm→\text \textbf→\text \textrm→\text
    \textit→\text \mbox→\text \operatorname→\text \dfrac→\frac \tfrac→\frac \cfrac→\frac ½→\frac12 ¾→\frac34 ⅓→\frac13
    −→- –→- **→^ ²→^2 ³→^3 °→^\circ \degree→^\circ degrees→^\circ percent→\% *→\cdot ·→\cdot ×→\cdot \times→\cdot
    \dots→\ldots \cdots→\ldots …→\ldots ...→\ldots \leq→\le \leqslant→\le ≤→\le <=→\le \geq→\ge \geqslant→\ge ≥→\ge
    >=→\ge \neq→\ne !=→\ne \lt→< \gt→> ∞→\infty oo→\infty infinity→\infty π→\pi pi→\pi √→\sqrt atan→\arctan
    asin→\arcsin ≡→\equiv mod→\mod \pmod→\mod \bmod→\mod ∪→\cup or→\or and→, ;→, \langle→( \rangle→) \{→« \}→»
    \emptyset→«» \varnothing→«» \\→¶
    """.split()
) | {name: f"\\{name}" for name in f"{FUNCTIONS}|{GREEK}".split("|")}
SIGN = re.compile(r"\\?[A-Za-z]+|\\.|\*\*|[<>!]=|\.{3}|.")
REWRITES = (  # in this order
    (r"(?:\\ |␣|(?<=.)~| )+", " "),
    (r"^ *= ?|[., ]+$|\\(?:text)?color ?\{\w*\}", ""),
    (r" *([^\w ]|_) *", r"\1"),
    (r"(?<![\w.^(\[])\d{1,3}(?:(?:[, ]|\{,\})\d{3})+(?![\w,/])", lambda found: re.sub(r"\D", "", found[0])),
    (r"\\\$(\d+(?:\.\d+)?)", r"\1\\text{dollars}"),
    (r"^([+-]?\d+(?:\.\d+)?)[eE]([+-]?\d+)$", r"\1\\cdot 10^{\2}"),
    (r"\\text\{([^{}]*?)(,|\\or ?|\\mod ?|\^\\circ ?|\\%)([^{}]*)\}", r"\\text{\1}\2 \\text{\3}"),
    (r"\\text\{ *([()]?) *\}", r"\1"),
    (r"\babs\(([^()]*)\)", r"|\1|"),
    (r"\^\(([^()]*)\)|([_^])(-?\d+(?:\.\d+)?|\w)", lambda found: f"{found[2] or '^'}{{{found[1] or found[3]}}}"),
    (r"\\sqrt ?(?:\(([^()]*)\)|(\w|\\pi))", r"\\sqrt{\1\2}"),
    (r"\\frac *(\w)", r"\\frac{\1}"),
    (r"(\\frac\{[^{}]*\}) ?(\w)", r"\1{\2}"),
    (r"(?<![\w.})/^])(\d+) (\d+)/(\d+)(?![\w/^])", r"\1\\frac{\2}{\3}"),
    (r"(?<![\w.})^])(\d+)\\frac\{(\d+)\}\{(\d+)\}", r"(\1+\\frac{\2}{\3})"),
    (r"([\d)}A-Za-z][+-])c$", r"\1C"),  # the constant of integration
    (r"\\begin\{[pb]matrix\}(.*?)¶?\\end\{[pb]matrix\}", lambda found: f"⟦{found[1].replace('&', ',')}⟧"),
    (r"[A-Za-z]\\equiv ?(.+?)\(?\\mod[ ({]*([^(){}]+)[)}]*$", r"\1\\mod \2"),
)
LISTED = r",|\\(?:or|cup)(?![a-z]) ?"
SYMBOL = rf"(?:[A-Za-z]|\\(?:{GREEK}) ?)"
NAME = re.compile(  # at the start of a part
    rf"(?P<value>^|«|{LISTED})(?P<mark>\([a-z](?:,[a-z])+\)|[A-Z]?{SYMBOL}(?:_\{{\w+\}})?(?:\([^()=]*\))?)"
    rf"(?:=|\\in(?![a-z]) ?)(?=[^=,]+(?:»|{LISTED}|$))"
)
UNIT = re.compile(  # at the end of a part that is a number
    rf"(?P<value>(?:^|(?<=[,(«=])|{LISTED})(?:\\(?:frac|sqrt|pi|cdot)(?![a-z])|[^A-Za-z\\:=,])*(?:[\d)}}]|\\pi ?))"
    rf"(?P<mark>(?:/?(?:\\text\{{(?:[ /^\d]|(?:per|[LNWhgms]|{UNITS})(?![a-z]))+\}}| ?(?:{UNITS}))(?:\^\{{-?\d\}})?)+"
    rf"|\\%|\^\{{?\\circ\}}?|_\{{\d+\}}|\(?\\mod[^\\]+)(?=[»)]|{LISTED}|$)"
)
TOKENS = re.compile(  # numbers, up to three letters, signs, commands
    r"(?:\s|(?<!\^\{\d\} )(?<!\) )(?:(?:0|[1-9]\d*+)?\.\d++|0(?![\dA-Za-z])|[1-9]\d*+)(?! ?[\d._])"
    r"|(?<![A-Za-z])[A-Za-z]{1,3}(?![A-Za-z])|[-+/!|(){}]|[\^_](?!\{?T)|\\sqrt\[\w+\]"
    rf"|\\(?:{FUNCTIONS}|{GREEK}|frac(?!\{{d)|binom|pi|cdot|circ|infty)(?![A-Za-z]))++"
)
UNREAD = re.compile(  # words, dates, derivatives and what takes long to evaluate
    r"[A-Za-z ]{2,}\Z|.*(?:\d/\d+/\d|d/d[a-z]|\^\{-?\d{5}|\d\}?\^\{\d+\}?\^\{\d|\d{4}\)*!|\\binom\{\d*(?:\d{4}|\d\^)"
    r"|\^\{[^{}]+\^\{[^{}]+\^|(?:[^|]*\|){13}|(?:[^({]*[({]){17})"
)
FACTORS = re.compile(  # where the parser needs a product sign: it reads `2(3)` as a mixed number
    rf"(?P<function>\\(?:{FUNCTIONS})(?![A-Za-z])(?:[_^](?:\{{[^{{}}]*\}}|\w))* ?(?:\(|\\frac|\\sqrt|\\binom)?)"
    r"|(?<=[\w)}!]) ?(?=\()|(?<=\)) ?(?=\d)|(?<=[\d)}!]) ?(?=\\(?:frac|sqrt|binom))"
)


def same_answer(gold: str, given: str) -> bool:
    """Whether two answers are equal. A name or unit that only one of them has is ignored."""
    sides = [clean(gold), clean(given)]
    for pattern in (NAME, UNIT):
        marks = [{re.sub(r"[{}() ]|\\text", "", found["mark"]) for found in pattern.finditer(side)} for side in sides]
        is_relation = pattern is NAME and not all(marks) and all("=" in side for side in sides)
        if len(marks[0] | marks[1]) == 1 and not is_relation:
            sides = [pattern.sub(r"\g<value>", side) for side in sides]
    if sum(r"\ln" in side for side in sides) == 1:  # then a logarithm without a base is natural
        sides = [re.sub(r"\\log(?![_a-z])", r"\\ln", side) for side in sides]
    sides = [re.sub(r"^«([^«»]+,[^«»]+)»$", r"\1", side) for side in sides]
    return canonical(sides[0]) == canonical(sides[1]) or is_rounded(*sides) or is_rounded(*sides[::-1])


def clean(text: str) -> str:
    r"""One notation of each sign. Braces of sets become `«»`, matrices `⟦⟧` with `¶` after each row."""
    text = re.sub(r"^[\s$]*(\*+|`+|\"|')(.*)\1[\s$.]*$", r"\2", text)
    signs = [NOTATION.get(sign, sign) for sign in SIGN.findall(" ".join(text.split()))]
    text = "".join(f"{sign} " if re.fullmatch(r".*\\[a-z]+", sign) else sign for sign in signs)
    for pattern, replacement in REWRITES:
        text = re.sub(pattern, replacement, text.strip())
    text = ",".join(dict.fromkeys(re.sub(r"\\pm(?![a-z]) ?", one, text) for one in "+-"))
    return "".join(map(as_interval, split(text, LISTED) or [text]))


def split(text: str, separator: str) -> list[str]:
    """Parts of a text and, between them, the separators outside brackets; [] if a bracket closes that is not open."""
    pieces = [""]
    depth = 0
    for piece in re.split(rf"({separator}|[(\[{{«⟦)\]}}»⟧])", text):
        depth += (piece in tuple("([{«⟦")) - (piece in tuple(")]}»⟧"))
        if depth < 0:
            return []
        if depth == 0 and re.fullmatch(separator, piece):
            pieces += [piece, ""]
        else:
            pieces[-1] += piece
    return pieces


def as_interval(part: str) -> str:
    r"""An inequality of a symbol as `x\in(low,high)`, other parts as they are."""
    sides = re.split(r"(<|>|\\[lg]e(?![a-z]) ?)", part)
    if {">", r"\ge"}.issuperset(map(str.strip, sides[1::2])):
        sides = [side.replace(">", "<").replace(r"\ge", r"\le") for side in reversed(sides)]
    if len(sides) == 3:
        sides = [r"-\infty", "<", *sides] if re.fullmatch(SYMBOL, sides[0]) else [*sides, "<", r"\infty"]
    if len(sides) != 5 or not re.fullmatch(SYMBOL, sides[2]) or ">" in sides or re.fullmatch(SYMBOL, sides[4]):
        return part
    return rf"{sides[2]}\in{'[('[sides[1] == '<']}{sides[0]},{sides[4]}{'])'[sides[3] == '<']}"


def canonical(text: str) -> str:
    """One text for all cleaned answers, or parts of them, that are equal."""
    text = re.sub(r"^\\text\{([^{}]*)\}$", r"\1", text.strip()).strip()
    pieces = split(text, LISTED) or [text]
    parts = [part for part in pieces[::2] if part.strip()]
    if len(pieces) > 1 and r"\ldots" in parts:  # a progression by its first two terms
        heads = parts[: parts.index(r"\ldots")]
        if len({canonical(f"({after})-({before})") for before, after in pairwise(heads)}) == 1:
            del parts[2 : len(heads)]
        return ",".join(map(canonical, parts))
    if len(pieces) > 1:
        signs = sorted(set(pieces[1::2])) if any(re.search("[,A-Z]", part) for part in parts) else []
        return ",".join(sorted(map(canonical, parts))) + "".join(signs).replace(r"\or ", r"\cup").replace(" ", "")
    inner = split(text[1:-1], "[,¶]")
    if text[:1] in tuple("([{«⟦") and text[-1] in ")]}»⟧" and inner:
        if len(inner) == 1 and text[0] in "({":
            return canonical(inner[0])
        items = [part if part in (",", "¶") else canonical(part) for part in inner]
        return text[0] + "".join(sorted(items) if text[0] == "«" else items) + text[-1]
    ratio = split(text, r":(?!\d\d(?!\d))")[::2]  # `3:05` is a time
    equation = split(text, "=")[::2]
    if len(ratio) > 1 and all(map(is_expression, ratio)):
        return ":".join(canonical(rf"\frac{{{part}}}{{{ratio[0]}}}") for part in ratio)
    if len(equation) == 2 and all(map(is_expression, equation)):
        numbers = values("({})-({})".format(*equation))
        return "=" + " ".join(exact(number / numbers[0]) for number in numbers)
    if is_expression(text):
        numbers = list(map(exact, values(text)))
        at_negative = [re.sub(".*i", "i", number) for number in numbers[2:]]  # complex values depend on the branch
        return numbers[0] if len(set(numbers)) == 1 else " ".join(numbers[:2] + at_negative)
    bare = re.sub(r"\\text\{([^{}]*)\}|\{(\w)\}|(?<!\d)\s|\s(?!\d)", r"\1\2", text)
    return bare.lower() if re.fullmatch("[A-Z]?[a-z]{2,}|NO|YES|TRUE|FALSE", bare) else bare


def is_expression(text: str) -> bool:
    """Whether each token of a text is known, so that the parser drops none, and its value is computed fast."""
    return bool(text.strip()) and UNREAD.match(text) is None and TOKENS.fullmatch(text) is not None


def values(text: str) -> list[Any]:
    """An expression by SymPy at positive and negative values of its symbols; raises what the parser raises."""
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
    from sympy import Expr, I, Rational, Symbol

    text = re.sub(r"(\d+(?:\.\d+)?)\^(?:\\circ|\{\\circ\})", r"(\1\\cdot\\frac{\\pi}{180})", text)
    text = re.sub(r"(\d*)\.(\d+)", lambda found: rf"\frac{{{found[1]}{found[2]}}}{{1{'0' * len(found[2])}}}", text)
    text = FACTORS.sub(lambda found: found["function"] or r"\cdot ", text)
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
    from sympy import nan

    if number is nan:
        raise ValueError("The value is undefined.")
    if number.is_Integer or not number.is_finite:
        return str(number)
    parts = number.evalf(DIGITS + 20, maxn=2 * DIGITS).as_real_imag()
    texts = ["0" if part.is_Float and part._prec < 10 else str(part.evalf(DIGITS)) for part in parts]
    real, imaginary = (re.sub(r"\.?0+$", "", text) or "0" for text in texts)
    return real if imaginary == "0" else f"{real}+{imaginary}i"


def is_rounded(text: str, other: str) -> bool:
    """Whether a text is a number of at least six digits to which the value of the other rounds, or is cut."""
    found = re.fullmatch(r"-?(\d*)\.(\d+)", text)
    if found is None or len((found[1] + found[2]).lstrip("0")) < 6 or "." in other or not is_expression(other):
        return False
    number = values(other)[0]
    ratio = number / values(text)[0]
    gap = (ratio - 1) * abs(values(text)[0]) * 10 ** len(found[2])
    return bool(number.is_number and not number.is_Integer and -1 <= 2 * gap.evalf(40) < 2)


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
