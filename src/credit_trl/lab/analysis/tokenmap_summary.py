"""Credit summed over token classes, for the maps of a response, a page or a whole run.

`ΔV_t = S_t + (Ĝ_t − log π_θ)`, Eq. 7: the first part depends on the question, the second does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pandas import DataFrame

from credit_trl.lab.analysis.tokenmap import TokenMap
from credit_trl.tasks.escaping import markdown_table, pluralized, table_cell


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


def summarize_maps(maps: Sequence[TokenMap]) -> Summary:
    """Summarize the maps of one checkpoint or of a run; those without contrast prompts are skipped."""
    maps = [m for m in maps if len(m.scores.contrast_logps)]
    rows = [
        row for m in maps for row in zip(m.classes, m.scores.delta_v.tolist(), m.scores.specific.tolist(), strict=True)
    ]
    tokens = DataFrame(rows, columns=["name", "delta_v", "specific"])
    magnitudes = tokens[["delta_v", "specific"]].abs()
    shares = [
        ClassShare(
            str(name),
            len(own),
            len(own) / len(tokens),
            *(magnitudes.loc[own.index].sum() / magnitudes.sum().replace(0.0, 1.0)),
            *own[["delta_v", "specific"]].mean(),
        )
        for name, own in tokens.groupby("name", sort=False)
    ]
    return Summary(len(maps), len(tokens), sorted(shares, key=lambda share: -share.share_of_specific))


def format_summary(summary: Summary) -> str:
    """Markdown table of the summary."""
    columns = ("token class", "tokens", "share of tokens", "of \\|ΔV\\|", "of \\|S\\|", "mean ΔV", "mean S")
    rows = []
    for c in summary.classes:
        shares = (f"{share:.3f}" for share in (c.share_of_tokens, c.share_of_delta_v, c.share_of_specific))
        rows.append([table_cell(c.name), str(c.count), *shares, f"{c.mean_delta_v:+.3f}", f"{c.mean_specific:+.3f}"])
    title = f"{pluralized(summary.responses, 'response')}, {pluralized(summary.tokens, 'token')}"
    return f"{title}\n\n{markdown_table(columns, rows)}\n"
