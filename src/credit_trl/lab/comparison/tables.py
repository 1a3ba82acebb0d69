"""The comparison's tables, as rows of text: for Markdown, the terminal and the HTML report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from credit_trl.lab.comparison.compare import BASE, Comparison, Contrast, StepsTo
from credit_trl.tasks.printable import plain

AVERAGE = "Avg."


@dataclass(frozen=True)
class Mark:
    """One cell of the score table.

    Args:
        text: the mean, in per cent.
        half_width: of the 95 % interval, "" where there is none.
        rank: 1 for the best of its column, 2 for the second, else 0.
    """

    text: str
    half_width: str = ""
    rank: int = 0


def score_rows(comparison: Comparison, when: str) -> tuple[list[str], list[tuple[str, list[Mark]]]]:
    """(columns, rows) of a table like the paper's Table 1: arms × domains, and the average where there are several."""
    several = len(comparison.domains) > 1
    columns = [*comparison.domains, *([AVERAGE] if several else [])]
    ranks = {domain: comparison.ranks(domain, when) for domain in comparison.domains}
    ranks[AVERAGE] = comparison.ranks(None, when)
    rows = []
    for arm in comparison.arms:
        marks = []
        for domain in comparison.domains:
            cell = comparison.cells.get((arm, domain, when))
            rank = ranks[domain].get(arm, 0)
            if cell is None:
                marks.append(Mark("–"))
            else:
                marks.append(Mark(percent(cell.interval.mean), _half_width(cell.interval.half_width), _shown(rank)))
        if several:
            average = comparison.average(arm, when)
            marks.append(Mark(percent(average), "", _shown(ranks[AVERAGE].get(arm, 0))))
        rows.append((arm if arm == BASE else f"+ {arm}", marks))
    return columns, rows


def score_markdown(comparison: Comparison, when: str) -> str:
    """The table in Markdown: bold is best, underlined second, ± the half-width of the 95 % interval."""
    columns, rows = score_rows(comparison, when)
    lines = ["| | " + " | ".join(map(plain, columns)) + " |", "| --- |" + " ---: |" * len(columns)]
    for name, marks in rows:
        lines.append(f"| {plain(name)} | " + " | ".join(_markdown(mark) for mark in marks) + " |")
    return "\n".join(lines)


def contrast_row(contrast: Contrast) -> list[str]:
    """Arm, domain, difference in points, interval, p, Holm's p."""
    d = contrast.difference
    return [
        contrast.arm,
        contrast.domain,
        f"{100 * d.difference:+.1f}",
        f"[{100 * d.low:+.1f}, {100 * d.high:+.1f}]",
        p_text(d.p_value),
        p_text(contrast.adjusted_p),
    ]


CONTRAST_COLUMNS = ("arm", "domain", "difference (points)", "95 % interval", "p", "p (Holm)")


def contrast_markdown(contrasts: Sequence[Contrast]) -> str:
    lines = ["| " + " | ".join(CONTRAST_COLUMNS) + " |", "| --- | --- | ---: | ---: | ---: | ---: |"]
    return "\n".join([*lines, *(_row(contrast_row(contrast)) for contrast in contrasts)])


STEPS_COLUMNS = ("arm", "domain", "target", "steps, run by run", "median")


def steps_row(steps_to: StepsTo) -> list[str]:
    """Arm, domain, target, every run's step, their median (a run that never got there counts as later than all)."""
    listed = ", ".join("never" if step is None else str(step) for step in steps_to.steps)
    ordered = sorted(math.inf if step is None else step for step in steps_to.steps)
    middle = len(ordered) // 2
    median = ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
    told = "never" if math.isinf(median) else f"{median:g}"
    return [steps_to.arm, steps_to.domain, f"{100 * steps_to.target:g} %", listed, told]


def steps_markdown(steps_to: Sequence[StepsTo]) -> str:
    lines = ["| " + " | ".join(STEPS_COLUMNS) + " |", "|" + " --- |" * len(STEPS_COLUMNS)]
    return "\n".join([*lines, *(_row(steps_row(row)) for row in steps_to)])


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(map(plain, cells)) + " |"


def percent(value: float) -> str:
    return "–" if math.isnan(value) else f"{100 * value:.1f}"


def p_text(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def _half_width(value: float) -> str:
    return "" if math.isnan(value) else f"{100 * value:.1f}"


def _shown(rank: int) -> int:
    return rank if rank in (1, 2) else 0


def _markdown(mark: Mark) -> str:
    text = {1: f"**{mark.text}**", 2: f"<u>{mark.text}</u>"}.get(mark.rank, mark.text)
    return f"{text} ±{mark.half_width}" if mark.half_width else text
