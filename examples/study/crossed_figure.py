"""Figure of the sweep `cross`: accuracy on unknown cues against the rate of the shortcut, one panel per world."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from bars import arms_of, interval
from crossed import form_of
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from worlds import World

from credit_trl.lab.comparison.figures import COLOURS, Theme

FORM_COLOURS = {  # one colour per form, paler for the smaller λ
    "SDPO": COLOURS[7],
    "CREDIT λ=0.1": COLOURS[5],
    "CREDIT λ=0.5": COLOURS[0],
    "CREDIT form=guide λ=1": COLOURS[4],
    "CREDIT form=guide λ=1.5": COLOURS[1],
}
SOURCE_MARKS = {"batch": "o", "hard": "^", "none": "s"}


def cross_figure(worlds: Mapping[str, World], theme: Theme) -> bytes | None:
    """PNG of the worlds with a shortcut, or None without such a world."""
    shown = [world for world in worlds.values() if world.name != "plain"]
    if not shown:
        return None
    figure = Figure(figsize=(4.2 * len(shown), 3.9), facecolor=theme.background, layout="constrained")
    FigureCanvasAgg(figure)
    for axis, world in zip(figure.subplots(1, len(shown), squeeze=False, sharey=True).ravel(), shown, strict=True):
        axis.set_title(f"{world.name} world", color=theme.ink, fontsize=10)
        axis.set_xlabel("shortcut on unknown cues, %", color=theme.ink, fontsize=9)
        if world is shown[0]:
            axis.set_ylabel("unknown cues right, %", color=theme.ink, fontsize=9)
        for arm in arms_of(world):
            where = (100 * interval(world, arm, name)[0] for name in ("shortcut", "unknown"))
            axis.plot(*where, **style_of(arm, theme))
        axis.set(facecolor=theme.background, xlim=(-4, 104))
        axis.tick_params(colors=theme.ink, labelsize=8.5)
        axis.grid(True, color=theme.grid, lw=0.6)
        for spine in axis.spines.values():
            spine.set_color(theme.grid)
    figure.legend(handles=legend(theme), loc="outside lower center", ncols=4, frameon=False, labelcolor=theme.ink)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130, metadata={"Software": None})  # reproducible bytes
    return buffer.getvalue()


def style_of(arm: str, theme: Theme) -> dict[str, Any]:
    """Marker options of an arm: the colour shows form and λ, the marker the source, a hollow marker the gate."""
    options = dict(part.split("=") for part in arm.split() if "=" in part)
    colour = FORM_COLOURS.get(form_of(arm) or arm, theme.ink)
    mark = "X" if arm == "SDPO" else SOURCE_MARKS[options.get("source", "batch")]
    fill = theme.background if "gate" in options else colour
    return {"marker": mark, "color": colour, "mfc": fill, "mew": 1.6, "ms": 8, "ls": "none"}


def legend(theme: Theme) -> Sequence[Line2D]:
    """Legend entries: forms in their colour, sources and the gate in the ink colour."""
    forms = ("SDPO", "subtract, λ = 0.1", "subtract, λ = 0.5", "guide, λ = 1", "guide, λ = 1.5")
    arms = zip(forms, FORM_COLOURS, strict=True)
    handles = [Line2D([], [], label=label, **style_of(arm, theme)) for label, arm in arms]
    options = {"source hard": "source=hard", "source none": "source=none", "hollow: gate 0.05": "gate=0.05"}
    return handles + [Line2D([], [], label=label, **style_of(option, theme)) for label, option in options.items()]
