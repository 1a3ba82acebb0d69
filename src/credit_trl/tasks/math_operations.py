r"""Operations that an answer leaves undone: `\int_0^1 x\,dx` where the answer is `\frac12`.

`math-verify` evaluates what it parses, so that boxing the question itself would earn the reward. An answer that holds
an integral, sum, product, limit, derivative, determinant, trace, gcd, lcm, maximum or minimum which the gold answer
does not hold is no final answer.
"""

from __future__ import annotations

import re

_NAMES = "int|iint|iiint|oint|sum|prod|lim|det|tr|gcd|lcm|max|min"
_OPERATION = re.compile(
    rf"\\(?P<name>{_NAMES})(?![A-Za-z])|\\operatorname\*?\s*\{{\s*(?P<named>{_NAMES})\s*\}}"
    r"|\\begin\s*\{(?P<bars>vmatrix)\}"
)
_FACE = re.compile(r"\\(?:mathrm|operatorname|text|rm)(?![A-Za-z])|\\[,;:! ]|\s+")
_DERIVATIVE = re.compile(
    r"\\[dt]?frac(?:d|\{(?:d|\\partial)(?![+-])[^{}]*(?:\{[^{}]*\}[^{}]*)*\})"  # of what follows, or of what it holds
    r"\{(?:d|\\partial)\\?[A-Za-z]+(?:\^(?:\w|\{\w+\}))?\}"
)
_SAME = {"iint": "int", "iiint": "int", "oint": "int", "vmatrix": "det"}


def finished_part(gold: str, given: str) -> str | None:
    r"""The part of an answer that is to be compared with the gold one; `None` where it leaves an operation undone.

    That part is the whole answer, or of `\int_0^1 x\,dx = \frac12` what follows the last `=` or `\approx` outside
    brackets. An operation that the gold answer holds too is none that was left undone.
    """
    allowed = operations(gold)
    if operations(given) <= allowed:
        return given
    value = _last_side(given)
    return value if value.strip() and operations(value) <= allowed else None


def operations(text: str) -> set[str]:
    r"""The names of the operations in a text, `\dfrac{d}{dx}` and its like as `d`."""
    found = {match["name"] or match["named"] or match["bars"] for match in _OPERATION.finditer(text)}
    bare = _FACE.sub("", text).replace("{d}", "d")
    return {_SAME.get(name, name) for name in found} | ({"d"} if _DERIVATIVE.search(bare) else set())


def _last_side(text: str) -> str:
    """What follows the last sign of equality outside brackets, "" where there is none."""
    depth, start = 0, len(text)
    for sign in re.finditer(r"\\approx|\\.|[{}()\[\]=]", text, re.DOTALL):
        if sign[0] in ("=", r"\approx"):
            start = sign.end() if depth == 0 else start
        elif sign[0][-1] in "{([})]":
            depth += 1 if sign[0][-1] in "{([" else -1
    return text[start:]
