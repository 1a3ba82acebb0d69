"""Markdown of the report."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from credit_trl.tasks.printable import markdown_table, plain


def report_markdown(document: Mapping[str, Any]) -> str:
    """Scores, differences, options and the last values of the curves as Markdown."""
    parts = [f"# {plain(document['title'])}"]
    if document["comparison"]:
        columns = [
            "task",
            "arm",
            "runs",
            "before",
            "avg@k (%)",
            "95 % interval",
            "best",
            "difference",
            "95 %",
            "p (Holm)",
        ]
        parts.append(markdown_table(columns, map(_score_cells, document["comparison"]), left=2))
    if len(document["options"]) > 1:
        columns = list(document["options"][0])
        rows = ([plain(str(row[column])) for column in columns] for row in document["options"])
        parts.append(markdown_table([plain(column) for column in columns], rows))
    elif document["facts"]:
        parts.append(markdown_table(["option", "value"], [map(plain, fact) for fact in document["facts"].items()], 2))
    rows = [
        [
            plain(curve["title"]),
            plain(document["arms"][one["arm"]]),
            str(one["points"][-1][0]),
            f"{one['points'][-1][1]:.4g}",
        ]
        for curve in document["curves"]
        for one in curve["series"]
    ]
    if rows:
        parts.append(markdown_table(["curve", "arm", "last step", "value"], rows, left=2))
    return "\n\n".join(parts) + "\n"


def _score_cells(row: Mapping[str, Any]) -> list[str]:
    def percent(name: str, sign: str = "") -> str:
        return "–" if row.get(name) is None else f"{100 * row[name]:{sign}.1f}"

    def interval(low: str, high: str, by_seed: str, sign: str = "") -> str:
        if row.get(low) is not None and not math.isnan(row[low]):
            return f"[{percent(low, sign)}, {percent(high, sign)}]"
        listed = row.get(by_seed) or []
        return ", ".join(f"{100 * value:{sign}.1f}" for value in listed) if len(listed) > 1 else "–"

    p = row.get("p_holm")
    return [
        plain(row["task"]),
        plain(row["arm"]),
        str(row["runs"]),
        percent("before"),
        percent("score"),
        interval("low", "high", "by_seed"),
        percent("best"),
        percent("difference", "+"),
        interval("difference_low", "difference_high", "difference_by_seed", "+"),
        "–" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}",
    ]
