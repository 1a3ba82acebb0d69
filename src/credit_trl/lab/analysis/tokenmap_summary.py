"""Credit summed over token classes and token strings, for the maps of a response, a page or a whole run.

`ΔV_t = S_t + (Ĝ_t − log π_θ)`, Eq. 7: the first part depends on the question, the second does not. Token strings are
ranked as *specific* by their mean S_t and as *generic* by their mean ΔV_t − S_t.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from credit_trl.lab.analysis.tokenmap import TokenMap
from credit_trl.tasks.printable import counted, markdown_table, plain


@dataclass(frozen=True)
class ClassShare:
    """One token class: its number of tokens, its shares of the sums of |ΔV| and |S|, and its means in nats."""

    name: str
    count: int
    share_of_tokens: float
    share_of_delta_v: float
    share_of_specific: float
    mean_delta_v: float
    mean_specific: float


@dataclass(frozen=True)
class Summary:
    """Summary of a set of maps. Those without contrast prompts have no S_t and are skipped."""

    responses: int
    tokens: int
    classes: list[ClassShare]  # in descending order of their share of |S|
    # Token strings in descending order of their mean S, and of their mean ΔV − S: `text`, `class_name` (the most
    # frequent one), `count`, `specific`, `generic` and `delta_v` (means in nats).
    most_specific: list[dict[str, Any]]
    most_generic: list[dict[str, Any]]


def summarize_maps(maps: Sequence[TokenMap], *, top: int = 10, min_count: int = 1) -> Summary:
    """Summarize the maps of one checkpoint or of a run.

    Args:
        maps: any number of maps; those without contrast prompts are skipped.
        top: length of the lists of token strings.
        min_count: lowest number of occurrences of a listed token string.
    """
    maps = [m for m in maps if len(m.scores.contrast_logps)]
    labels = [name for m in maps for name in m.classes]
    texts = [token.text for m in maps for token in m.tokens]
    empty = torch.zeros(0, dtype=torch.float64)
    delta_v = torch.cat([empty, *(m.scores.delta_v.double() for m in maps)])
    specific = torch.cat([empty, *(m.scores.specific.double() for m in maps)])
    shares = [_share(name, rows, delta_v, specific) for name, rows in _positions(labels).items()]
    strings = []
    for text, rows in _positions(texts).items():
        if len(rows) >= min_count:
            frequent = Counter(labels[row] for row in rows).most_common(1)[0][0]
            means = {"specific": specific[rows].mean().item(), "delta_v": delta_v[rows].mean().item()}
            means["generic"] = means["delta_v"] - means["specific"]
            strings.append({"text": text, "class_name": frequent, "count": len(rows), **means})
    return Summary(
        responses=len(maps),
        tokens=len(labels),
        classes=sorted(shares, key=lambda share: -share.share_of_specific),
        most_specific=sorted(strings, key=lambda s: -s["specific"])[:top],
        most_generic=sorted(strings, key=lambda s: -s["generic"])[:top],
    )


def format_summary(summary: Summary) -> str:
    """Markdown tables of the summary; token strings are inline code without line feeds."""
    shares = ("share of tokens", "share of \\|ΔV\\|", "share of \\|S\\|")
    rows: list[list[str]] = []
    for c in summary.classes:
        shown = (f"{share:.3f}" for share in (c.share_of_tokens, c.share_of_delta_v, c.share_of_specific))
        rows.append([plain(c.name), str(c.count), *shown, f"{c.mean_delta_v:+.3f}", f"{c.mean_specific:+.3f}"])
    parts = [f"{counted(summary.responses, 'response')}, {counted(summary.tokens, 'token')}"]
    parts.append(markdown_table(["token class", "tokens", *shares, "mean ΔV", "mean S"], rows))
    for title, strings in (("specific", summary.most_specific), ("generic", summary.most_generic)):
        rows = []
        for s in strings:
            means = (f"{s[name]:+.3f}" for name in ("specific", "generic", "delta_v"))
            rows.append([_code(s["text"]), plain(s["class_name"]), str(s["count"]), *means])
        columns = (f"most {title} token", "class", "times", "mean S", "mean ΔV − S", "mean ΔV")
        parts.append(markdown_table(columns, rows, left=2))
    return "\n\n".join(parts) + "\n"


def _positions(names: Sequence[str]) -> dict[str, list[int]]:
    positions: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        positions.setdefault(name, []).append(index)
    return positions


def _share(name: str, rows: list[int], delta_v: torch.Tensor, specific: torch.Tensor) -> ClassShare:
    def share(values: torch.Tensor) -> float:
        total = values.abs().sum().item()
        return values[rows].abs().sum().item() / total if total else 0.0

    return ClassShare(
        name,
        len(rows),
        len(rows) / len(delta_v),
        share(delta_v),
        share(specific),
        delta_v[rows].mean().item(),
        specific[rows].mean().item(),
    )


def _code(text: str) -> str:
    """Inline code of Markdown, with the characters escaped that would end it or the table cell."""
    text = text.replace("\n", "").replace("|", "\\|").replace("`", "ˋ")
    return f"`{text}`"
