"""The comparison's tables as rows of text, for Markdown, the terminal and the HTML report."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from credit_trl.lab.comparison.compare import BASE, Comparison, Contrast, StepsTo, has_few_seeds
from credit_trl.tasks.printable import markdown_table, plain

AVERAGE = "Avg."
CONTRAST_COLUMNS = ("arm", "domain", "difference (points)", "95 % interval, or seeds", "p", "p (Holm)")
STEPS_COLUMNS = ("arm", "domain", "target", "steps, run by run", "median")


@dataclass(frozen=True)
class Mark:
    """One cell of the score table."""

    text: str  # mean in percent
    half_width: str = ""  # half the width of the 95 % interval in percent, "" without an interval
    seeds: str = ""  # score of each of two seeds in percent, which replace the interval; else ""
    rank: int = 0  # 1 for the best of the column, 2 for the second, else 0


def score_rows(comparison: Comparison, when: str) -> tuple[list[str], list[tuple[str, list[Mark]]]]:
    """(columns, rows) of arms × domains as in the paper's Table 1, with the average of several domains."""
    columns = [*comparison.domains, *([None] if len(comparison.domains) > 1 else [])]  # None is the average
    ranks = {column: comparison.ranks(column, when) for column in columns}
    rows = []
    for arm in comparison.arms:
        marks = [_mark(comparison, (arm, column, when), ranks[column].get(arm, 0)) for column in columns]
        rows.append((arm if arm == BASE else f"+ {arm}", marks))
    return [AVERAGE if column is None else column for column in columns], rows


def _mark(comparison: Comparison, key: tuple[str, str | None, str], rank: int) -> Mark:
    cell = comparison.cells.get(key)
    half = cell.interval.half_width if cell else math.nan
    seeds = ", ".join(map(percent, cell.by_seed)) if cell and has_few_seeds(cell.seeds) else ""
    half_width = "" if math.isnan(half) else percent(half)
    return Mark(percent(comparison.mean(*key)), half_width, seeds, rank if rank <= 2 else 0)


def score_markdown(comparison: Comparison, when: str) -> str:
    """The score table in Markdown: best in bold, second underlined, ± half the width of the interval, or seeds."""
    columns, rows = score_rows(comparison, when)
    cells = ([plain(name), *map(_markdown, marks)] for name, marks in rows)
    return markdown_table(["", *map(plain, columns)], cells)


def contrast_row(contrast: Contrast) -> list[str]:
    """Cells of `CONTRAST_COLUMNS`; differences are in percentage points. Two seeds are shown without an interval."""
    d = contrast.difference
    seeds = ", ".join(f"{100 * difference:+.1f}" for difference in contrast.by_seed) or "–"
    return [
        contrast.arm,
        contrast.domain,
        f"{100 * d.difference:+.1f}",
        seeds if math.isnan(d.low) else f"[{100 * d.low:+.1f}, {100 * d.high:+.1f}]",
        p_text(d.p_value),
        p_text(contrast.adjusted_p),
    ]


def contrast_markdown(contrasts: Iterable[Contrast]) -> str:
    """Differences from the baseline as a Markdown table."""
    rows = (list(map(plain, contrast_row(contrast))) for contrast in contrasts)
    return markdown_table(CONTRAST_COLUMNS, rows, left=2)


def steps_row(steps_to: StepsTo) -> list[str]:
    """Cells of `STEPS_COLUMNS`; the median counts a run that never reaches the target as later than all others."""
    listed = ", ".join("never" if step is None else str(step) for step in steps_to.steps)
    ordered = sorted(math.inf if step is None else step for step in steps_to.steps)
    median = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
    target = f"{100 * steps_to.target:g} %"
    return [steps_to.arm, steps_to.domain, target, listed, "never" if math.isinf(median) else f"{median:g}"]


def steps_markdown(steps_to: Iterable[StepsTo]) -> str:
    """First steps that reach the targets as a Markdown table."""
    rows = (list(map(plain, steps_row(row))) for row in steps_to)
    return markdown_table(STEPS_COLUMNS, rows, left=len(STEPS_COLUMNS))


def percent(value: float) -> str:
    """A share in percent, "–" for NaN."""
    return "–" if math.isnan(value) else f"{100 * value:.1f}"


def p_text(p: float) -> str:
    """A p-value with three decimals, "–" for NaN."""
    if math.isnan(p):
        return "–"
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def _markdown(mark: Mark) -> str:
    text = {1: f"**{mark.text}**", 2: f"<u>{mark.text}</u>"}.get(mark.rank, mark.text)
    if mark.seeds:
        return f"{text} ({mark.seeds})"
    return f"{text} ±{mark.half_width}" if mark.half_width else text
