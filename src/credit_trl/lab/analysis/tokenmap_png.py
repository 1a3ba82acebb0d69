"""Token map as a PNG in the form of the paper's figure: problem and feedback, then ΔV_t and S_t on the response."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from textwrap import wrap

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font
from matplotlib.patches import Rectangle

from credit_trl.contexts.prompts import Prompt
from credit_trl.lab.analysis.responses import feedback_text
from credit_trl.lab.analysis.tokenmap import QUANTITIES, TokenMap, colour_strength
from credit_trl.lab.analysis.tokentext import display_width, visible

_PALETTES = {"red-blue": ("#d62f27", "#2166be"), "orange-purple": ("#e66101", "#6e46b4")}

_FONTS = ("DejaVu Sans Mono", "DejaVu Sans")
_COLUMNS, _TITLE = 100, 90  # characters of a line of text and of a title
_FONT_SIZE = 7.0
# Inches of one character cell of DejaVu Sans Mono at that size, and of one line.
_CELL, _LINE = _FONT_SIZE / 72 * 0.602, _FONT_SIZE / 72 * 1.5
_MARGIN = 0.15


@dataclass(frozen=True)
class _Piece:
    """Text on one line of the character grid, with its colour strength."""

    line: int
    column: int
    text: str
    strength: float


def draw_png(
    token_map: TokenMap,
    path: str | Path,
    scales: dict[str, float],
    *,
    quantities: Sequence[str] = ("delta_v", "specific"),
    palette: str = "red-blue",
    max_lines: int = 60,
    dpi: int = 160,
) -> None:
    """Draw one map: the problem with its system turn, the feedback, then the response once for each quantity.

    The title of the response has its reward and the λ of its R_t.

    Args:
        token_map: the map.
        path: path of the picture.
        scales: scales of the map's group, see `group_scales`.
        quantities: keys of `QUANTITIES`.
        palette: `"red-blue"` or `"orange-purple"`, for positive and negative values.
        max_lines: line limit of each text; the end of a cut text is marked.
        dpi: dots per inch.
    """
    response = token_map.response
    texts = [*_system_texts(response.prompt), response.problem]
    panels = [("problem", _lay_out([(visible("\n".join(texts)), 0.0)], max_lines))]
    if (feedback := feedback_text(response)) is not None:
        panels.append(("feedback z", _lay_out([(feedback, 0.0)], max_lines)))
    for quantity in quantities:
        strengths = colour_strength(token_map.values(quantity), scales[quantity]).tolist()
        texts = [token.text for token in token_map.tokens]
        title = f"{QUANTITIES[quantity]}   {token_map.meaning(quantity)}   {_run_facts(token_map)}"
        panels.append((title, _lay_out(list(zip(texts, strengths, strict=True)), max_lines)))
    panels = [(wrap(f"({chr(97 + n)}) {title}", _TITLE), pieces) for n, (title, pieces) in enumerate(panels)]
    heights = [(len(lines) + max((p.line for p in pieces), default=0) + 2.2) * _LINE for lines, pieces in panels]
    figure = Figure(figsize=(_COLUMNS * _CELL + 2 * _MARGIN, sum(heights) + 2 * _MARGIN), dpi=dpi, facecolor="white")
    top = figure.get_figheight() - _MARGIN
    for (lines, pieces), own in zip(panels, heights, strict=True):
        _draw_panel(figure, lines, pieces, top, palette)
        top -= own
    # Without hinting, the width of a character is not rounded to whole pixels and text stays on its background.
    with rc_context({"text.hinting": "no_hinting", "text.hinting_factor": 1}):
        figure.savefig(path, dpi=dpi)


def _system_texts(prompt: Prompt) -> list[str]:
    """System turns of a prompt, on which feedback such as a letter may depend."""
    turns = [] if isinstance(prompt, str) else [turn for turn in prompt if turn["role"] == "system"]
    return [turn["content"] for turn in turns if isinstance(turn["content"], str)]


def _run_facts(token_map: TokenMap) -> str:
    reward = token_map.response.reward
    shown = "" if reward is None or not math.isfinite(reward) else f"reward {reward:g}, "
    return f"{shown}λ = {token_map.scores.contrastive_coef:.4g}"


def _draw_panel(figure: Figure, title: list[str], pieces: list[_Piece], top: float, palette: str) -> None:
    width, height = figure.get_size_inches()
    for number, line in enumerate(title, 1):
        style = {"fontsize": _FONT_SIZE + 1, "weight": "bold", "parse_math": False}
        figure.text(_MARGIN / width, (top - number * _LINE) / height, line, **style)
    for piece in pieces:
        x, y = _MARGIN + piece.column * _CELL, top - (piece.line + len(title) + 1.2) * _LINE
        columns = sum(map(display_width, piece.text))
        if piece.strength:
            colour = _PALETTES[palette][0 if piece.strength > 0 else 1]
            box = Rectangle(
                (x / width, (y - 0.3 * _LINE) / height),
                columns * _CELL / width,
                0.96 * _LINE / height,
                transform=figure.transFigure,
                facecolor=colour,
                alpha=0.75 * abs(piece.strength),
                linewidth=0,
            )
            figure.add_artist(box)
        figure.text(x / width, y / height, piece.text, fontsize=_FONT_SIZE, family=_FONTS, parse_math=False)


def _lay_out(texts: Sequence[tuple[str, float]], max_lines: int) -> list[_Piece]:
    """Break texts into lines of the grid."""
    pieces: list[_Piece] = []
    line = column = 0
    for number, (text, strength) in enumerate(texts):
        run, start = "", column
        for character in _drawable(text):
            width = display_width(character)
            if character == "\n" or column + width > _COLUMNS:
                pieces.append(_Piece(line, start, run, strength))
                line, column, run, start = line + 1, 0, "", 0
                if line >= max_lines:
                    rest = f"… cut after {number} of {len(texts)} tokens" if len(texts) > 1 else "… cut"
                    return [*pieces, _Piece(line, 0, rest, 0.0)]
            if character != "\n":
                run, column = run + character, column + width
        pieces.append(_Piece(line, start, run, strength))
    return [piece for piece in pieces if piece.text]


def _drawable(text: str) -> str:
    """Text with characters that the fonts do not have written as `⟨U+4E2D⟩`."""
    known = _characters()
    return "".join(c if c == "\n" or ord(c) in known else f"⟨U+{ord(c):04X}⟩" for c in text)


@cache
def _characters() -> frozenset[int]:
    """Code points of matplotlib's fonts."""
    return frozenset(point for name in _FONTS for point in get_font(findfont(name)).get_charmap())
