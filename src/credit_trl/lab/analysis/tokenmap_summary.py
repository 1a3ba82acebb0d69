"""Credit summed over token classes, for the maps of a response, a page or a whole run.

`ΔV_t = S_t + (Ĝ_t − log π_θ)`, Eq. 7: the first part depends on the question, the second does not.
"""

from __future__ import annotations

from collections.abc import Sequence

from pandas import DataFrame

from credit_trl.lab.analysis.tokenmap import TokenMap
from credit_trl.tasks.escaping import markdown_table, pluralized, table_cell


def summarize_maps(maps: Sequence[TokenMap]) -> DataFrame:
    """One row for each token class, the largest share of |S| first. Maps without contrast prompts are skipped.

    The index is the class. Columns are `tokens`, their number; the shares `of_tokens`, `of_delta_v` and `of_specific`
    of the sums of tokens, |ΔV| and |S|; and the means `delta_v` and `specific` in nats.
    """
    rows = [
        row
        for m in maps
        if len(m.scores.contrast_logps)
        for row in zip(m.classes, m.scores.delta_v.tolist(), m.scores.specific.tolist(), strict=True)
    ]
    tokens = DataFrame(rows, columns=["class", "delta_v", "specific"]).astype({"delta_v": float, "specific": float})
    by_class = tokens["class"]
    sums = tokens[["delta_v", "specific"]].abs().assign(tokens=1.0).groupby(by_class).sum()
    shares = (sums / sums.sum().replace(0.0, 1.0)).add_prefix("of_")
    means = tokens[["delta_v", "specific"]].groupby(by_class).mean()
    found = means.join(shares).assign(tokens=by_class.value_counts())
    return found.sort_values("of_specific", ascending=False)


def format_summary(summary: DataFrame) -> str:
    """Markdown table of the summary."""
    columns = ("token class", "tokens", "share of tokens", "of \\|ΔV\\|", "of \\|S\\|", "mean ΔV", "mean S")
    rows = []
    for name, own in summary.iterrows():
        shares = [f"{own[share]:.3f}" for share in ("of_tokens", "of_delta_v", "of_specific")]
        means = [f"{own[mean]:+.3f}" for mean in ("delta_v", "specific")]
        rows.append([table_cell(str(name)), f"{own['tokens']:.0f}", *shares, *means])
    return f"{pluralized(int(summary['tokens'].sum()), 'token')}\n\n{markdown_table(columns, rows)}\n"
