"""Text from elsewhere, shown: names of runs, fields and values of data rows may hold anything."""

from __future__ import annotations

import re


def printable(text: str) -> str:
    """The text with what is not printable spelled out, so that nothing commands a terminal or begins a line."""
    return "".join(c if c.isprintable() else f"⟨U+{ord(c):04X}⟩" for c in text)


def plain(text: str) -> str:
    """Text for a cell of a Markdown table: no cell, tag or escape sequence of a terminal can begin in it."""
    return re.sub(r"<(?=[A-Za-z/!?])", "&lt;", printable(text)).replace("|", "\\|")
