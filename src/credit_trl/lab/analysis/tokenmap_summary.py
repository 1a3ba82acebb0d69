"""Credit summed over token classes, for the maps of a response, a page or a whole run.

`ΔV_t = S_t + (Ĝ_t − log π_θ)`, Eq. 7: the first part depends on the question, the second does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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
    labels = [name for m in maps for name in m.classes]
    empty = torch.zeros(0, dtype=torch.float64)
    delta_v = torch.cat([empty, *(m.scores.delta_v.double() for m in maps)])
    specific = torch.cat([empty, *(m.scores.specific.double() for m in maps)])
    shares = []
    for name in dict.fromkeys(labels):
        rows = torch.tensor([label == name for label in labels])
        shares.append(
            ClassShare(
                name,
                int(rows.sum()),
                int(rows.sum()) / len(labels),
                _share(delta_v, rows),
                _share(specific, rows),
                delta_v[rows].mean().item(),
                specific[rows].mean().item(),
            )
        )
    return Summary(len(maps), len(labels), sorted(shares, key=lambda share: -share.share_of_specific))


def _share(values: Tensor, rows: Tensor) -> float:
    """Share of the rows in the sum of magnitudes; 0 where all values are 0."""
    total = values.abs().sum().item()
    return values[rows].abs().sum().item() / total if total else 0.0


def format_summary(summary: Summary) -> str:
    """Markdown table of the summary."""
    columns = ("token class", "tokens", "share of tokens", "of \\|ΔV\\|", "of \\|S\\|", "mean ΔV", "mean S")
    rows = []
    for c in summary.classes:
        shares = (f"{share:.3f}" for share in (c.share_of_tokens, c.share_of_delta_v, c.share_of_specific))
        rows.append([table_cell(c.name), str(c.count), *shares, f"{c.mean_delta_v:+.3f}", f"{c.mean_specific:+.3f}"])
    title = f"{pluralized(summary.responses, 'response')}, {pluralized(summary.tokens, 'token')}"
    return f"{title}\n\n{markdown_table(columns, rows)}\n"
