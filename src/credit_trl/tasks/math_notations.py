r"""Notations of numbers that `math-verify` reads in part, or not at all, and the same in TeX that it reads.

It drops everything from the first `\text{...}` of an answer that ends in one, so that `6\text{ cm}, 7\text{ cm}` would
be 6, and it reads no repeating decimal.
"""

from __future__ import annotations

import re

# What follows a number as its unit, with an exponent.
_UNIT = re.compile(
    r"(?<=[\d)}%])(?:\\[ ,;:!]|[\s~])*\\(?:text(?:rm|bf|it|up)?|mathrm|mbox)\s*\{(?P<words>[^{}]*)\}"
    r"(?:\s*\^\s*(?:\{[^{}]*\}|-?\w))?"
)
_NOT_UNITS = {"", "d", "e", "i", "j"}
_OPERATOR = re.compile(r"\\(?:times|cdot|div|pm)(?![A-Za-z])|[-+*/]")
_EQUALITY = re.compile(r"=|\\(?:approx|equiv|sim)(?![A-Za-z])")
_REPEATING = re.compile(r"(?<![\d.])(\d{0,100})\.(\d{0,100})\\(?:overline|bar)\s*\{\s*(\d{1,100})\s*\}(?!\s*\d)")


def without_units(text: str) -> str:
    r"""Text without the units of several numbers: `6, 7` for `6\text{ cm and }7\text{ cm}`.

    Numbers of different units, as in `3\text{ hours }20\text{ minutes}`, are an ordered pair. Other text stays, and so
    does an answer that states one quantity in two units, `6\text{ cm} = 60\text{ mm}`.
    """
    units = [unit for unit in _UNIT.finditer(text) if unit["words"].strip() not in _NOT_UNITS]
    if len(units) < 2 or text[units[-1].end() :].strip(" .$"):
        return text
    starts = [0, *(unit.end() for unit in units[:-1])]
    parts = [text[start : unit.start()] for start, unit in zip(starts, units, strict=True)]
    is_equality = any(_EQUALITY.match(part.lstrip(" ~")) for part in parts)
    if is_equality or not all(re.search(r"\d", part) and part.count("{") == part.count("}") for part in parts):
        return text
    names = {" ".join(re.findall(r"\b(?!(?:and|or)\b)\w+", unit["words"])) for unit in units}
    is_term = [_OPERATOR.match(part.lstrip(" ~")) is not None for part in parts[1:]]
    numbers = (part if term else f", {part.lstrip(' ,;~')}" for part, term in zip(parts[1:], is_term, strict=True))
    joined = "".join([parts[0], *numbers])
    return joined if all(is_term) or len(names - {""}) < 2 else f"({joined})"


def with_fractions(text: str) -> str:
    r"""Text with fractions in place of repeating decimals: `\frac{15}{90}` for `0.1\overline{6}`."""
    return _REPEATING.sub(_fraction, text)


def _fraction(decimal: re.Match[str]) -> str:
    whole, fixed, repeated = decimal.groups()
    numerator = int(whole + fixed + repeated) - int(whole + fixed or "0")
    return rf"\frac{{{numerator}}}{{{10 ** len(fixed) * (10 ** len(repeated) - 1)}}}"
