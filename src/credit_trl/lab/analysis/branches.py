"""Branches between a generic and an input-specific token, and the λ above which the contrast decides them.

For a generic token A and an input-specific token B, δ = ΔV(A) − ΔV(B) is how much the privileged context raises A and
s = S(B) − S(A) how much B loses under the contrast prompts. A loses where λ exceeds λ_c = δ/(δ+s), or δ/s for the form
`"guide"`; with δ ≤ 0 it loses for every λ > 0. `docs/theory.md` has the derivation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from credit_trl.lab.analysis.tokenmap import TokenMap
from credit_trl.tasks.printable import markdown_table

# A and B are chosen among the sampled token and the alternatives to which student or teacher gives this probability.
MIN_PROBABILITY = 0.01
# B is the likeliest of them with S of at least the first, A the likeliest with S of at most the second, in nats.
MIN_SPECIFIC, MAX_GENERIC = 1.0, 0.5


@dataclass(frozen=True)
class Branches:
    """N branches of one map: positions in the response, ids of A and B, δ (of any sign) and s > 0 in nats."""

    positions: Int[Tensor, " N"]
    generic_ids: Int[Tensor, " N"]
    specific_ids: Int[Tensor, " N"]
    delta: Float[Tensor, " N"]
    s: Float[Tensor, " N"]


@dataclass(frozen=True)
class Quartiles:
    lower: float
    median: float
    upper: float


@dataclass(frozen=True)
class ClassBranches:
    """Quartiles of δ and s over the branches of one token class, and of λ_c over the `rising` ones, where δ > 0."""

    name: str
    count: int
    rising: int
    delta: Quartiles
    s: Quartiles
    lambda_subtract: Quartiles | None
    lambda_guide: Quartiles | None


def find_branches(token_map: TokenMap) -> Branches:
    """Branches of a map, at most one a position; none without contrast prompts, or where A or B is missing."""
    own, others = token_map.scores, token_map.scores.alternatives
    ids, delta_v, specific, student, teacher = (
        torch.cat([getattr(own, name).unsqueeze(-1), getattr(others, name)], dim=-1)
        for name in ("ids", "delta_v", "specific", "student_logps", "teacher_logps")
    )
    likelihood = torch.maximum(student, teacher).exp()
    likelihood = likelihood.where(likelihood >= MIN_PROBABILITY, 0.0)
    generic = likelihood.where(specific <= MAX_GENERIC, 0.0)
    particular = likelihood.where(specific >= MIN_SPECIFIC, 0.0)
    rows = (generic.any(dim=-1) & particular.any(dim=-1)).nonzero().squeeze(-1)
    a, b = (one[rows].argmax(dim=-1, keepdim=True) for one in (generic, particular))

    def at(values: Tensor, index: Tensor) -> Tensor:
        return values[rows].gather(-1, index).squeeze(-1)

    delta, s = at(delta_v, a) - at(delta_v, b), at(specific, b) - at(specific, a)
    return Branches(rows, at(ids, a), at(ids, b), delta.double(), s.double())


def summarize_branches(maps: Sequence[TokenMap]) -> list[ClassBranches]:
    """Quartiles over all branches, and by class of the sampled token, the most frequent class first."""
    found = [find_branches(token_map) for token_map in maps]
    labels = [m.classes[t] for m, own in zip(maps, found, strict=True) for t in own.positions.tolist()]
    if not labels:
        return []
    delta, s = torch.cat([own.delta for own in found]), torch.cat([own.s for own in found])
    rows = {name: torch.tensor([label == name for label in labels]) for name in dict.fromkeys(labels)}
    classes = [_of_class(name, delta[own], s[own]) for name, own in rows.items()]
    return [_of_class("all", delta, s), *sorted(classes, key=lambda one: -one.count)]


def _of_class(name: str, delta: Tensor, s: Tensor) -> ClassBranches:
    up, loss = delta[delta > 0], s[delta > 0]
    return ClassBranches(name, len(delta), len(up), *map(_quartiles, (delta, s, up / (up + loss), up / loss)))


def _quartiles(values: Tensor) -> Quartiles | None:
    return Quartiles(*values.quantile(values.new_tensor([0.25, 0.5, 0.75])).tolist()) if len(values) else None


def format_branches(classes: Sequence[ClassBranches]) -> str:
    """Markdown table of median and quartiles; one sentence where there is no branch."""
    if not classes:
        return "No branch between a generic and an input-specific token was found.\n"
    rows = []
    for c in classes:
        quartiles = (c.delta, c.s, c.lambda_subtract, c.lambda_guide)
        cells = (f"{q.median:.2f} [{q.lower:.2f}, {q.upper:.2f}]" if q else "–" for q in quartiles)
        rows.append([c.name, str(c.count), str(c.rising), *cells])
    title = "Branches of a generic token A and an input-specific token B: median [quartiles]; λ_c where δ > 0."
    columns = ("token class", "branches", "δ > 0", "δ", "s", "λ_c subtract", "λ_c guide")
    return f"{title}\n\n{markdown_table(columns, rows)}\n"
