"""Branches between generic tokens and an input-specific one, and the λ above which the contrast decides them.

For a generic token A and an input-specific token B, δ = ΔV(A) − ΔV(B) is how much the privileged context raises A and
s = S(B) − S(A) how much B loses under the contrast prompts. A alone loses where λ exceeds λ_c = δ/(δ+s), or δ/s for
the form `"guide"`; with δ ≤ 0 it loses for every λ > 0. Of several generic tokens the odds against B add up under
subtract, and guide needs the largest δ/s. `docs/theory.md` has the derivation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from credit_trl.lab.analysis.tokenmap import TokenMap
from credit_trl.tasks.escaping import markdown_table, table_cell

# A and B are chosen among the sampled token and the alternatives to which student or teacher gives this probability.
MIN_PROBABILITY = 0.01
# B is the likeliest of them with S of at least the first, A the likeliest with S of at most the second, in nats.
MIN_SPECIFIC, MAX_GENERIC = 1.0, 0.5
_SUMMARIZED = ("delta", "s", "lambda_subtract", "lambda_guide")


def find_branches(token_map: TokenMap) -> dict[str, Tensor]:
    """N branches of a map, at most one a position; none without contrast prompts, or where A or B is missing.

    Returns:
        Tensors of shape (N,): `positions` in the response; `generic_ids` and `specific_ids`, ids of A, the likeliest
        generic token, and of B; `delta` (of any sign) and `s` > 0 of A, in nats; `lambda_subtract` and `lambda_guide`,
        λ_c of all generic tokens together, see `critical_lambdas`.
    """
    own, others = token_map.scores, token_map.scores.alternatives
    ids, delta_v, specific, student, teacher = (
        torch.cat([getattr(own, name).unsqueeze(-1), getattr(others, name)], dim=-1)
        for name in ("ids", "delta_v", "specific", "student_logps", "teacher_logps")
    )
    is_own = torch.zeros_like(student, dtype=torch.bool)  # the sampled token among the alternatives
    is_own[..., 1:] = others.ids == own.ids.unsqueeze(-1)
    likelihood = torch.maximum(student, teacher).exp()
    likelihood = likelihood.where((likelihood >= MIN_PROBABILITY) & ~is_own, 0.0)
    generic = likelihood.where(specific <= MAX_GENERIC, 0.0)
    particular = likelihood.where(specific >= MIN_SPECIFIC, 0.0)
    rows = (generic.any(dim=-1) & particular.any(dim=-1)).nonzero().squeeze(-1)
    a, b = (one[rows].argmax(dim=-1, keepdim=True) for one in (generic, particular))

    def at(values: Tensor, index: Tensor) -> Tensor:
        return values.gather(-1, index).squeeze(-1)

    ids, delta_v, specific = ids[rows], delta_v[rows].double(), specific[rows].double()
    deltas, spreads = delta_v - delta_v.gather(-1, b), specific.gather(-1, b) - specific
    subtract, guide = critical_lambdas(deltas, spreads, generic[rows] > 0)
    return {
        "positions": rows,
        "generic_ids": at(ids, a),
        "specific_ids": at(ids, b),
        "delta": at(deltas, a),
        "s": at(spreads, a),
        "lambda_subtract": subtract,
        "lambda_guide": guide,
    }


def critical_lambdas(
    deltas: Float[Tensor, "N A"], spreads: Float[Tensor, "N A"], is_generic: Bool[Tensor, "N A"]
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
    """λ_c of subtract and guide for the generic tokens of each branch; NaN where no δ is above 0.

    Subtract: with t = 1/λ − 1 the odds Σ exp(δ t − s) are convex in t, so that they reach 1 at one t if they are below
    it at t = 0 and some δ > 0; there `min s/δ` over these tokens is an upper end for bisection. λ_c of subtract is 1
    where they still win at λ = 1.
    """
    rises = is_generic & (deltas > 0)
    ratio = (deltas / spreads).masked_fill(~rises, -torch.inf).amax(-1)
    has_any = rises.any(-1)

    def log_odds(t: Tensor) -> Tensor:
        return (deltas * t.unsqueeze(-1) - spreads).masked_fill(~is_generic, -torch.inf).logsumexp(-1)

    low, high = torch.zeros_like(ratio), (1 / ratio).where(has_any, 1.0)
    for _ in range(60):
        middle = (low + high) / 2
        wins = log_odds(middle) >= 0
        low, high = low.where(wins, middle), middle.where(wins, high)
    subtract = (1 / (1 + high)).where(log_odds(torch.zeros_like(high)) < 0, 1.0)
    return subtract.where(has_any, torch.nan), ratio.where(has_any, torch.nan)


def summarize_branches(maps: Sequence[TokenMap]) -> list[dict[str, Any]]:
    """Quartiles over all branches, and by class of the sampled token, the most frequent class first.

    A row has `name` of the class, `count` of its branches, `rising` of those where some δ > 0, and (lower, median,
    upper) of `delta` and `s` over all branches, and of `lambda_subtract` and `lambda_guide` over the rising ones; None
    where there is none. Without branches there is no row.
    """
    found = [find_branches(token_map) for token_map in maps]
    labels = [m.classes[t] for m, own in zip(maps, found, strict=True) for t in own["positions"].tolist()]
    if not labels:
        return []
    values = {name: torch.cat([own[name] for own in found]) for name in _SUMMARIZED}
    rows = [_summary_row("all", values, torch.ones(len(labels), dtype=torch.bool))]
    of_classes = [
        _summary_row(name, values, torch.tensor([label == name for label in labels])) for name in dict.fromkeys(labels)
    ]
    return rows + sorted(of_classes, key=lambda row: -row["count"])


def _summary_row(name: str, values: dict[str, Tensor], chosen: Bool[Tensor, " N"]) -> dict[str, Any]:
    rising = chosen & ~values["lambda_subtract"].isnan()
    row: dict[str, Any] = {"name": name, "count": int(chosen.sum()), "rising": int(rising.sum())}
    for quantity, own in values.items():
        kept = own[rising if quantity.startswith("lambda") else chosen]
        levels = kept.new_tensor([0.25, 0.5, 0.75])
        row[quantity] = tuple(kept.quantile(levels).tolist()) if len(kept) else None
    return row


def format_branches(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown table of median and quartiles; one sentence where there is no branch."""
    if not rows:
        return "No branch between a generic and an input-specific token was found.\n"
    cells = []
    for row in rows:
        quartiles = [row[quantity] for quantity in _SUMMARIZED]
        texts = [f"{q[1]:.2f} [{q[0]:.2f}, {q[2]:.2f}]" if q else "–" for q in quartiles]
        cells.append([table_cell(row["name"]), str(row["count"]), str(row["rising"]), *texts])
    title = (
        "Branches of generic tokens and an input-specific token B: median [quartiles]; δ and s of the likeliest "
        "generic token A, λ_c of all of them, where some δ > 0."
    )
    columns = ("token class", "branches", "δ > 0", "δ", "s", "λ_c subtract", "λ_c guide")
    return f"{title}\n\n{markdown_table(columns, cells)}\n"
