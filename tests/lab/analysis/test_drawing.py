"""PNG and terminal output of token maps."""

from __future__ import annotations

import io
import os
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from drawn import HOSTILE, drawn_map
from matplotlib.image import imread
from rich.console import Console

from credit_trl.lab.analysis import tokenmap_png, tokenmap_terminal
from credit_trl.lab.analysis.formula import PAPER, CreditFormula, CreditSettings
from credit_trl.lab.analysis.tokenmap import TokenMap, group_scales
from credit_trl.loss.scores import SupportConfig
from credit_trl.objective import ContrastRule

FAINT = [0.1] * 6
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def printed(token_map: TokenMap, width: int = 100, **options) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, color_system="truecolor", width=width)
    scale = group_scales([token_map])[token_map.response.group]["specific"]
    tokenmap_terminal.print_map(token_map, "specific", scale, console=console, **options)
    return file.getvalue()


def signed_map(values: list[float]) -> TokenMap:
    """A map whose S_t are the given values."""
    token_map = drawn_map([f"w{i} " for i in range(len(values))])
    s = token_map.scores
    contrast = s.teacher_logps - torch.tensor(values)
    object.__setattr__(s, "contrast_logps", contrast[None])
    return token_map


def test_terminal_colours_follow_sign_and_strength():
    text = printed(signed_map([2.0, -2.0, 0.0]), top=0)
    line = next(line for line in text.splitlines() if "w0" in line)
    grounds = re.findall(r"48;2;(\d+);(\d+);(\d+)m(w\d)", line)
    colours = {word: tuple(map(int, rgb)) for *rgb, word in grounds}
    assert set(colours) == {"w0", "w1"}  # zero has no ground
    assert colours["w0"][0] > colours["w0"][2]  # red
    assert colours["w1"][2] > colours["w1"][0]  # blue


def test_legend_shows_a_small_scale():
    assert "±0.004 nats" in COLOUR.sub("", printed(signed_map([0.004])))


def test_terminal_escapes_of_a_response_are_not_printed():
    token_map = drawn_map(list(HOSTILE), identifier="\x1b]0;owned\x07", problem="\x1b[2J")
    text = COLOUR.sub("", printed(token_map, width=400))
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "⟨U+001B⟩[31mred" in text
    assert "[/bold]" not in text


def test_console_markup_is_printed_as_text():
    text = COLOUR.sub("", printed(drawn_map(["[bold red]loud[/]", "[link=http://x]"])))
    assert "[bold red]loud[/][link=http://x]" in text


def test_highest_and_lowest_tokens_are_listed():
    token_map = signed_map([0.5, 3.0, -4.0, 0.1, 1.0])
    text = COLOUR.sub("", printed(token_map, top=1))
    rows = [line.split() for line in text.splitlines() if re.match(r"\s*\d+ +w\d", line)]
    assert [row[1] for row in rows] == ["w1", "w2"]
    assert rows[0][2:] == [
        f"{token_map.values(q)[1]:+.3f}" for q in ("specific", "delta_v", "advantage", "generic", "student_logps")
    ]


def test_no_color_prints_plain_text(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    file = io.StringIO()
    token_map = drawn_map(["plain ", "text"])
    tokenmap_terminal.print_map(token_map, "specific", 1.0, console=Console(file=file, width=80))
    assert "plain text" in file.getvalue()
    assert "\x1b" not in file.getvalue()


def test_output_whose_reader_ends_raises_a_broken_pipe(monkeypatch):
    read, write = os.pipe()
    os.close(read)
    file = os.fdopen(write, "w")
    monkeypatch.setattr("sys.stdout", file)
    with pytest.raises(BrokenPipeError), file:
        tokenmap_terminal.print_map(drawn_map(["text"]), "specific", 1.0)


def test_a_narrow_terminal_cuts_tokens_and_no_numbers():
    file = io.StringIO()
    token_map = drawn_map(["a word of many letters ", "text"])
    tokenmap_terminal.print_map(token_map, "specific", 1.0, console=Console(file=file, width=55))
    table = file.getvalue()[file.getvalue().index("token") :]
    assert "a " in table
    assert not re.search(r"\d…", table)


def test_a_terminal_of_40_columns_shows_tokens_and_their_quantity():
    file = io.StringIO()
    token_map = drawn_map(["a word of many letters ", "text"])
    tokenmap_terminal.print_map(token_map, "student_logps", 1.0, console=Console(file=file, width=40))
    table = file.getvalue()[file.getvalue().index("token") :]
    assert "a word" in table
    assert "log π_θ" in table.split("\n")[0]
    assert "…" not in table


# ------------------------------------------------------------------------------------------------------------ picture


def drawn(token_map: TokenMap, path, **options) -> np.ndarray:
    """(height, width, 3), the picture in [0, 1]."""
    tokenmap_png.draw_png(token_map, path, group_scales([token_map])[token_map.response.group], **options)
    return imread(path)[..., :3]


def has(picture: np.ndarray, colour: str) -> bool:
    r, g, b = (picture[..., i] for i in range(3))
    test = {
        "red": (r > g + 0.3) & (abs(g - b) < 0.1),
        "blue": (b > r + 0.3) & (b > g + 0.1),
        "orange": (r > g + 0.2) & (g > b + 0.2),
        "purple": (b > g + 0.2) & (r > g + 0.1),
    }[colour]
    return bool(test.sum() > 20)


def test_png_colours_follow_the_sign(tmp_path):
    both = drawn(signed_map([5.0, -5.0, *FAINT]), tmp_path / "a.png", quantities=("specific",))
    assert has(both, "red")
    assert has(both, "blue")
    positive = drawn(signed_map([5.0, 1.0, *FAINT]), tmp_path / "b.png", quantities=("specific",))
    assert has(positive, "red")
    assert not has(positive, "blue")
    second = drawn(
        signed_map([5.0, -5.0, *FAINT]), tmp_path / "c.png", quantities=("specific",), palette="orange-purple"
    )
    assert has(second, "orange")
    assert has(second, "purple")
    assert not has(second, "red")


def test_png_has_a_panel_for_each_quantity(tmp_path):
    token_map = drawn_map(["word "] * 30)
    three = drawn(token_map, tmp_path / "three.png")
    two = drawn(token_map, tmp_path / "two.png", quantities=("specific",))
    assert three.shape[1] == two.shape[1]
    assert three.shape[0] > two.shape[0]


def test_png_breaks_a_long_title(tmp_path):
    gated = CreditFormula(ContrastRule("subtract", 0.1), "log_mean", "hint", SupportConfig("teacher_topk", 20))
    maps = [drawn_map(["word "], settings=CreditSettings(0.1, formula)) for formula in (PAPER, gated)]
    options = {"quantities": ("advantage",), "dpi": 50}
    heights = [drawn(one, tmp_path / "title.png", **options).shape[0] for one in maps]
    assert heights[1] > heights[0]


def test_png_shows_the_system_turn(tmp_path):
    plain = drawn_map(["word "])
    turns = [{"role": "system", "content": "Tools: A hotels."}, {"role": "user", "content": plain.response.problem}]
    with_system = replace(plain, response=replace(plain.response, prompt=turns))
    lines = [drawn(one, tmp_path / "system.png", dpi=50).shape[0] for one in (plain, with_system)]
    assert lines[1] > lines[0]


@pytest.mark.filterwarnings("error::UserWarning")  # a missing glyph
@pytest.mark.parametrize("text", [*HOSTILE, r"$\frac{$ $x^2$ \textbf", "中文 العربية עברית 🙂", "a\n" * 5])
def test_png_draws_any_text(tmp_path, text):
    picture = drawn(drawn_map([text, "x"], problem=text), tmp_path / "any.png", dpi=60)
    assert picture.min() < 0.5 < picture.max()


def test_png_marks_the_cut_of_a_long_response(tmp_path):
    short = drawn(drawn_map(["word "] * 20), tmp_path / "short.png", dpi=50, max_lines=20)
    long = drawn(drawn_map(["word "] * 1000), tmp_path / "long.png", dpi=50, max_lines=20)
    assert long.shape[0] < short.shape[0] + 40 * 20
    pieces = tokenmap_png._lay_out([("word ", 0.0)] * 8192, 20)
    assert pieces[-1].text == "… cut after 400 of 8192 tokens"


def test_wide_and_combining_characters_take_two_and_no_columns():
    pieces = tokenmap_png._lay_out([("😀", 0.0), ("e\u0301", 0.0), ("x", 0.0)], 5)
    assert [piece.column for piece in pieces] == [0, 2, 3]
    assert tokenmap_png._lay_out([("中", 0.0)], 5)[0].text == "⟨U+4E2D⟩"  # the fonts lack it
