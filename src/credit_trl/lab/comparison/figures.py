"""The comparison's figures, as PNG in a light and a dark dress."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from credit_trl.lab.comparison.compare import BEST, FINAL, Comparison, Curve

# Okabe and Ito's colours, which the colour-blind can tell apart; line styles repeat the distinction.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31", "#7F7F7F")
LINES = ("-", "--", "-.", ":")


@dataclass(frozen=True)
class Theme:
    """Ink and paper of a figure."""

    name: str
    background: str
    ink: str
    grid: str


THEMES = (Theme("light", "#ffffff", "#1c1e21", "#d7dade"), Theme("dark", "#16181c", "#e4e6ea", "#3a3e45"))


def curves_figure(comparison: Comparison, theme: Theme) -> bytes | None:
    """Score, response length, entropy, advantage and S_t over training: the paper's dynamics figure.

    Lines are means over seeds, shades the range over seeds. None where no run has a curve.
    """
    titles = list(dict.fromkeys(curve.title for curve in comparison.curves))
    if not titles:
        return None
    columns = min(3, len(titles))
    rows = -(-len(titles) // columns)
    figure, axes = _canvas(theme, rows, columns, width=4.2 * columns, height=3.0 * rows)
    for title, axis in zip(titles, axes, strict=False):
        _style(axis, theme, title, "optimizer step")
        for curve in comparison.curves:
            if curve.title == title:
                _draw(axis, curve, comparison.arms)
    for axis in axes[len(titles) :]:
        axis.set_visible(False)
    handles, labels = _legend_of(axes)
    legend = figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, labelcolor=theme.ink)
    for text in legend.get_texts():
        text.set_parse_math(False)
    return _png(figure)


def scores_figure(comparison: Comparison, theme: Theme) -> bytes:
    """Scores of every arm with 95 % intervals, a panel a domain: hollow best, full final, ticks for seeds."""
    domains, arms = comparison.domains, comparison.arms
    figure, axes = _canvas(
        theme, 1, len(domains), width=max(4.5, 3.6 * len(domains)), height=1.4 + 0.34 * len(arms), sharey=True
    )
    for domain, axis in zip(domains, axes, strict=True):
        _style(axis, theme, f"{domain} (n = {comparison.prompts[domain]})", _percent_label(comparison))
        for position, arm in enumerate(arms):
            for when, shift, fill in ((BEST, -0.14, "none"), (FINAL, 0.14, None)):
                cell = comparison.cells.get((arm, domain, when))
                if cell is None:
                    continue
                colour = _colour(arms, arm)
                mean, low, high = (100 * v for v in cell.interval)
                spread = [[np.nan_to_num(mean - low)], [np.nan_to_num(high - mean)]]
                axis.errorbar(
                    mean, position + shift, xerr=spread, fmt="o", color=colour, mfc=fill or colour, capsize=3, ms=6
                )
                where = np.full(len(cell.by_seed), position + shift)
                axis.plot(100 * np.array(cell.by_seed), where, "|", color=colour, alpha=0.55, ms=6)
        axis.set_yticks(range(len(arms)), [_short(arm) for arm in arms], parse_math=False)
        axis.invert_yaxis() if axis is axes[0] else None
    return _png(figure)


def ablation_figure(
    points: Mapping[str, Sequence[tuple[Any, float, float, float]]], axis_name: str, theme: Theme
) -> bytes:
    """Numbers against an option that a sweep varied, such as the score and S_t against λ.

    Args:
        points: panel title → (value of the option, mean, low, high).
        axis_name: the option.
        theme: the dress.
    """
    figure, axes = _canvas(theme, 1, len(points), width=4.2 * len(points), height=3.2)
    for (title, rows), axis in zip(points.items(), axes, strict=True):
        _style(axis, theme, title, axis_name)
        where = np.arange(len(rows))
        means = np.array([row[1] for row in rows])
        low, high = (np.array([row[i] for row in rows]) for i in (2, 3))
        axis.errorbar(
            where, means, yerr=[means - low, high - means], fmt="o-", color=COLOURS[0], capsize=4, ms=6, lw=1.6
        )
        axis.set_xticks(where, [str(row[0]) for row in rows], parse_math=False)
    return _png(figure)


def _canvas(theme: Theme, rows: int, columns: int, *, width: float, height: float, **options: Any) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), facecolor=theme.background, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False, **options).ravel().tolist()
    return figure, axes


def _style(axis: Any, theme: Theme, title: str, label: str) -> None:
    axis.set_facecolor(theme.background)
    axis.set_title(title, color=theme.ink, fontsize=10, parse_math=False)  # a name may hold two dollar signs
    axis.set_xlabel(label, color=theme.ink, fontsize=9, parse_math=False)
    axis.tick_params(colors=theme.ink, labelsize=8.5)
    axis.grid(True, color=theme.grid, lw=0.6)
    axis.set_axisbelow(True)
    for name, spine in axis.spines.items():
        spine.set_visible(name in ("left", "bottom"))
        spine.set_color(theme.grid)


def _draw(axis: Any, curve: Curve, arms: Sequence[str]) -> None:
    position = list(arms).index(curve.arm)
    style = {"color": _colour(arms, curve.arm), "ls": LINES[position // len(COLOURS) % len(LINES)]}
    axis.plot(curve.steps, curve.mean, lw=1.7, label=_short(curve.arm), **style)
    axis.fill_between(curve.steps, curve.low, curve.high, color=style["color"], alpha=0.15, lw=0)


def _legend_of(axes: Sequence[Any]) -> tuple[list[Any], list[str]]:
    found: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    return list(found.values()), list(found)


def _colour(arms: Sequence[str], arm: str) -> str:
    return COLOURS[list(arms).index(arm) % len(COLOURS)]


def _short(arm: str, longest: int = 36) -> str:
    return arm if len(arm) <= longest else f"{arm[: longest - 1]}…"


def _percent_label(comparison: Comparison) -> str:
    return f"{comparison.measure}, %"


def _png(figure: Any) -> bytes:
    """The figure as PNG without a date, so that the same numbers give the same bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130, metadata={"Software": None})
    return buffer.getvalue()
