r"""Operations that an answer leaves unevaluated, such as `\int_0^1 x\,dx` where the answer is `\frac12`.

`math-verify` evaluates what it parses, so boxing the question itself would earn the reward. An integral, sum, product,
limit, derivative, determinant, trace, rank, norm, decomposition of a matrix, gcd, lcm, maximum, minimum, supremum,
infimum or remainder that the gold answer lacks is therefore rejected. The modulus of a congruence is no operation:
`x \equiv 3 \pmod{7}` states the value 3.
"""

from __future__ import annotations

import re

_NAMES = "int|iint|iiint|oint|sum|prod|lim|det|tr|gcd|lcm|max|min|sup|inf|mod|bmod|pmod"
# Names that math-verify evaluates for matrices, in \operatorname only.
_OF_MATRICES = (
    "trace|rank|rref|norm|nullspace|cols|rows|eig|eigen|eigenvals|eigenvalues|eigenvects|eigenvectors|diagonalize"
    "|svd|SVD|orth|ortho|orthogonal|orthogonalize"
)
_OPERATION = re.compile(
    rf"\\(?P<name>{_NAMES})(?![A-Za-z])|\\operatorname\*?\s*\{{\s*(?P<named>{_NAMES}|{_OF_MATRICES})\s*\}}"
    r"|\\begin\s*\{(?P<matrix>vmatrix)\}|\\(?P<bars>\||[lr]?Vert(?![A-Za-z]))"
)
_FONT_OR_SPACE = re.compile(r"\\(?:mathrm|operatorname|text|rm)(?![A-Za-z])|\\[,;:! ]|\s+")
_DERIVATIVE = re.compile(
    r"\\[cdt]?frac(?:d|\{(?:d|\\partial)(?![+-])[^{}]*(?:\{[^{}]*\}[^{}]*)*\})"  # of what follows, or of the numerator
    r"\{(?:d|\\partial)\\?[A-Za-z]+(?:\^(?:\w|\{\w+\}))?\}"
)
_SLASHED_DERIVATIVE = re.compile(r"(?<![A-Za-z\\])d(?:\^\w)?\s*/\s*d[A-Za-z](?:\^\w)?(?![\w])")
_SAME = {
    **{"iint": "int", "iiint": "int", "oint": "int", "bmod": "mod", "pmod": "mod", "vmatrix": "det", "trace": "tr"},
    **{"|": "norm", "Vert": "norm", "lVert": "norm", "rVert": "norm"},
}

_SPACE = r"(?:\\[ ,;:!]|[\s~])?"
_MODULUS = re.compile(
    rf"{_SPACE}(?P<open>\()?{_SPACE}"
    rf"(?:(?P<pmod>\\pmod)|\\b?mod|\\(?:text|mathrm|operatorname)\s?\{{{_SPACE}mod{_SPACE}\}}|(?<![A-Za-z\\])mod)"
    rf"(?![A-Za-z]){_SPACE}(?:\{{(?P<group>[^{{}}]*(?:\{{[^{{}}]*\}}[^{{}}]*)*)\}}"
    r"|(?P<bare>\d+|[A-Za-z])(?=\s*(?:[).,;$}]|\\(?:text|q?quad|[ ,;:!])|(?:and|or)\b|\Z)))"
    rf"(?(open){_SPACE}\))"
)


def finished_part(gold: str, given: str) -> str | None:
    r"""Part of an answer to compare with the gold answer; `None` if it leaves an operation unevaluated.

    The part is the whole answer, or the text after the last `=` or `\approx` outside brackets, as in
    `\int_0^1 x\,dx = \frac12`. Operations of the gold answer and the modulus of a congruence are allowed.
    """
    allowed = operations(gold)
    if operations(without_moduli(given)) <= allowed:
        return given
    value = _last_side(given)
    return value if value.strip() and operations(without_moduli(value)) <= allowed else None


def operations(text: str) -> set[str]:
    r"""Names of the operations in a text; derivatives such as `\dfrac{d}{dx}` are named `d`."""
    found = {match[match.lastgroup] for match in _OPERATION.finditer(text)}
    bare = _FONT_OR_SPACE.sub("", text).replace("{d}", "d")
    return {_SAME.get(name, name) for name in found} | (
        {"d"} if _DERIVATIVE.search(bare) or _SLASHED_DERIVATIVE.search(text) else set()
    )


def moduli(text: str) -> set[str]:
    r"""Moduli without spaces: `{"7"}` for `3 \pmod{7}`, `x \equiv 3 (\text{mod } 7)` and `10 \bmod 7`."""
    return {re.sub(r"\s", "", match["group"] or match["bare"] or "") for match in _MODULUS.finditer(text)}


def without_moduli(text: str) -> str:
    r"""Text without `\pmod{7}`, `(mod 7)` and, after `\equiv`, `\mod 7` and `\bmod 7`, which else are remainders."""
    sign = re.search(r"\\equiv(?![A-Za-z])|≡", text)
    start = len(text) if sign is None else sign.end()
    return _MODULUS.sub(
        lambda match: "" if match["pmod"] or match["open"] or match.start() >= start else match[0], text
    )


def _last_side(text: str) -> str:
    """Text after the last equality sign outside brackets, "" if there is none."""
    depth, start = 0, len(text)
    for sign in re.finditer(r"\\approx|\\.|[{}()\[\]=]", text, re.DOTALL):
        if sign[0] in ("=", r"\approx"):
            start = sign.end() if depth == 0 else start
        elif sign[0][-1] in "{([})]":
            depth += 1 if sign[0][-1] in "{([" else -1
    return text[start:]
