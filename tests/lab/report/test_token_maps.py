"""Token maps of the page in a browser: values shown, interaction and hostile text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from credit_trl.lab.analysis.tokenmap import QUANTITIES, TokenMap
from credit_trl.lab.analysis.tokentext import visible
from credit_trl.lab.report import write_token_maps
from lab.drawn import HOSTILE, drawn_map

Show = Callable[..., Any]


@pytest.fixture
def show(open_page, tmp_path) -> Show:
    """Factory of a shown page of maps."""

    def make(maps: list[TokenMap], title: str = "Token credit", **options: Any) -> Any:
        write_token_maps(maps, tmp_path / "maps.html", title=title)
        return open_page(tmp_path / "maps.html", **options)

    return make


def tokens(page: Any, pane: int = 0) -> Any:
    return page.locator(".pane").nth(pane).locator(".t")


def numbers(page: Any) -> dict[str, list[str]]:
    """The inspector's table: symbol → the cells of its row."""
    rows = [row.locator("td").all_inner_texts() for row in page.locator("#inspector table.numbers tbody tr").all()]
    return {symbol: cells for symbol, *cells in rows}


def as_shown(values: torch.Tensor, digits: int = 4) -> list[str]:
    """Numbers as the page prints them: a zero has no sign."""
    texts = [f"{float(f'{v:.9g}'):.{digits}f}" for v in values.tolist()]
    return [text.lstrip("-") if float(text) == 0 else text.replace("-", "−") for text in texts]


def test_pointer_and_keys_show_numbers_and_alternatives_of_a_token(show):
    token_map = drawn_map(["a", "b", "c", "d"])
    page = show([token_map])
    for index in (0, 3):
        tokens(page).nth(index).hover()
        shown = numbers(page)
        for quantity, symbol in QUANTITIES.items():
            assert shown[symbol] == [as_shown(token_map.values(quantity))[index]], quantity
        assert shown["f"] == [as_shown(token_map.scores.teacher_logps)[index]]
        rows = page.locator("#inspector table.alternatives tbody tr").all()
        cells = [row.locator("td").all_inner_texts() for row in rows]
        assert [row[0] for row in cells] == token_map.alternatives[index]
        others = token_map.scores.alternatives
        columns = (others.centred, others.specific, others.teacher_logps, others.student_logps)
        for column, values in enumerate(columns, start=1):
            assert [row[column] for row in cells] == as_shown(values[index], digits=2)
    tokens(page).nth(1).click()
    tokens(page).nth(3).hover()
    assert "token 2 of 4" in page.locator("#inspector").inner_text()
    page.keyboard.press("ArrowRight")
    assert "token 3 of 4" in page.locator("#inspector").inner_text()


def test_hostile_text_is_shown_as_text(show):
    maps = []
    for number, text in enumerate(HOSTILE):
        own = {"identifier": f"{number} {text}", "problem": text, "feedback": text, "checkpoint": HOSTILE[0]}
        maps.append(drawn_map([*HOSTILE, "end"], seed=number, alternatives=list(HOSTILE), **own))
        maps[-1].classes[:] = [text] * (len(HOSTILE) + 1)
    page = show(maps, title=HOSTILE[1])
    elements = page.evaluate("() => [...document.querySelectorAll('*')].map(e => e.tagName.toLowerCase())")
    assert elements.count("script") == 2  # the data and the page's own
    assert not {"img", "iframe", "link", "object", "embed", "base"} & set(elements)
    assert page.title() == visible(HOSTILE[1])
    for number, text in enumerate(HOSTILE):
        page.select_option("#response", str(number))
        expected = [visible(t).replace("\n", "↵") for t in (*HOSTILE, "end")]
        assert tokens(page).evaluate_all("cells => cells.map(c => c.textContent)") == expected
        shown = page.locator("#context pre").evaluate_all("all => all.map(e => e.textContent)")
        assert shown[:2] == [visible(text)] * 2
        tokens(page).nth(number).hover()
        listed = page.locator("#inspector td.code").evaluate_all("all => all.map(e => e.textContent)")
        assert listed == [visible(t) for t in HOSTILE]
    assert page.evaluate("window.pwned") is None
    assert page.locator("[onerror], [onload], [onmouseover], [onclick], #pwned").count() == 0


def test_content_security_policy_blocks_injected_scripts(show):
    page = show([drawn_map(["a"])])
    page.evaluate(
        """() => {
            const script = document.createElement('script');
            script.textContent = 'window.pwned = 1';
            document.body.append(script);
            const image = document.createElement('div');
            image.innerHTML = '<img src=x onerror="window.pwned = 2">';
            document.body.append(image);
        }"""
    )
    page.wait_for_timeout(100)
    assert page.evaluate("window.pwned") is None
    assert any("Content Security Policy" in complaint for complaint in page.complaints)
    page.complaints.clear()
