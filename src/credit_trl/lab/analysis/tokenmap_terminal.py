"""Token map in the terminal: the response on a coloured background."""

from __future__ import annotations

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from credit_trl.lab.analysis.tokenmap import QUANTITIES, TokenMap, colour_strength
from credit_trl.lab.analysis.tokentext import visible

# Background at full strength for (positive, negative) values; the text on it is black.
_PALETTES = {
    "red-blue": ((226, 88, 80), (98, 148, 214)),
    "orange-purple": ((236, 130, 60), (160, 132, 206)),
}


def print_map(
    token_map: TokenMap,
    quantity: str,
    scale: float,
    *,
    palette: str = "red-blue",
    top: int = 8,
    console: Console | None = None,
) -> None:
    """Print one map, its legend and its highest and lowest tokens.

    Args:
        token_map: the map.
        quantity: key of `QUANTITIES`.
        scale: scale of the group, see `group_scales`.
        palette: `"red-blue"` or `"orange-purple"`, for positive and negative values.
        top: number of highest and of lowest tokens to list.
        console: None creates one; a console without colour prints text and list only.
    """
    symbol, meaning = QUANTITIES[quantity], token_map.meaning(quantity)
    response = token_map.response
    reward = "–" if response.reward is None else f"{response.reward:g}"
    head = Text(f"{visible(response.identifier)} · {visible(token_map.checkpoint)} · reward {reward}", style="bold")
    values = token_map.values(quantity)
    body = Text()
    for token, strength in zip(token_map.tokens, colour_strength(values, scale).tolist(), strict=True):
        body.append(token.text, style=_style(strength, palette))
    coefficient = f" (λ = {token_map.scores.contrastive_coef:g})" if quantity == "advantage" else ""
    legend = Text(f"{symbol}: {meaning}{coefficient}; coloured up to ±{scale:.3g} nats", style="dim")
    console = console or _Console()
    console.print(head, Padding(body, (0, 2)), legend, _strongest(token_map, quantity, top, console.width))


class _Console(Console):
    """Console that raises `BrokenPipeError`, for which rich ends the process with exit code 1."""

    def on_broken_pipe(self) -> None:
        raise  # the error, where rich catches it


def _style(strength: float, palette: str) -> str:
    """Style with a background between white and the palette's colour; empty for values near 0."""
    if abs(strength) < 0.02:
        return ""
    full = _PALETTES[palette][0 if strength > 0 else 1]
    mixed = (round(255 + (channel - 255) * abs(strength)) for channel in full)
    return "black on rgb({},{},{})".format(*mixed)


# Columns of the terminal for the number of a token with its text, and for one quantity.
_TOKEN_WIDTH, _VALUE_WIDTH = 16, 9


def _strongest(token_map: TokenMap, quantity: str, top: int, width: int) -> Table:
    """Table of the highest and lowest tokens with the values that fit into `width`, that of `quantity` among them."""
    values = token_map.values(quantity)
    order = [i for i in values.argsort(descending=True).tolist() if values[i].isfinite()]
    chosen = order if len(order) <= 2 * top else order[:top] + order[-top:]
    table = Table(box=None, pad_edge=False)
    fitting = max((width - _TOKEN_WIDTH) // _VALUE_WIDTH, 1)
    first = sorted(QUANTITIES, key=lambda name: name != quantity)[:fitting]
    shown = [name for name in QUANTITIES if name in first]
    for name in ("t", "token", *(QUANTITIES[name] for name in shown)):
        if name == "token":
            table.add_column(name)
        else:  # tokens are cut, not numbers
            table.add_column(name, justify="right", no_wrap=True, min_width=7 if name != "t" else None)
    columns = {name: token_map.values(name).tolist() for name in shown}
    for t in chosen:
        text = Text(token_map.tokens[t].text.replace("\n", ""))
        table.add_row(str(t + 1), text, *(f"{column[t]:+.3f}" for column in columns.values()))
    return table
