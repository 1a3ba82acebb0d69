"""The comparison's figures as PNG in a light and a dark theme."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from credit_trl.lab.comparison.compare import BEST, FINAL, Comparison

# The color-blind safe palette of Okabe and Ito; line styles tell arms apart once its colors repeat.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31", "#7F7F7F")
LINES = ("-", "--", "-.", ":")


@dataclass(frozen=True)
class Theme:
    """Colors of a figure."""

    name: str
    background: str
    ink: str
    grid: str


THEMES = (Theme("light", "#ffffff", "#1c1e21", "#d7dade"), Theme("dark", "#16181c", "#e4e6ea", "#3a3e45"))


def curves_figure(comparison: Comparison, theme: Theme) -> bytes:
    """Learning curves of `CURVES` as in the paper's dynamics figure.

    Lines are means over seeds; shaded bands are the range over seeds.
    """
    titles = list(dict.fromkeys(curve.title for curve in comparison.curves))
    columns = min(3, len(titles))
    rows = -(-len(titles) // columns)
    figure, axes = _canvas(theme, rows, columns, width=4.2 * columns, height=3.0 * rows)
    handles = {}  # line of each arm, whose shortened names may be equal
    for title, axis in zip(titles, axes, strict=False):
        _style(axis, theme, title, "optimizer step")
        for curve in comparison.curves:
            if curve.title == title:
                repeats, index = divmod(list(comparison.arms).index(curve.arm), len(COLOURS))
                color, style = COLOURS[index], LINES[repeats % len(LINES)]
                (handles[curve.arm],) = axis.plot(curve.steps, curve.mean, lw=1.7, color=color, ls=style)
                axis.fill_between(curve.steps, curve.low, curve.high, color=color, alpha=0.15, lw=0)
    for axis in axes[len(titles) :]:
        axis.set_visible(False)
    labels = list(map(_shorten, handles))
    widest = 0.6 + 0.1 * max(map(len, labels))  # inches of an entry, its line included
    options = {"ncols": max(1, min(4, int(figure.get_figwidth() / widest))), "fontsize": 9}
    legend = figure.legend(
        handles.values(), labels, loc="outside lower center", frameon=False, labelcolor=theme.ink, **options
    )
    for text in legend.get_texts():
        text.set_parse_math(False)
    return _png(figure)


def scores_figure(comparison: Comparison, theme: Theme) -> bytes:
    """Scores with 95 % intervals, one panel per domain: hollow markers best, full final, small dots single seeds."""
    domains, arms = comparison.domains, comparison.arms
    size = {"width": max(4.5, 3.6 * len(domains)), "height": 1.4 + 0.34 * len(arms)}
    figure, axes = _canvas(theme, 1, len(domains), sharey=True, **size)
    for domain, axis in zip(domains, axes, strict=True):
        _style(axis, theme, f"{domain} (n = {comparison.prompts[domain]})", f"{comparison.measure}, %")
        for position, arm in enumerate(arms):
            for when, shift, fill in ((BEST, -0.14, "none"), (FINAL, 0.14, None)):
                cell = comparison.cells.get((arm, domain, when))
                if cell is None:
                    continue
                style = {"color": COLOURS[position % len(COLOURS)], "ms": 6}
                mean, low, high = (100 * v for v in cell.interval)
                spread = None if np.isnan(low) else [[mean - low], [high - mean]]  # none for two seeds
                fill = fill or style["color"]
                axis.errorbar(mean, position + shift, xerr=spread, fmt="o", mfc=fill, capsize=3, **style)
                height = np.full(len(cell.by_seed), position + shift)
                if cell.seeds > 1:
                    axis.plot(100 * np.array(cell.by_seed), height, ".", alpha=0.6, color=style["color"], ms=5)
        axis.set_yticks(range(len(arms)), [_shorten(arm) for arm in arms], parse_math=False)
    axes[0].invert_yaxis()
    return _png(figure)


def ablation_figure(
    points: Mapping[str, Sequence[tuple[Any, float, float, float]]], axis_name: str, theme: Theme
) -> bytes:
    """Numbers against an option that a sweep varies, such as the score and S_t against λ.

    `points` has (value of the option, mean, low, high) by the title of the panel.
    """
    figure, axes = _canvas(theme, 1, len(points), width=4.2 * len(points), height=3.2)
    for (title, rows), axis in zip(points.items(), axes, strict=True):
        _style(axis, theme, title, axis_name)
        values, means, low, high = zip(*rows, strict=True)
        spread = [np.subtract(means, low), np.subtract(high, means)]
        axis.errorbar(range(len(rows)), means, yerr=spread, fmt="o-", color=COLOURS[0], capsize=4, ms=6, lw=1.6)
        axis.set_xticks(range(len(rows)), map(str, values), parse_math=False)
    return _png(figure)


def _canvas(theme: Theme, rows: int, columns: int, *, width: float, height: float, **options: Any) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), facecolor=theme.background, layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options).ravel().tolist()


def _style(axis: Any, theme: Theme, title: str, label: str) -> None:
    axis.set_facecolor(theme.background)
    axis.set_title(title, color=theme.ink, fontsize=10, parse_math=False)  # names may contain dollar signs
    axis.set_xlabel(label, color=theme.ink, fontsize=9, parse_math=False)
    axis.tick_params(colors=theme.ink, labelsize=8.5)
    axis.grid(True, color=theme.grid, lw=0.6)
    axis.set_axisbelow(True)
    for name, spine in axis.spines.items():
        spine.set_visible(name in ("left", "bottom"))
        spine.set_color(theme.grid)


def _shorten(arm: str) -> str:
    return arm if len(arm) <= 36 else f"{arm[:35]}…"


def _png(figure: Any) -> bytes:
    """The figure as PNG without a date, so that equal numbers give equal bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130, metadata={"Software": None})
    return buffer.getvalue()
