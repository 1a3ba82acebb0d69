"""Figure of the difference from SDPO of every seed: a panel per measure, a line per setting and world."""

from __future__ import annotations

import io
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from credit_trl.lab.comparison.figures import COLOURS, Theme

WORLD_COLOURS = {"plain": COLOURS[0], "shortcut": COLOURS[1]}


class Line(NamedTuple):
    """One setting in one world: difference of each seed, and the interval of their mean, in [-1, 1]."""

    label: str
    world: str
    differences: Sequence[float]
    low: float
    high: float


class Panel(NamedTuple):
    """Lines of one measure, with the loss in it that is allowed, in [0, 1]."""

    lines: Sequence[Line]
    limit: float


def differences_figure(panels: dict[str, Panel], theme: Theme) -> bytes:
    """PNG with one panel per title. All panels show the same settings in the same order."""
    count = max(len(panel.lines) for panel in panels.values())
    figure = Figure(figsize=(10.5, 1.3 + 0.42 * count), facecolor=theme.background, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(panels), squeeze=False, sharey=True).ravel()
    for axis, (title, panel) in zip(axes, panels.items(), strict=True):
        axis.set_title(title, color=theme.ink, fontsize=10)
        draw(axis, panel, theme)
    axes[0].set_yticks(range(count), [line.label for line in next(iter(panels.values())).lines])
    axes[0].invert_yaxis()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130, metadata={"Software": None})  # reproducible bytes
    return buffer.getvalue()


def draw(axis: Axes, panel: Panel, theme: Theme) -> None:
    """Draw seeds as dots, the mean with its interval, and the allowed loss as a dashed line."""
    axis.axvline(0, color=theme.ink, lw=0.8)
    axis.axvline(-100 * panel.limit, color=theme.ink, lw=0.8, ls="--")
    for row, line in enumerate(panel.lines):
        colour = WORLD_COLOURS[line.world]
        shown = [100 * value for value in line.differences]
        axis.plot(shown, [row] * len(shown), "o", color=colour, alpha=0.5, ms=5, mew=0)
        axis.plot([100 * line.low, 100 * line.high], [row, row], color=colour, lw=2.2)
        axis.plot(statistics.fmean(shown), row, "D", color=colour, ms=6)
    axis.set_xlabel("points against SDPO", color=theme.ink, fontsize=9)
    axis.set_facecolor(theme.background)
    axis.tick_params(colors=theme.ink, labelsize=8.5)
    axis.grid(True, axis="x", color=theme.grid, lw=0.6)
    for spine in axis.spines.values():
        spine.set_color(theme.grid)
