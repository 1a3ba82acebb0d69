"""Escaping of untrusted text, such as names of runs and values of data rows, for output."""

from __future__ import annotations

import re

from credit_trl.sandbox.protocol import printable


def plain(text: str) -> str:
    """Text for a cell of a Markdown table: no cell, HTML tag or terminal escape sequence can begin in it."""
    return re.sub(r"<(?=[A-Za-z/!?])", "&lt;", printable(text)).replace("|", "\\|")


def printable_lines(text: str) -> str:
    """Text of several lines with all other non-printable characters spelled out."""
    return "\n".join(map(printable, text.split("\n")))
