r"""Equality of final answers in mathematics. An answer is read wholly, or compared as text.

Lists, names, inequalities, brackets, matrices, moduli, units and mixed numbers are split explicitly and compared part
by part. What remains are expressions, which math-verify's `latex2sympy` parses with case-sensitive symbols, if each of
their tokens is known, and which are compared by value. Nothing is dropped: an unread part is compared as text.
"""

from __future__ import annotations

import re
from typing import Any

WORD_FUNCTIONS = "sin|cos|tan|cot|sec|csc|sinh|cosh|tanh|arcsin|arccos|arctan|ln|log|exp"
GREEK = "alpha|beta|gamma|delta|epsilon|theta|lambda|mu|nu|rho|sigma|tau|phi|psi|omega|Gamma|Delta|Omega|Phi|Sigma"
TOKENS = re.compile(
    r"(?:\s|\d++(?:\.\d++)?|\.\d++|[A-Za-z]|[-+/^_!|(){}]"
    rf"|\\(?:{WORD_FUNCTIONS}|{GREEK}|frac|sqrt|binom|pi|infty|cdot|circ)(?![A-Za-z]))*+"
)
REWRITES = [
    (re.compile(pattern), text)
    for pattern, text in (
        (r"[−–]", "-"),
        (r"[∞]|\binfinity\b", r"\\infty "),
        (r"π", r"\\pi "),
        (r"°|\\degree(?![A-Za-z])|\^\s*\{\s*\\circ\s*\}", r"^\\circ "),
        (r"½", r"\\frac{1}{2}"),
        (r"√", r"\\sqrt "),
        (r"∪", r"\\cup "),
        (r"\\(?:text)?color\s*\{\w*\}|\\(?:displaystyle|left|right|[bB]igg?[lr]?)(?![A-Za-z])", ""),
        (r"^\s*(\*\*|__|`)(.*)\1\s*$", r"\2"),
        (r"\\\\", "¶"),  # a row's end
        (r"\\\{|\\lbrace(?![A-Za-z])", "«"),
        (r"\\\}|\\rbrace(?![A-Za-z])", "»"),
        (r"\\\$ ?(\d[\d.,]*)", r"\1\\text{dollars}"),
        (r"(?<=\d) ?\\\$", r"\\text{dollars}"),
        (r"\\\$|\$|\\[()\[\]!]", ""),
        (r"(?<![\w.^])\d{1,3}(?:(?:\{,\}|\\[,;: ]|~| )\d{3})+(?![\d/])", lambda found: re.sub(r"\D", "", found[0])),
        (r"(?<![\w.([,])\d{1,3}(?:,\d{3})+(?![\w,])", lambda found: found[0].replace(",", "")),
        (r"\\[,;: ]|\\q?quad(?![A-Za-z])|(?<=.)~|\s+", " "),
        (r"≡", r"\\equiv "),
        (r"(?<!\\)\.\s*$", ""),
        (r"\\(?:math(?:rm|bf|it|sf)|text(?:bf|rm|it|up)|mbox|operatorname)(?![A-Za-z])", r"\\text"),
        (r"\\text\s*\{\s*(pi|sqrt|mod|" + WORD_FUNCTIONS + r")\s*\}", r"\\\1 "),
        (r"\\text\s*\{([^{}]*?)\s*\b(and|or)\b\s*([^{}]*)\}", r"\\text{\1}\\\2 \\text{\3}"),
        (r"\\text\s*\{\s*\}", " "),
        (r"(?<![A-Za-z\\])(and|or)(?![A-Za-z])", r"\\\1 "),
        (r"\\[dtc]frac", r"\\frac"),
        (r"\\(?:[dc]?dots[cb]?)(?![A-Za-z])|…|\.\.\.", r"\\ldots "),
        (r"\\(?:leq|leqslant)(?![A-Za-z])|<=|≤", r"\\le "),
        (r"\\(?:geq|geqslant)(?![A-Za-z])|>=|≥", r"\\ge "),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"\\varnothing|\\emptyset", "«»"),
        (r"\\[lr]vert(?![A-Za-z])", "|"),
        (r"\*\*", "^"),
        (r"\*|·|×|\\times(?![A-Za-z])", r"\\cdot "),
        (r"÷|\\div(?![A-Za-z])", "/"),
        (r"(?<![A-Za-z\\{])(pi|sqrt|" + WORD_FUNCTIONS + r")(?![A-Za-z])", r"\\\1 "),
        (r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"\\sqrt\s*(\d|[A-Za-z]|\\pi)", r"\\sqrt{\1}"),
        (r"\\frac\s*([\dA-Za-z])", r"\\frac{\1}"),
        (r"(\\frac\s*\{[^{}]*\})\s*([\dA-Za-z])", r"\1{\2}"),
        (r"(?<![\w.})])(\d+) ?\\frac\{(\d+)\}\{(\d+)\}$", r"(\1+\\frac{\2}{\3})"),
        (r"(?<![\w.})/])(\d+) (\d+)/(\d+)$", r"(\1+\\frac{\2}{\3})"),
        (r"([\d)}A-Za-z] ?[+-] ?)c$", r"\1C"),  # the constant of integration
        (r"^([+-]?\d+(?:\.\d+)?)[eE]([+-]?\d+)$", r"\1\\cdot 10^{\2}"),
        (r"(\d)\.(\d*)\\(?:overline|bar) ?\{(\d+)\}(?!\d)", lambda found: _repeating(*found.groups())),
    )
]
NAME = re.compile(
    rf"(?P<name>(?:[A-Za-z]|\\(?:{GREEK})(?![A-Za-z]))(?:_(?:\w|\{{\w+\}}))?'*(?:\([^()=<>]*\))?|\d+_(?:\d|\{{\d+\}}))"
    r"(?:=|\\in(?![A-Za-z])|\\equiv(?![A-Za-z]))(?P<value>.+)"
)
OPERATION = re.compile(r"(?P<name>\\(?:int|iint|oint|sum|prod|lim|gcd|max|min|det)(?![A-Za-z])[^=]*)=(?P<value>[^=]+)")
MODULUS = re.compile(
    r"(?P<value>(?:(?!mod).)+?)\(?(?:\\[pb]?mod|(?<![A-Za-z\\])mod)"
    r"(?P<unit> ?\d+| ?[A-Za-z]|\([^()]*\)|\{(?:[^{}]|\{[^{}]*\})*\})\)?"
)
UNIT = re.compile(
    r"(?P<value>-?(?:[\d.,/^{}+()-]|\\frac|\\sqrt|\\pi|\\cdot)*(?:[\d)}i]|\\pi))"
    r"(?P<unit>(?:\^\\circ ?)?(?:\\text ?\{[^{}]*\}|\\?%|(?<=\\circ )[A-Z]|(?<=\\circ)[A-Z])?(?:/\\text ?\{[^{}]*\})?"
    r"(?:(?<=\})\^\{?-?\d\}?)?|_\d|_\{\d+\}| [A-Za-z]{2,})"
)
CONDITION = re.compile(r"\b(?:if|when|for|where|while|unless|otherwise|except|not|with|as|mod|base|times|more|less)\b")
COMPARED = re.compile(r"<|>|\\le(?![A-Za-z])|\\ge(?![A-Za-z])|=")
FOLDED = {"yes", "no", "true", "false", "none", "odd", "even"}

Reading = tuple[Any, ...]


def same_answer(gold: str, given: str) -> bool:
    r"""Whether two answers are equal; a `\log` without a base is natural where the other answer has `\ln`."""
    sides = [_clean(text) for text in (gold, given)]
    has_ln = [r"\ln" in side for side in sides]
    has_log = [re.search(r"\\log(?!_|[A-Za-z])", side) is not None for side in sides]
    if sorted(zip(has_ln, has_log, strict=True)) == [(False, True), (True, False)]:
        sides = [re.sub(r"\\log(?!_|[A-Za-z])", r"\\ln", side) for side in sides]
    return _same(*map(_read, sides))


def _clean(text: str) -> str:
    for pattern, replacement in REWRITES:
        text = pattern.sub(replacement, text.strip())
    return re.sub(r" ?([^\w ]) ?", r"\1", re.sub(r"\s+", " ", text.strip()))


def _repeating(whole: str, fixed: str, repeated: str) -> str:
    numerator = int(whole + fixed + repeated) - int(whole + fixed)
    return rf"\frac{{{numerator}}}{{{10 ** len(fixed) * (10 ** len(repeated) - 1)}}}"


def _read(text: str) -> Reading:
    """The reading of a cleaned answer: a kind and its parts, `("text", text)` where no other applies."""
    text = text.strip()
    if text[:1] == "{" and _closes_last(text):
        return _read(text[1:-1])
    if (found := re.fullmatch(r"\\text ?\{([^{}]*)\}", text)) is not None:
        return _read(found[1].strip())
    if (found := MODULUS.fullmatch(text)) is not None and (r"\equiv" in text or "(" in text or r"\pmod" in text):
        left, _, residue = found["value"].rpartition(r"\equiv")
        value = residue if re.fullmatch(r"(?:[\d^{}]|\\equiv)+|[A-Za-z]", left) else found["value"]
        return ("marked", "modulus", found["unit"].strip("{} ()"), _read(value))
    if text.startswith(r"\in", 1) and (found := NAME.fullmatch(text)) is not None:
        return ("marked", "name", found["name"], _read(found["value"]))
    items, signs = _split(text, re.compile(r"[,;]|\\(?:and|or|cup)(?![A-Za-z])"))
    items = [item for item in items if item.strip()]
    if len(items) > 1:
        return _list(items, signs)
    for pattern in (NAME, OPERATION):
        if (found := pattern.fullmatch(text)) is not None:
            return ("marked", "name", found["name"], _read(found["value"]))
    sides, signs = _split(text, COMPARED)
    if signs:
        return _relation(sides, signs, text)
    return _bracket(text) or _quantity(text)


def _list(items: list[str], signs: list[str]) -> Reading:
    if r"\ldots" in (item.strip() for item in items):
        return ("sequence", *(_read(item) for item in items))
    readings = [_read(item) for item in items]
    are_intervals = all(_unmarked(reading)[0] == "bracket" for reading in readings)
    is_union = r"\cup" in signs or (are_intervals and set(signs) <= {r"\or"})
    kind = "union" if is_union else "both" if are_intervals and r"\and" in signs else "list"
    return (kind, *readings)


def _relation(sides: list[str], signs: list[str], text: str) -> Reading:
    """An interval of a variable, or a relation `left sign right`."""
    sides = [side.strip() for side in sides]
    is_down = {">", r"\ge"}.issuperset(signs)
    if is_down:
        sides, signs = sides[::-1], [{">": "<", r"\ge": r"\le"}[sign] for sign in signs[::-1]]
    names = [place for place, side in enumerate(sides) if re.fullmatch(r"[A-Za-z]", side)]
    if "=" not in signs and len(sides) <= 3 and names and (len(sides) == 2 or names == [1]):
        place = names[0]
        low, high = (
            (sides[place - 1] if place else r"-\infty"),
            (sides[place + 1] if place + 1 < len(sides) else r"\infty"),
        )
        left = "[" if place and signs[place - 1] == r"\le" else "("
        right = "]" if place < len(signs) and signs[place] == r"\le" else ")"
        return ("marked", "name", sides[place], ("bracket", left + right, _read(low), _read(high)))
    if len(sides) == 2 and all(sides):
        return ("relation", signs[0], _read(sides[0]), _read(sides[1]))
    return ("text", _as_text(text))


def _bracket(text: str) -> Reading | None:
    """A tuple, an interval, a set, a matrix, or an expression in parentheses."""
    if (found := re.fullmatch(r"\\begin ?\{[pb]matrix\}(.*)\\end ?\{[pb]matrix\}", text)) is not None:
        rows = [tuple(_read(cell) for cell in row.split("&")) for row in found[1].strip("¶ ").split("¶")]
        return ("matrix", *(("row", *row) for row in rows))
    if not (text[:1] in tuple("([«") and text[-1:] in tuple(")]»") and _closes_last(text)):
        return None
    inner = text[1:-1]
    items, _ = _split(inner, re.compile(","))
    if text[0] == "«":
        return ("set", *(_read(item) for item in items if item.strip()))
    if len(items) > 1:
        return ("bracket", text[0] + text[-1], *(_read(item) for item in items))
    return _read(inner) if text[0] + text[-1] == "()" else None


def _quantity(text: str) -> Reading:
    r"""A number with its unit, several of them, a ratio, an expression, or a text."""
    parts = re.split(r"(?<=[a-z]\})(?= ?\d)", text)
    if len(parts) > 1 and r"\text" in parts[-1]:
        return ("sequence", *(_quantity(part) for part in parts))
    found = UNIT.fullmatch(text)
    if found is not None and found["unit"] and CONDITION.search(found["unit"]) is None and found["value"] != "(":
        return ("marked", "unit", _as_text(found["unit"].replace("\\%", "%")), _read(found["value"]))
    ratio = text.split(":")
    if len(ratio) > 1 and all(map(_is_expression, ratio)) and not re.fullmatch(r"\d{1,2}(:\d\d)+", text):
        return ("ratio", *ratio)
    if re.search(r"\\[pm]{2}(?![A-Za-z])", text):
        signs = [
            re.sub(r"\\(pm|mp)(?![A-Za-z])", lambda m, s=s: s[m[1]], text)
            for s in ({"pm": "+", "mp": "-"}, {"pm": "-", "mp": "+"})
        ]
        return ("list", *(_read(one.removeprefix("+")) for one in signs))
    return ("value", text) if _is_expression(text) else ("text", _as_text(text))


def _is_expression(text: str) -> bool:
    """Whether each token of a text is known, so that reading it as an expression drops none."""
    unread = r"[A-Za-z]+(?: [A-Za-z]+)*(?<=..)\Z|.*(?:(?<![\\A-Za-z])[A-Za-z]{4}|[\d.] [\d.]|\\frac\{d|d/d[a-z])"
    return bool(text) and re.match(unread, text) is None and TOKENS.fullmatch(text) is not None


def _split(text: str, separator: re.Pattern[str]) -> tuple[list[str], list[str]]:
    """Parts of a text between the separators outside brackets, and these separators."""
    parts, signs, depth, start = [], [], 0, 0
    for found in re.finditer(rf"(?P<separator>{separator.pattern})|[(\[{{«]|[)\]}}»]", text):
        if found["separator"] is None:
            depth += 1 if found[0] in "([{«" else -1
        elif depth == 0:
            parts.append(text[start : found.start()])
            signs.append(found[0])
            start = found.end()
    return [*parts, text[start:]], signs


def _closes_last(text: str) -> bool:
    """Whether the bracket that opens a text closes at its end."""
    depth = 0
    for place, sign in enumerate(text):
        depth += (sign in "([{«") - (sign in ")]}»")
        if depth == 0:
            return place == len(text) - 1
    return False


def _as_text(text: str) -> str:
    bare = re.sub(r"\\text ?|[{}\s]", "", text).strip(".")
    return bare.lower() if bare.lower() in FOLDED or re.fullmatch("[A-Z]?[a-z]{3,}", bare) else bare


def _unmarked(reading: Reading) -> Reading:
    while reading[0] == "marked":
        reading = reading[3]
    return reading


def _same(one: Reading, other: Reading) -> bool:
    """Whether two readings are equal. A name, unit or modulus that one of them alone has is ignored."""
    if one == other:
        return True
    if "relation" in (one[0], other[0]):
        return _same_relation(one, other)
    marks: list[dict[str, str]] = [{}, {}]
    for side, reading in enumerate((one, other)):
        while reading[0] == "marked":
            marks[side].setdefault(reading[1], reading[2])
            reading = reading[3]
        one, other = (reading, other) if side == 0 else (one, reading)
    if any(marks[0][kind] != marks[1][kind] for kind in marks[0].keys() & marks[1].keys()):
        return False
    kinds = {"list" if kind == "set" else kind for kind in (one[0], other[0])}
    if kinds == {"value"}:
        percents = [mark.get("unit") == "%" for mark in marks]
        return _same_value(one[1], other[1]) or (
            percents[0] != percents[1]
            and _same_value(
                *(
                    f"({side[1]})/100" if is_percent else side[1]
                    for side, is_percent in zip((one, other), percents, strict=True)
                )
            )
        )
    if len(kinds) > 1 or "text" in kinds:
        return one == other
    if kinds == {"ratio"}:
        return len(one) == len(other) and all(
            _same_value(f"({one[1]})({second})", f"({other[1]})({first})")
            for first, second in zip(one[2:], other[2:], strict=True)
        )
    if kinds == {"sequence"}:
        return _same_sequence(list(one[1:]), list(other[1:]))
    if kinds & {"list", "union", "both"}:
        return _same_items(list(one[1:]), list(other[1:]))
    parts = [reading[2:] if kinds == {"bracket"} else reading[1:] for reading in (one, other)]
    return (kinds != {"bracket"} or one[1] == other[1]) and len(parts[0]) == len(parts[1]) and all(map(_same, *parts))


def _same_items(some: list[Reading], others: list[Reading]) -> bool:
    """Whether two lists have the same items, in any order."""
    if len(some) != len(others) or len(some) > 12:
        return False
    for item in some:
        match = next((place for place, other in enumerate(others) if _same(item, other)), None)
        if match is None:
            return False
        del others[match]
    return True


def _same_sequence(some: list[Reading], others: list[Reading]) -> bool:
    r"""Whether sequences are equal. Before an ellipsis one may have more terms of the same progression."""
    dots = ("text", r"\ldots")
    if dots in some and dots in others:
        heads = sorted((some[: some.index(dots)], others[: others.index(dots)]), key=len)
        steps = (
            {_difference(before, after) for before, after in zip(heads[1], heads[1][1:], strict=False)}
            if len(heads[0]) < len(heads[1])
            else set()
        )
        if len(heads[0]) < 2 or len(steps) > 1 or None in steps:
            return len(some) == len(others) and all(map(_same, some, others))
        tails = some[some.index(dots) :], others[others.index(dots) :]
        return all(map(_same, heads[0], heads[1])) and len(tails[0]) == len(tails[1]) and all(map(_same, *tails))
    return len(some) == len(others) and all(map(_same, some, others))


def _difference(before: Reading, after: Reading) -> str | None:
    if before[0] != "value" or after[0] != "value":
        return None
    return str(_value(f"({after[1]})-({before[1]})"))


def _same_relation(one: Reading, other: Reading) -> bool:
    """Whether two equations or inequalities have proportional differences of their sides."""
    sides = []
    for reading in (one, other):
        if reading[:2] == ("marked", "name") and re.fullmatch(r"[A-Za-z]", reading[2]) and reading[3][0] == "value":
            reading = ("relation", "=", ("value", reading[2]), reading[3])
        if reading[0] != "relation":
            return False
        sides.append(reading)
    (_, sign, *left), (_, second, *right) = sides
    if sign != second:
        return False
    if all(map(_same, left, right)) or (sign == "=" and all(map(_same, left, right[::-1]))):
        return True
    if any(side[0] != "value" for side in (*left, *right)):
        return False
    first, last = (f"({low[1]})-({high[1]})" for low, high in (left, right))
    quotients = _quotients(*map(_value, (first, last)))
    return len(quotients) > 1 and all(
        abs(one / quotients[0] - 1) < CLOSE and (sign == "=" or (one.real > 0 and not one.imag)) for one in quotients
    )


FACTORS = re.compile(  # where the parser needs a product sign: it reads `2(3)` as a mixed number
    rf"(?P<function>\\(?:{WORD_FUNCTIONS})(?![A-Za-z])(?:[_^](?:\{{[^{{}}]*\}}|\w))* ?(?:\(|\\frac|\\sqrt|\\binom)?)"
    r"|(?<=[\w)}!]) ?(?=\()|(?<=\)) ?(?=\d)|(?<=[\d)}!]) ?(?=\\(?:frac|sqrt|binom))"
)
CLOSE = 1e-25


def _value(text: str) -> Any:
    """An expression by SymPy, with exact decimals; `None` where the parser refuses it."""
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
    from sympy import Expr, I, Symbol

    text = re.sub(r"(\d+(?:\.\d+)?)\^\\circ", r"(\1\\cdot\\frac{\\pi}{180})", text)
    text = re.sub(r"(\d*)\.(\d+)", lambda found: rf"\frac{{{found[1]}{found[2]}}}{{1{'0' * len(found[2])}}}", text)
    text = FACTORS.sub(lambda found: found["function"] or r"\cdot ", text)
    config = ConversionConfig(interpret_as_mixed_fractions=False, lowercase_symbols=False)
    try:
        value = latex2sympy(text, normalization_config=None, conversion_config=config)
        value = value.subs({I: Symbol("I"), Symbol("i"): I}, simultaneous=True).doit()
        return value if isinstance(value, Expr) else None
    except Exception:  # its errors are plain `Exception`s
        return None


def _same_value(one: str, other: str) -> bool:
    """Whether two expressions are equal whatever their symbols are, or one is the other rounded to six digits."""
    left, right = _value(one), _value(other)
    if left is None or right is None:
        return False
    if left == right or (left.is_Rational and right.is_Rational and left - right == 0):
        return True
    decimals = [re.fullmatch(r"-?0*(\d*)\.(\d+)", text) for text in (one, other)]
    if (decimals[0] is None) != (decimals[1] is None):
        digits = decimals[0] or decimals[1]
        exact, rounded = (right, left) if decimals[0] else (left, right)
        if exact.is_number and len((digits[1] + digits[2]).lstrip("0")) >= 6:
            error = abs(exact.evalf(40) - rounded)
            return bool(error <= 0.5 / 10 ** len(digits[2]) and error <= 1.01e-6 * abs(rounded))
    if left.is_Rational and right.is_Rational:
        return False
    quotients = _quotients(left, right)
    return bool(quotients) and all(abs(quotient - 1) < CLOSE for quotient in quotients)


def _quotients(left: Any, right: Any) -> list[Any]:
    """Quotients of two expressions at points of their symbols; empty where they tell nothing of their equality."""
    from sympy import Rational

    symbols = sorted(left.free_symbols | right.free_symbols, key=str)
    quotients = []
    for trial, sign in enumerate((1, 1, 1, -1) if symbols else (1,), 2):
        point = {
            one: sign * Rational(7 * (place + 3) + trial * trial, 11 + trial + 5 * place)
            for place, one in enumerate(symbols)
        }
        values = [_number(side.subs(point)) for side in (left, right)]
        if (sign < 0 and None in values) or (sign < 0 and all(abs(value.imag) > CLOSE for value in values)):
            continue
        if None in values or not values[1] or not values[0]:
            return []
        quotients.append(values[0] / values[1])
    return quotients


def _number(value: Any) -> Any:
    """A finite number by mpmath with 40 digits, or `None`."""
    import mpmath

    parts = value.evalf(40, maxn=200).as_real_imag()
    if not all(part.is_Float or part.is_Rational for part in parts):
        return None
    with mpmath.workdps(40):
        return mpmath.mpc(*(part._to_mpmath(140) for part in parts))
