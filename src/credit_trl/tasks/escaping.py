"""Escaping of untrusted text for output, such as names of runs and values of rows; Markdown tables and plurals."""

import re
from collections.abc import Iterable, Sequence

from credit_trl.sandbox.protocol import printable


def table_cell(text: str) -> str:
    """Text for a cell of a Markdown table: no cell, HTML tag or terminal escape sequence can begin in it."""
    return re.sub(r"<(?=[A-Za-z/!?])", "&lt;", printable(text)).replace("|", "\\|")


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]], left_aligned: int = 1) -> str:
    """A Markdown table without a final newline, whose first `left` columns are aligned left and the others right.

    Cells are not escaped: untrusted text passes through `table_cell` first.
    """
    alignment = ["---"] * left_aligned + ["---:"] * (len(columns) - left_aligned)
    lines = []
    for cells in (columns, alignment, *rows):
        padded = [f" {cell} " if cell else " " for cell in cells]
        lines.append(f"|{'|'.join(padded)}|")
    return "\n".join(lines)


def pluralized(count: float, noun: str, ending: str = "s") -> str:
    """`1 GPU`, `2 GPUs`, `1,024 GPUs`."""
    return f"{f'{count:,}' if isinstance(count, int) else f'{count:g}'} {noun}{'' if count == 1 else ending}"
