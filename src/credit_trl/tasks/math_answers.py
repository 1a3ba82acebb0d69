r"""Equality of final answers in mathematics: an answer is read wholly, or compared as text.

Lists, names, brackets, ratios, moduli and units are split and compared part by part. Two parts whose tokens are all in
`TOKENS` are expressions, compared by value; others are texts. A name, unit or modulus that only one answer has is
ignored. As a program, the module compares pairs in killable processes.
"""

from __future__ import annotations

import json
import multiprocessing
import re
import resource
import sys
import time
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

COMPARE_SECONDS = 3  # that a comparison may take
DEEPEST = 12  # brackets in brackets that the parser reads fast
DIGITS = 120
WORKER_BYTES = 2 << 30
FUNCTIONS = "sin|cos|tan|cot|sec|csc|sinh|cosh|tanh|arcsin|arccos|arctan|ln|log|exp|sqrt"
GREEK = "alpha|beta|gamma|delta|epsilon|theta|lambda|mu|nu|rho|sigma|tau|phi|psi|omega|Delta|Omega|Phi|Sigma"
WORDS = f"and|or|pi|infinity|oo|asin|acos|atan|{FUNCTIONS}|{GREEK}"  # commands that are written without a backslash
TOKENS = re.compile(
    r"(?:\s|\d++(?:\.\d++)?|\.\d++|[A-Za-z]|[-+/^_!|(){}]"
    rf"|\\sqrt\[\w+\]|\\(?:{FUNCTIONS}|{GREEK}|frac|binom|pi|cdot|circ|infty)(?![A-Za-z]))*+"
)
SIGNS = (
    "½ \\frac12 − - – - π \\pi ∞ \\infty ° ^\\circ √ \\sqrt ≤ \\le ≥ \\ge · \\cdot × \\cdot "
    "∪ \\cup ≡ \\equiv … \\ldots ... \\ldots >= \\ge <= \\le != \\ne "
    "¼ \\frac14 ¾ \\frac34 ⅓ \\frac13 ⅔ \\frac23 ² ^2 ³ ^3"
).split()
COMMANDS = {  # notation: what else is written for it
    "": "left right big Big bigl bigr Bigl Bigr displaystyle textstyle large Large huge Huge underline emph bf rm "
    "mathbf mathit boldsymbol",
    " ": "quad qquad",
    r"\frac": "dfrac tfrac cfrac",
    r"\text": "mathrm mathsf textbf textrm textit mbox operatorname",
    r"\le": "leq leqslant",
    r"\ge": "geq geqslant",
    "<": "lt",
    ">": "gt",
    r"\ne": "neq",
    r"\infty": "infinity oo",
    r"\arcsin": "asin",
    r"\arccos": "acos",
    r"\arctan": "atan",
    r"\cdot": "times ast",
    r"\ldots": "dots cdots dotsc",
    "«»": "emptyset varnothing",
    r"^\circ": "degree degrees",
    "|": "lvert rvert vert",
    "(": "langle",
    ")": "rangle",
}
NAMES = {name: notation for notation, names in COMMANDS.items() for name in names.split()}
REWRITES = (
    (r"(?<![\w.^(\[])\d{1,3}(?:(?:,|\{,\}|\\,|\\ |~| )\d{3})+(?![\w,/])", lambda found: re.sub(r"\D", "", found[0])),
    (r"\\\$ ?(\d[\d.,]*)", r"\1\\text{dollars}"),
    (r"\\(?:text)?color\s*\{\w*\}|\\[()\[\]!]|\$|\.\s*$", ""),
    (r"""^\s*(\*+|`+|"|')(.*)\1\s*$""", r"\2"),
    (r"^\s*=", ""),
    (r"\\[,;: ]|(?<=.)~|\s+", " "),
    (r"(\d:\d\d) ?(?:\\text ?\{)? ?([AaPp])\.? ?[Mm]\b\.?\}?", lambda found: f"{found[1]}{found[2].lower()}m"),
    (r"\\text ?\{ ?degrees? ?\}", r"^\\circ"),
    (r"\\text ?\{ ?percent ?\}", r"\\%"),
    (r"\\mathbb ?(?:R|\{R\})(?! ?[\w^_{*+-])", r"(-\\infty,\\infty)"),
    (r"\\text ?\{([^{}]*?)\b(and|or|mod)\b([^{}]*)\}", r"\\text{\1} \2 \\text{\3}"),
    (r"\\text ?\{\s*([()]?)\s*\}", r"\1"),
    (rf"(?<![A-Za-z\\{{])({WORDS})(?![A-Za-z])", lambda found: NAMES.get(found[1], f"\\{found[1]}") + " "),
    (r"(?<![A-Za-z])\\?abs ?\(([^()]*)\)", r"|\1|"),
    (r"\*\*", "^"),
    (r"\*", r"\\cdot "),
    (r"\^ ?(?:\(([^()]*)\)|(-\d+|\d+\.\d+))", r"^{\1\2}"),
    (r"\\sqrt ?\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"\\sqrt ?(\d|[A-Za-z]|\\pi)", r"\\sqrt{\1}"),
    (r"\\log ?_ ?(\w)", r"\\log_{\1}"),
    (r"\\frac ?([\dA-Za-z])", r"\\frac{\1}"),
    (r"(\\frac\{[^{}]*\}) ?([\dA-Za-z])", r"\1{\2}"),
    (r"(?<![\w.})^])(\d+) ?\\frac\{(\d+)\}\{(\d+)\}", r"(\1+\\frac{\2}{\3})"),
    (r"(?<![\w.})/^])(\d+) (\d+)/(\d+)(?![\w/^])", r"(\1+\\frac{\2}{\3})"),
    (r"^([+-]?\d+(?:\.\d+)?)[eE]([+-]?\d+)$", r"\1\\cdot 10^{\2}"),
    (r"([\d)}A-Za-z] ?[+-] ?)c$", r"\1C"),  # the constant of integration
    (r" ?([^\w ]) ?", r"\1"),
    (r"\\begin\{[pb]matrix\}(.*?)¶?\\end\{[pb]matrix\}", lambda found: f"⟦{found[1].replace('&', ',')}⟧"),
)
NAME = re.compile(
    rf"(?P<mark>\([a-z](?:,[a-z])+\)|(?:[A-Z]?[A-Za-z]|\\(?:{GREEK}))(?:_(?:\w|\{{\w+\}}))?'*(?:\([^()=]*\))?)"
    r"(?:=|\\in(?![a-z]))(?P<value>[^=]+)"
)
MODULUS = re.compile(r"(?:[A-Za-z]\\equiv)?(?P<value>[^m=]+?)\(?\\?[pb]?mod[ ({]*(?P<mark>(?:[^(){}]|\{\w+\})+)[)}]*")
UNIT = re.compile(
    r"(?P<value>(?:\\(?:frac|sqrt|pi|cdot)(?![a-z])|[^A-Za-z\\:=])*(?:[\d)}i]|\\pi ?))"
    r"(?P<mark>(?:\\text ?\{[^{}]*\}(?:\^\{?-?\d\}?)?/?)+|\\?%|\^\\circ[CF]?| (?:[ckm]m|kg|[A-Za-z]{4,})|_\{?\d+\}?)"
)
CONDITION = re.compile(  # words that are no unit, since they change the answer
    r"\b(?:if|when|for|where|otherwise|except|not|with|mod|times|more|less|than|only|at|about)\b"
    r"|squared|cubed|factorial|hundred|thousand|illion|dozen|half|halves|third|quarter|fifth|tenth"
)
LISTED = re.compile(r"[,;]|\\(?:and|or|cup)(?![A-Za-z])")
COMPARED = re.compile(r"<|>|\\[lg]e(?![A-Za-z])|=")
RATIO = re.compile(r":(?!\d\d(?!\d))")  # `3:05` is a time
ROW = re.compile("[,¶]")
UNREAD = re.compile(  # words, joined numbers, dates, digits of another base, transposes, derivatives
    r" *[A-Za-z]+(?: [A-Za-z]+)*(?<=[A-Za-z ][A-Za-z]) *\Z"
    r"|.*(?:(?<![\\A-Za-z])[A-Za-z]{4}|[\d.] [\d.]|(?<![\d.])0[\dA-Za-z]|\d/\d+/\d|\d_|\^\{?T|\\frac\{d|d/d[a-z])"
)


EXPENSIVE = re.compile(  # long exponents, towers, factorials and binomials of large numbers, many bars or functions
    r".*(?:\^\{?-?\d{5}|\d\}?\^\{?\d+\}?\^\{?\d|\d{4}\)*!|\\binom\{\d*(?:\d{4}|\d\^)"
    rf"|\^(?:\{{[-+\w]+|\w)\^(?:\{{[-+\w]+|\w)\^|(?:[^|]*\|){{13}}|(?:.*?\\(?:{FUNCTIONS})){{9}})"
)


def same_answer(gold: str, given: str) -> bool:
    """Whether two answers are equal. A logarithm without a base is natural where the other answer has `ln`."""
    sides = [clean(text) for text in (gold, given)]
    if sum(r"\ln" in side for side in sides) == 1:
        sides = [side if r"\ln" in side else re.sub(r"\\log(?![_A-Za-z])", r"\\ln", side) for side in sides]
    return same(*sides)


def clean(text: str) -> str:
    r"""One notation of each sign. Braces of sets become `«»`, matrices `⟦⟧` with `¶` after each row."""
    for sign, notation in (("\\\\", "¶"), (r"\{", "«"), (r"\}", "»"), *zip(SIGNS[::2], SIGNS[1::2], strict=True)):
        text = text.replace(sign, f"{notation} " if notation[-1:].isalpha() else notation)
    text = re.sub(r"\\([A-Za-z]+)", lambda found: NAMES.get(found[1], found[0]), text)
    for pattern, notation in REWRITES:
        text = re.sub(pattern, notation, text.strip())
    both = [re.sub(r"\\pm(?![a-z])", sign, text) for sign in "+-"]
    return text if both[0] == text else ",".join(both)


def same(gold: str, given: str) -> bool:
    """Whether two cleaned answers, or parts of them, are equal."""
    sides = [plain(gold), plain(given)]
    lists = [split(side, LISTED) for side in sides]
    if sides[0] == sides[1] or len(lists[0][0]) > 1 or len(lists[1][0]) > 1:
        return sides[0] == sides[1] or same_list(*lists)
    for pattern in (MODULUS, NAME, UNIT):
        found = [pattern.fullmatch(side) for side in sides]
        marks = [one["mark"] for one in found if one is not None]
        kinds = set(map(as_text, marks))
        if any(map(CONDITION.search, marks)) or (len(kinds) > 1 and pattern is not NAME):
            return False
        if len(kinds) == 1 and not any(one is None and "=" in side for one, side in zip(found, sides, strict=True)):
            return same(*(side if one is None else one["value"] for side, one in zip(sides, found, strict=True)))
    for pattern in (COMPARED, RATIO):
        (parts, signs), (others, other_signs) = (split(side, pattern) for side in sides)
        if signs or other_signs:
            return signs == other_signs and same_relation(parts, others, signs[0])
    if sides[0][:1] in tuple("([«⟦") and all(map(is_wrapped, sides)) and sides[0][-1:] == sides[1][-1:]:
        inner = [split(side[1:-1], ROW) for side in sides]
        return sides[0][0] == sides[1][0] and same_list(*inner, is_ordered=sides[0][0] != "«")
    if all(map(is_expression, sides)):
        return same_value(*sides)
    return as_text(sides[0]) == as_text(sides[1])


def plain(text: str) -> str:
    r"""A part without braces around it; an inequality of a symbol becomes `x\in(low,high)`."""
    text = text.strip()
    wrapped = re.fullmatch(r"\\text ?\{([^{}]*)\}", text)
    if wrapped is not None or (text[:1] in tuple("{«") and is_wrapped(text) and (text[0] == "{" or "," in text)):
        return plain(text[1:-1] if wrapped is None else wrapped[1])
    sides, signs = split(text, COMPARED)
    if signs and {">", r"\ge"}.issuperset(signs):
        sides = sides[::-1]
        signs = [sign.replace(">", "<").replace("ge", "le") for sign in signs[::-1]]
    names = [place for place, side in enumerate(sides) if re.fullmatch(rf" ?(?:[A-Za-z]|\\(?:{GREEK})) ?", side)]
    if not signs or "=" in signs or len(sides) > 3 or (names != [1] and (not names or len(sides) > 2)):
        return text
    low = sides[0] if names[0] else r"-\infty"
    high = sides[-1] if names[0] < len(sides) - 1 else r"\infty"
    left = "[" if names[0] and signs[0] == r"\le" else "("
    right = "]" if names[0] < len(sides) - 1 and signs[-1] == r"\le" else ")"
    return rf"{sides[names[0]].strip()}\in{left}{low},{high}{right}"


Parts = tuple[list[str], list[str]]  # and the separators between them


def same_list(one: Parts, other: Parts, *, is_ordered: bool = False) -> bool:
    """Whether the parts are equal, in any order unless one of the lists has an ellipsis or names its parts."""
    kinds, lists, names = [], [], []
    for parts, signs in (one, other):
        items = [plain(part) for part in parts if part.strip()]
        names.append({item.partition("=")[0] for item in items if "=" in item})
        is_union = r"\cup" in signs or all(re.match(r".\\in[(\[]", item) for item in items)
        kinds.append("list" if not is_union else "union" if {r"\cup", r"\or"}.issuperset(signs) else "intersection")
        lists.append(without_repeated_steps(items))
    if kinds[0] != kinds[1] or len(lists[0]) != len(lists[1]):
        return False
    if is_ordered or r"\ldots" in lists[0] or max(map(len, names)) > 1 > min(map(len, names)):
        return (one[1] == other[1] or r"\ldots" in lists[0]) and all(map(same, *lists))
    for item in lists[0]:
        match = next((candidate for candidate in lists[1] if same(item, candidate)), None)
        if match is None:
            return False
        lists[1].remove(match)
    return True


def without_repeated_steps(items: list[str]) -> list[str]:
    r"""A progression `1, 2, 3, \ldots, n` by its first two terms."""
    heads = items[: items.index(r"\ldots")] if r"\ldots" in items else []
    steps = [f"({after})-({before})" for before, after in pairwise(heads)]
    is_progression = len(steps) > 1 and all(is_expression(step) and same_value(step, steps[0]) for step in steps)
    return items[:2] + items[len(heads) :] if is_progression else items


def same_relation(some: list[str], others: list[str], sign: str) -> bool:
    """Whether ratios, or differences of the sides of equations, are proportional, or else sides are equal."""
    from sympy import cancel

    are_expressions = all(map(is_expression, (*some, *others)))
    if are_expressions and sign == ":":
        pairs = zip(some, others, strict=True)
        return all(same_value(f"({one})({others[0]})", f"({other})({some[0]})") for one, other in pairs)
    if are_expressions and sign == "=":
        left, right = (value(f"{low}-({high})") for low, high in (some, others))
        return left != 0 != right and cancel(left / right).is_number
    return all(map(same, some, others)) or (sign == "=" and all(map(same, some, reversed(others))))


def split(text: str, separator: re.Pattern[str]) -> tuple[list[str], list[str]]:
    """Parts of a text between the separators outside brackets, and these separators."""
    parts, signs, depth, start = [], [], 0, 0
    for found in re.finditer(rf"[(\[{{«⟦]|[)\]}}»⟧]|(?P<sign>{separator.pattern})", text):
        if found["sign"] is None:
            depth += 1 if found[0] in "([{«⟦" else -1
        elif depth == 0:
            parts.append(text[start : found.start()])
            signs.append(found[0])
            start = found.end()
    return [*parts, text[start:]], signs


def is_wrapped(text: str) -> bool:
    """Whether the bracket that opens a text closes at its end."""
    found = depths(text)
    return found[-1] == 0 and 0 not in found[:-1]


def depths(text: str) -> list[int]:
    """Number of open brackets after each character."""
    return list(accumulate((character in "([{«⟦") - (character in ")]}»⟧") for character in text))


def is_expression(text: str) -> bool:
    """Whether each token of a text is known, so that the parser drops none, and its value is computed fast."""
    is_known = UNREAD.match(text) is None and TOKENS.fullmatch(text) is not None
    return bool(text.strip()) and is_known and EXPENSIVE.match(text) is None and max(depths(text)) <= DEEPEST


def as_text(text: str) -> str:
    """A text without markup and spaces between letters; the case of a word's letters does not matter."""
    bare = re.sub(r"\\text ?\{([^{}]*)\}|\{(\w)\}", r"\1\2", text)
    bare = re.sub(r"(?<!\d)\s|\s(?!\d)", "", bare).strip(".")
    return bare.lower() if re.fullmatch("[A-Z]?[a-z]{2,}|NO|YES|TRUE|FALSE", bare) else bare


FACTORS = re.compile(  # where the parser needs a product sign: it reads `2(3)` as a mixed number
    rf"(?P<function>\\(?:{FUNCTIONS})(?![A-Za-z])(?:[_^](?:\{{[^{{}}]*\}}|\w))* ?(?:\(|\\frac|\\sqrt|\\binom)?)"
    r"|(?<=[\w)}!]) ?(?=\()|(?<=\)) ?(?=\d)|(?<=[\d)}!]) ?(?=\\(?:frac|sqrt|binom))"
)


@lru_cache(maxsize=1_000)
def value(text: str) -> Any:
    """An expression by SymPy with exact decimals; raises what the parser raises, or a `TypeError` for a relation."""
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
    from sympy import Expr, I, Symbol

    text = re.sub(r"(\d+(?:\.\d+)?)\^\\circ", r"(\1\\cdot\\frac{\\pi}{180})", text)
    text = re.sub(r"(\d*)\.(\d+)", lambda found: rf"\frac{{{found[1]}{found[2]}}}{{1{'0' * len(found[2])}}}", text)
    text = FACTORS.sub(lambda found: found["function"] or r"\cdot ", text)
    config = ConversionConfig(interpret_as_mixed_fractions=False, lowercase_symbols=False)
    parsed = latex2sympy(text, normalization_config=None, conversion_config=config)
    parsed = parsed.subs({I: Symbol("I"), Symbol("i"): I}, simultaneous=True).doit()
    if not isinstance(parsed, Expr):
        raise TypeError(f"{text!r} is no expression.")
    return parsed


def same_value(one: str, other: str) -> bool:
    """Whether two expressions are equal for all real symbols, or one is the other rounded to six digits."""
    from sympy import Rational

    left, right = value(one), value(other)
    for text, rounded, exact in ((one, left, right), (other, right, left)):
        digits = re.fullmatch(r"-?0*(\d*)\.(\d+)", text)
        has_six = digits is not None and len((digits[1] + digits[2]).lstrip("0")) >= 6
        if has_six and not (one.count(".") and other.count(".")) and exact.is_number and not exact.is_Integer:
            error = abs(exact.evalf(40) - rounded)
            return bool(error < Rational(1, 10 ** len(digits[2])) and error < abs(rounded) / 900_000)
    if left == right or (left.is_Rational and right.is_Rational):
        return left == right
    symbols = sorted(left.free_symbols | right.free_symbols, key=str)
    for scale, negative in ((1, None), (40, None), *((1, symbol) for symbol in symbols)):
        numbers = [Rational(scale * (17 + 6 * place), 11 + 4 * place) for place in range(len(symbols))]
        point = {symbol: -x if symbol == negative else x for symbol, x in zip(symbols, numbers, strict=True)}
        first, second = (side.subs(point).evalf(DIGITS, maxn=2 * DIGITS) for side in (left, right))
        if not (first.is_number and first.is_finite and second.is_finite):
            return False
        is_close = abs(first - second) <= max(abs(first), abs(second)) / 10 ** (DIGITS - 5)
        if not is_close and (negative is None or first.is_real or second.is_real):
            return False
    return True


def main() -> None:
    """Read pairs, a deadline on the monotonic clock and a number of workers; print the result of each pair."""
    from pebble import ProcessExpired, ProcessPool

    pairs, deadline, workers = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_AS, (WORKER_BYTES, WORKER_BYTES))
    same_answer(r"\frac{x}{2}", "0.5x")  # imports what the forked workers need
    results = []
    with ProcessPool(min(workers, len(pairs)), context=multiprocessing.get_context("fork")) as pool:
        for future in [pool.schedule(same_answer, args=pair, timeout=COMPARE_SECONDS) for pair in pairs]:
            try:
                results.append("equal" if future.result(deadline - time.monotonic()) else "different")
            except (ProcessExpired, TimeoutError):
                results.append("failed" if time.monotonic() < deadline else "undecided")
            except Exception:  # the parser's errors have no class of their own: equality was not shown
                results.append("different")
        pool.stop()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
