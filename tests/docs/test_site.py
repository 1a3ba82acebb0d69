"""The documentation site: strict build, no external resources, no dead links, complete tables."""

import html
import os
import re
import runpy
import subprocess
import sys
import threading
from dataclasses import fields
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

import pytest
from pages import PAGES, ROOT
from trl import GRPOConfig

from credit_trl import CreditConfig

pytest.importorskip("mkdocs", reason="needs mkdocs: pip install 'credit-trl[docs]'")

LOADED = r'<(?:script|img|iframe|source|video)\b[^>]*?\s(?:src|srcset)="([^"]+)"'
STYLED = r'<link\b(?=[^>]*\srel="(?:stylesheet|icon|preload|preconnect)")[^>]*?\shref="([^"]+)"'


class Page(NamedTuple):
    """Resources, links and anchors of an HTML page."""

    resources: list[str]
    links: list[str]
    anchors: set[str]


def read(path: Path) -> Page:
    text = path.read_text("utf-8")
    links = [html.unescape(link) for link in re.findall(r'<a\b[^>]*?\shref="([^"]+)"', text)]
    return Page(re.findall(LOADED, text) + re.findall(STYLED, text), links, set(re.findall(r'\sid="([^"]+)"', text)))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, env=environment, timeout=800, check=True)  # pytest shows its output
    return folder


@pytest.fixture(scope="module")
def pages(site):
    return {path.name: read(path) for path in site.glob("*.html") if path.name != "404.html"}


def test_every_page_is_in_the_navigation(pages):
    sources = {path.stem for path in (ROOT / "docs").glob("*.md")} | {"index", "contributing"}
    assert {f"{source}.html" for source in sources - {"method"}} <= set(pages["method.html"].links) & pages.keys()


def test_resources_are_files_of_the_site(pages, site):
    loaded = {url.partition("?")[0] for page in pages.values() for url in page.resources}
    assert [url for url in loaded if not (site / url).is_file()] == []
    assert [style for style in site.rglob("*.css") if re.search(r'url\("?http', style.read_text("utf-8"))] == []


def test_no_link_between_pages_is_dead(pages, site):
    for name, page in pages.items():
        for link in page.links:
            target, _, anchor = link.partition("#")
            if not link.startswith(("http", "mailto")):
                assert (site / (target or name)).exists(), f"{name}: {link}"
                assert not anchor or anchor in pages[target or name].anchors, f"{name}: {link}"


def test_files_of_the_repository_are_pages(site):
    checked_pages = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    link = re.compile(r"\]\((?:\.\./)?((?:examples|notebooks)/[^)#]+)")
    linked = {path for page in checked_pages for path in link.findall(page.read_text("utf-8"))}
    assert len(linked) > 10
    assert [path for path in linked if not (site / "source" / f"{path}.html").is_file()] == []
    notebook = (site / "source" / "notebooks" / "03_see_the_credit.ipynb.html").read_text("utf-8")
    assert "data:image/png;base64," in notebook  # with its outputs


def test_formulae_are_mathml(site):
    texts = [(site / f"{name}.html").read_text("utf-8") for name in ("method", "glossary", "options")]
    assert all("<math" in text and "arithmatex" not in text for text in texts)


@pytest.fixture(scope="module")
def address(site):
    """The site by HTTP, which its search needs."""
    handler = partial(SimpleHTTPRequestHandler, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("words", ["lambda", "alpha", "pi", "delta"])
def test_search_for_the_name_of_a_symbol_finds_the_options_first(browser, address, words):
    page = browser.new_page()
    page.goto(f"{address}/index.html?q={words}")
    top_result = page.locator(".md-search-result__link").first
    top_result.wait_for(state="attached")
    assert top_result.get_attribute("href").partition("?")[0].endswith("options.html")
    page.close()


def test_option_tables_fit_a_phone(browser, address):
    page = browser.new_page(viewport={"width": 390, "height": 844})
    page.goto(f"{address}/options.html")
    meanings = page.locator(".options td:nth-child(4)")
    boxes = meanings.evaluate_all("cells => cells.map(cell => cell.getBoundingClientRect())")
    assert len(boxes) >= 30
    assert all(box["left"] >= 0 and box["right"] <= 390 and box["width"] > 300 for box in boxes)
    page.close()


def test_which_setting_asks_its_questions_on_one_screen(browser, address):
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.goto(f"{address}/which_setting.html")
    assert page.locator("h2").first.evaluate("end => end.getBoundingClientRect().bottom") <= 800
    page.close()


@pytest.mark.parametrize("name", ["learning_curve", "hero", "predicted"])
def test_figures_have_a_dark_twin_that_a_page_shows(name):
    images = ROOT / "docs" / "images"
    assert (images / f"{name}-light.png").read_bytes() != (images / f"{name}-dark.png").read_bytes()
    pages_with_figure = [page for page in PAGES if f"images/{name}-light.png" in page.read_text("utf-8")]
    assert pages_with_figure
    assert all("(prefers-color-scheme: dark)" in page.read_text("utf-8") for page in pages_with_figure)


def test_every_own_option_has_a_row(site):
    rows = set(re.findall(r"<td><code>(\w+)</code></td>", (site / "options.html").read_text("utf-8")))
    assert {field.name for field in fields(CreditConfig)} - {field.name for field in fields(GRPOConfig)} <= rows


def test_api_page_has_every_module_that_is_not_internal(pages):
    package = ROOT / "src" / "credit_trl"
    files = [path.relative_to(package) for path in package.rglob("*.py") if path.name != "__init__.py"]
    modules = {".".join(path.with_suffix("").parts) for path in files}
    hooks = runpy.run_path(str(ROOT / "docs" / "hooks.py"))
    documented = {name for part in hooks["API"].values() for name in hooks["api_modules"](part)}
    elsewhere = ("__main__", "cli", "config", "sandbox", *hooks["INTERNAL"])
    assert [name for name in modules - documented if not name.startswith(elsewhere)] == []
    assert [prefix for prefix in hooks["INTERNAL"] if not any(name.startswith(prefix) for name in modules)] == []
    for name in documented:
        assert any(anchor.startswith(f"credit_trl.{name}.") for anchor in pages["api.html"].anchors), name
