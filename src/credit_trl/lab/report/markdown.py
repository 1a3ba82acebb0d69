"""Markdown of the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from credit_trl.tasks.escaping import markdown_table, table_cell

_COLUMNS = ("task", "arm", "runs", "before", "avg@k (%)", "95 % interval", "best", "difference", "95 %", "p (Holm)")


def report_markdown(document: Mapping[str, Any]) -> str:
    """Scores, differences and options as Markdown; the curves are in the JSON file."""
    parts = [f"# {table_cell(document['title'])}"]
    if document["comparison"]:
        parts.append(markdown_table(_COLUMNS, map(_score_cells, document["comparison"]), left=2))
    options = document["options"]
    if len(options) == 1:
        parts.append(
            markdown_table(("option", "value"), [map(table_cell, fact) for fact in document["facts"].items()], 2)
        )
    else:
        rows = ([table_cell(str(value)) for value in row.values()] for row in options)
        parts.append(markdown_table([table_cell(name) for name in options[0]], rows))
    return "\n\n".join(parts) + "\n"


def _score_cells(row: Mapping[str, Any]) -> list[str]:
    p = row.get("p_holm")
    return [
        table_cell(row["task"]),
        table_cell(row["arm"]),
        str(row["runs"]),
        _percent(row.get("before")),
        _percent(row["score"]),
        _interval(row.get("low"), row.get("high"), row["by_seed"]),
        _percent(row["best"]),
        _percent(row.get("difference"), "+"),
        _interval(row.get("difference_low"), row.get("difference_high"), row.get("difference_by_seed", ()), "+"),
        "–" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}",
    ]


def _percent(value: float | None, sign: str = "") -> str:
    return "–" if value is None else f"{100 * value:{sign}.1f}"


def _interval(low: float | None, high: float | None, by_seed: Sequence[float], sign: str = "") -> str:
    """The interval, or the values of two seeds."""
    if low is not None:
        return f"[{_percent(low, sign)}, {_percent(high, sign)}]"
    return ", ".join(_percent(value, sign) for value in by_seed) if len(by_seed) > 1 else "–"
