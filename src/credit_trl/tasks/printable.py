"""Escaping of untrusted text, such as names of runs and values of data rows, for output."""

from __future__ import annotations

import re


def printable(text: str) -> str:
    """Text with its non-printable characters spelled out, so that it cannot control a terminal or start a line."""
    return "".join(c if c.isprintable() else f"⟨U+{ord(c):04X}⟩" for c in text)


def plain(text: str) -> str:
    """Text for a cell of a Markdown table: no cell, HTML tag or terminal escape sequence can begin in it."""
    return re.sub(r"<(?=[A-Za-z/!?])", "&lt;", printable(text)).replace("|", "\\|")
