"""The HTML page in a browser: values shown, interaction and hostile text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from credit_trl.lab.analysis.tokenmap_html import embed_json, render_html, write_html
from drawn import HOSTILE, drawn_map
from matplotlib.image import imread

from credit_trl.lab.analysis.formula import CreditFormula, CreditSettings
from credit_trl.lab.analysis.tokenmap import QUANTITIES, TokenMap, colour_strength, group_scales
from credit_trl.lab.analysis.tokentext import visible
from credit_trl.objective import ContrastRule


class Shown:
    """A page in the browser, with its errors, dialogs and requests."""

    def __init__(self, browser: Any, maps: list[TokenMap], directory: Path, **options: Any) -> None:
        write_html(maps, directory / "maps.html", **options.pop("write", {}))
        self.page = browser.new_page(viewport={"width": 1400, "height": 900}, **options)
        self.complaints: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.complaints.append("dialog"), dialog.dismiss()))
        self.page.on("request", self._note_request)
        self.page.goto((directory / "maps.html").as_uri())

    def _note_request(self, request: Any) -> None:
        if not request.url.endswith("maps.html"):
            self.complaints.append(f"request {request.url}")

    def tokens(self, pane: int = 0) -> Any:
        return self.page.locator(".pane").nth(pane).locator(".t")

    def numbers(self) -> dict[str, list[str]]:
        """The inspector's table: quantity → the cells of its row."""
        rows = self.page.locator("#inspector table.numbers tr[data-quantity]").all()
        return {row.get_attribute("data-quantity"): row.locator("td").all_inner_texts()[1:] for row in rows}

    def grounds(self, pane: int = 0) -> list[str]:
        return self.tokens(pane).evaluate_all("cells => cells.map(c => getComputedStyle(c).backgroundColor)")

    def names(self) -> list[str]:
        return self.page.locator("#list .name").all_inner_texts()


@pytest.fixture
def show(browser, tmp_path):
    opened: list[Shown] = []

    def make(maps: list[TokenMap], **options: Any) -> Shown:
        opened.append(Shown(browser, maps, tmp_path, **options))
        return opened[-1]

    yield make
    for shown in opened:
        shown.page.close()


def as_shown(values: torch.Tensor, digits: int = 4) -> list[str]:
    """Numbers as the page prints them: a zero has no sign."""
    texts = [f"{float(f'{v:.9g}'):.{digits}f}" for v in values.tolist()]
    return [text.lstrip("-") if float(text) == 0 else text.replace("-", "−") for text in texts]


def test_hover_shows_numbers_and_alternatives_of_a_token(show, model_map):
    shown = show([model_map])
    for index in (0, 3, len(model_map.tokens) - 1):
        shown.tokens().nth(index).hover()
        numbers = shown.numbers()
        for quantity in QUANTITIES:
            assert numbers[quantity] == [as_shown(model_map.values(quantity))[index]], quantity
        assert numbers["teacher_logps"] == [as_shown(model_map.scores.teacher_logps)[index]]
        rows = shown.page.locator("#inspector table.alternatives tr").all()[1:]
        cells = [row.locator("td").all_inner_texts() for row in rows]
        assert [row[0] for row in cells] == [text.replace("\n", "") for text in model_map.alternatives[index]]
        s = model_map.scores.alternatives
        columns = (s.advantage, s.specific, s.teacher_logps, s.student_logps)
        for column, values in enumerate(columns, start=1):
            assert [row[column] for row in cells] == as_shown(values[index], digits=3)
    assert shown.complaints == []


def test_click_pins_a_token_and_arrow_keys_move_the_pin(show):
    shown = show([drawn_map(["a", "b", "c", "d"])])
    shown.tokens().nth(1).click()
    shown.tokens().nth(3).hover()
    assert "token 2 of 4" in shown.page.locator("#inspector").inner_text()
    shown.page.keyboard.press("ArrowRight")
    assert "token 3 of 4" in shown.page.locator("#inspector").inner_text()
    shown.tokens().nth(2).click()
    shown.tokens().nth(3).hover()
    assert "token 4 of 4" in shown.page.locator("#inspector").inner_text()


def test_quantity_switch_repaints_by_sign(show):
    token_map = drawn_map(["a "] * 12, seed=4)
    scales = group_scales([token_map])[token_map.response.group]
    shown = show([token_map])
    for quantity in QUANTITIES:
        shown.page.locator(f"input[value={quantity}]").check(force=True)
        strengths = colour_strength(token_map.values(quantity), scales[quantity]).tolist()
        for ground, strength in zip(shown.grounds(), strengths, strict=True):
            (red, _, blue), alpha = parse(ground)
            assert alpha == pytest.approx(0.72 * abs(strength), abs=0.004)
            if abs(strength) > 0.01:
                assert (red > blue) == (strength > 0)
        assert f"{QUANTITIES[quantity]}: {token_map.meaning(quantity)}" in shown.page.locator("#meaning").inner_text()


def test_labels_and_tooltips_show_the_formula_of_each_pane(show):
    gated = CreditFormula(ContrastRule("guide", gate=0.05), "log_mean")
    maps = [
        drawn_map(["a ", "b "], checkpoint="paper"),
        drawn_map(["a ", "b "], checkpoint="guide", settings=CreditSettings(2.0, gated)),
    ]
    shown = show(maps)
    headings = shown.page.locator(".pane h2").all_inner_texts()
    assert headings[0] == "paper · R_t = ΔV_t − λ Ĝ · λ = 0.1"
    assert headings[1].startswith("guide · R_t = ΔV_t + λ S_t, where f and Ĝ differ by a total variation above 0.05")
    assert headings[1].endswith("λ = 2")
    label = shown.page.locator("#quantities label", has_text="R_t").get_attribute("title")
    assert label == f"{maps[0].meaning('advantage')} | {maps[1].meaning('advantage')}"
    shown.page.locator("input[value=generic]").check(force=True)
    assert "log of the mean probability" in shown.page.locator("#meaning").inner_text()
    shown.tokens().first.hover()
    row = shown.page.locator("tr[data-quantity=advantage] td").first
    assert "ΔV_t + λ S_t" in row.get_attribute("title")
    assert shown.numbers()["entered_coef"] == ["0.1000", "2.0000"]


def test_second_palette_changes_the_colours(show):
    shown = show([drawn_map(["a ", "b ", "c "])])
    before = shown.grounds()
    shown.page.select_option("#palette", "orange-purple")
    assert all(a != b for a, b in zip(before, shown.grounds(), strict=True))


def test_two_checkpoints_are_shown_and_hovered_together(show):
    maps = [drawn_map(["a ", "b ", "c "], seed=s, checkpoint=f"step-{s}") for s in (1, 2, 3)]
    shown = show(maps)
    assert shown.page.locator(".pane").count() == 2
    shown.tokens(0).nth(2).hover()
    assert shown.page.locator(".t.at").count() == 2
    assert shown.numbers()["advantage"] == [as_shown(m.scores.advantage)[2] for m in maps[:2]]
    shown.page.select_option("#right", "2")
    shown.tokens(1).nth(0).hover()
    assert shown.numbers()["specific"] == [as_shown(maps[i].scores.specific)[0] for i in (0, 2)]
    shown.page.select_option("#right", "-1")
    assert shown.page.locator(".pane").count() == 1
    shown.page.select_option("#left", "1")
    shown.tokens().nth(1).hover()
    assert shown.numbers()["delta_v"] == [as_shown(maps[1].scores.delta_v)[1]]


def test_search_filters_responses_and_marks_tokens(show):
    maps = [
        drawn_map(["Use ", "a ", "Hash", "Map", " here"], identifier="first"),
        drawn_map(["Sort ", "it"], identifier="second", problem="find the median"),
        drawn_map(["No", "thing"], identifier="third", feedback="hashmap expected"),
    ]
    shown = show(maps)
    shown.page.fill("#search", "hashmap")
    assert shown.names() == ["first", "third"]
    marked = shown.tokens().evaluate_all("cells => cells.map(c => c.classList.contains('hit'))")
    assert marked == [False, False, True, True, False]
    shown.page.fill("#search", "median")
    assert shown.names() == ["second"]
    shown.page.fill("#search", "")
    assert len(shown.names()) == 3


def test_responses_are_sorted_by_mean_s_and_reward(show):
    maps = [drawn_map(["a", "b", "c"], seed=s, identifier=f"r{s}", reward=float(s)) for s in range(5)]
    shown = show([*maps, drawn_map(["a"], identifier="no contrast", contrasts=0, reward=None)])
    order = sorted(range(5), key=lambda i: -maps[i].scores.specific.double().mean().item())
    shown.page.select_option("#sort", "specific down")
    assert shown.names() == [f"r{i}" for i in order] + ["no contrast"]
    shown.page.select_option("#sort", "specific up")
    assert shown.names() == [f"r{i}" for i in reversed(order)] + ["no contrast"]
    shown.page.select_option("#sort", "reward down")
    assert shown.names() == ["r4", "r3", "r2", "r1", "r0", "no contrast"]


def test_selected_response_is_shown(show):
    shown = show([drawn_map(["a"], identifier="one"), drawn_map(["b", "c"], identifier="two", problem="the second")])
    shown.page.locator("#list button").nth(1).click()
    assert shown.tokens().all_inner_texts() == ["b", "c"]
    assert "the second" in shown.page.locator("#context").inner_text()


def test_missing_values_are_dashes(show):
    shown = show([drawn_map(["a"], contrasts=0)])
    shown.tokens().nth(0).hover()
    assert shown.numbers()["specific"] == ["–"]
    assert shown.complaints == []


# --------------------------------------------------------------------------------------------------- appearance


def luminance(rgb: np.ndarray) -> np.ndarray:
    linear = np.where(rgb <= 0.03928, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    return linear @ [0.2126, 0.7152, 0.0722]


def parse(colour: str) -> tuple[np.ndarray, float]:
    red, green, blue, *alpha = (float(x) for x in re.findall(r"[\d.]+", colour))
    return np.array([red, green, blue]) / 255, alpha[0] if alpha else 1.0


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("palette", ["red-blue", "orange-purple"])
def test_text_contrast_is_at_least_4_5_on_every_colour(show, theme, palette):
    shown = show([drawn_map(["word "] * 60, seed=2)])
    shown.page.select_option("#theme", theme)
    shown.page.select_option("#palette", palette)
    style = shown.page.evaluate(
        "() => { const s = getComputedStyle(document.body); return [s.color, s.backgroundColor]; }"
    )
    (text, _), (ground, _) = map(parse, style)
    assert (luminance(ground) > 0.5) == (theme == "light")
    for colour in set(shown.grounds()):
        own, alpha = parse(colour)
        bright, dim = sorted([luminance(text), luminance(own * alpha + ground * (1 - alpha))], reverse=True)
        assert (bright + 0.05) / (dim + 0.05) >= 4.5, colour


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_follows_the_system_theme(show, tmp_path, scheme):
    shown = show([drawn_map(["word "] * 200, seed=3)], color_scheme=scheme)
    shown.tokens().nth(7).hover()
    shown.page.screenshot(path=tmp_path / "page.png")
    picture = imread(tmp_path / "page.png")[..., :3]
    assert (np.median(picture) > 0.5) == (scheme == "light")
    r, g, b = (picture[..., i] for i in range(3))
    assert ((r > g + 0.2) & (r > b + 0.2)).sum() > 500
    assert ((b > r + 0.2) & (b > g + 0.05)).sum() > 500
    assert shown.complaints == []


def test_narrow_window_does_not_scroll_sideways(show):
    shown = show([drawn_map(["averyveryverylongword" * 20, " x"] * 5)])
    shown.page.set_viewport_size({"width": 420, "height": 800})
    assert shown.page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


def test_page_shows_8192_tokens(show):
    words = [f" word{i % 977}" if i % 13 else "\n" for i in range(8192)]
    maps = [drawn_map(words, seed=s, checkpoint=f"step-{s}", alternatives=["a", "b", "c"]) for s in (1, 2)]
    shown = show(maps)
    assert [shown.tokens(pane).count() for pane in (0, 1)] == [8192, 8192]
    shown.page.evaluate("inspect(8191)")
    assert shown.numbers()["advantage"] == [as_shown(m.scores.advantage)[8191] for m in maps]
    assert shown.complaints == []


# -------------------------------------------------------------------------------------------------------- hostile text


def hostile_maps() -> list[TokenMap]:
    """Maps with every hostile text as token, alternative, problem, feedback, name and class."""
    maps = []
    for number, text in enumerate(HOSTILE):
        token_map = drawn_map(
            [*HOSTILE, "end"],
            seed=number,
            identifier=f"{number} {text}",
            problem=text,
            feedback=text,
            alternatives=list(HOSTILE),
            checkpoint=HOSTILE[0],
        )
        object.__setattr__(token_map, "classes", [text] * len(token_map.tokens))
        maps.append(token_map)
    return maps


def test_hostile_text_is_shown_as_text(show):
    maps = hostile_maps()
    shown = show(maps, write={"title": HOSTILE[1]})
    elements = shown.page.evaluate("() => [...document.querySelectorAll('*')].map(e => e.tagName.toLowerCase())")
    assert elements.count("script") == 2  # the data and the page's own
    assert not {"img", "svg", "iframe", "link", "object", "embed", "base"} & set(elements)
    assert elements.count("style") == 1
    assert shown.page.title() == visible(HOSTILE[1])
    for number, text in enumerate(HOSTILE):
        shown.page.locator("#list button").nth(number).click()
        expected = [visible(t).replace("\n", "↵") for t in (*HOSTILE, "end")]
        assert shown.tokens().evaluate_all("cells => cells.map(c => c.textContent)") == expected
        assert (
            shown.page.locator("#context pre").evaluate_all("all => all.map(e => e.textContent)")[:2]
            == [visible(text)] * 2
        )
        shown.tokens().nth(number).hover()
        listed = shown.page.locator("#inspector td.code").evaluate_all("all => all.map(e => e.textContent)")
        assert listed == [visible(t) for t in HOSTILE]
        assert visible(text) in shown.page.locator("#inspector").evaluate("e => e.textContent")
    shown.page.fill("#search", "<script>")
    assert shown.page.evaluate("window.pwned") is None
    assert shown.page.locator("#pwned").count() == 0
    assert shown.page.locator("[onerror], [onload], [onmouseover], [onclick]").count() == 0
    assert shown.complaints == []


def test_direction_marks_do_not_move_other_tokens(show):
    maps = [drawn_map(["abc", "\u202edef\u202c", "ghi"]), drawn_map(["abc", "שלום", "ghi"], identifier="r1")]
    shown = show(maps)
    for number in (0, 1):
        shown.page.locator("#list button").nth(number).click()
        left = shown.tokens().evaluate_all("cells => cells.map(c => c.getBoundingClientRect().left)")
        assert left == sorted(left)
    assert "\u202e" not in shown.page.content()


def test_content_security_policy_blocks_injected_scripts(show):
    shown = show([drawn_map(["a"])])
    shown.page.evaluate(
        """() => {
            const script = document.createElement('script');
            script.textContent = 'window.pwned = 1';
            document.body.append(script);
            const image = document.createElement('div');
            image.innerHTML = '<img src=x onerror="window.pwned = 2">';
            document.body.append(image);
        }"""
    )
    shown.page.wait_for_timeout(100)
    assert shown.page.evaluate("window.pwned") is None
    assert any("Content Security Policy" in complaint for complaint in shown.complaints)


@pytest.mark.parametrize("text", HOSTILE)
def test_embedded_json_has_no_markup(text):
    embedded = embed_json({"text": text})
    assert not set("<>&\u2028\u2029") & set(embedded)
    assert embedded.isascii()


def test_page_has_no_external_addresses():
    page = render_html([drawn_map(["a"])])
    assert not re.search(r"""(?:src|href)\s*=|url\(|@import|https?://""", page)
