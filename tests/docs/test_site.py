"""The documentation site: strict build, no external resources, no dead links, complete tables."""

from __future__ import annotations

import html
import inspect
import os
import re
import runpy
import subprocess
import sys
from dataclasses import fields
from html.parser import HTMLParser
from pathlib import Path

import pytest
from blocks import ROOT
from trl import GRPOConfig

from credit_trl import CreditConfig, objective

pytest.importorskip("mkdocs", reason="needs mkdocs: pip install 'credit-trl[docs]'")


class Page(HTMLParser):
    """Resources, links and anchors of an HTML page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.resources: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.anchors |= {given[name] for name in ("id", "name") if given.get(name)}
        if tag in ("script", "img", "iframe", "source", "video") and given.get("src"):
            self.resources.append(given["src"])
        if tag == "source" and given.get("srcset"):
            self.resources.append(given["srcset"])
        if tag == "link" and given.get("rel") in ("stylesheet", "icon", "preload", "preconnect"):
            self.resources.append(given["href"])
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(folder)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site) -> dict[str, Page]:
    return {path.name: Page(path.read_text("utf-8")) for path in site.glob("*.html")}


def test_every_page_is_in_the_navigation(pages):
    sources = {path.stem for path in (ROOT / "docs").glob("*.md")} | {"index", "contributing"}
    assert sources <= {name.removesuffix(".html") for name in pages}
    for source in sources:
        assert f"{source}.html" in pages["method.html"].links or source == "method"


def test_no_page_loads_external_resources(pages, site):
    for name, page in pages.items():
        assert [url for url in page.resources if url.startswith(("http", "//"))] == [], name
    for style in site.rglob("*.css"):
        assert "url(http" not in style.read_text("utf-8").replace('url("http', "url(http")


def test_every_resource_of_a_page_exists(pages, site):
    for name, page in pages.items():
        for url in page.resources if name != "404.html" else ():
            assert (site / url.partition("?")[0]).is_file(), f"{name}: {url}"


def test_no_link_between_pages_is_dead(pages, site):
    for name, page in pages.items():
        if name == "404.html":
            continue
        for link in page.links:
            if link.startswith(("http", "mailto")):
                continue
            target, _, anchor = link.partition("#")
            target = target or name
            assert (site / target).exists(), f"{name}: {link}"
            if anchor and target in pages:
                assert anchor in pages[target].anchors, f"{name}: {link}"


def test_all_formulae_are_mathml(site):
    for name in ("method.html", "glossary.html", "options.html"):
        text = (site / name).read_text("utf-8")
        assert "<math" in text
        assert "arithmatex" not in text
    assert (site / "method.html").read_text("utf-8").count('display="block"') >= 6


def test_every_own_option_has_a_row_with_its_default(site):
    text = (site / "options.html").read_text("utf-8")
    inherited = {one.name for one in fields(GRPOConfig)}
    own = [one for one in fields(CreditConfig) if one.name not in inherited]
    assert len(own) >= 25
    for one in own:
        assert f"<td><code>{one.name}</code></td>" in text, one.name


def test_api_reference_has_the_docstrings(pages, site):
    text = re.sub(r"<[^>]+>|\s+", " ", (site / "api.html").read_text("utf-8"))
    assert "credit_trl.objective.credit_target" in pages["api.html"].anchors
    first_line = inspect.getdoc(objective.add_tail_bucket).splitlines()[0]
    assert re.sub(r"\W+", " ", first_line).strip() in re.sub(r"\W+", " ", html.unescape(text))


def test_api_page_has_every_module_that_is_not_internal(pages):
    package = ROOT / "src" / "credit_trl"
    files = [path.relative_to(package) for path in package.rglob("*.py") if path.name != "__init__.py"]
    modules = {".".join(path.with_suffix("").parts) for path in files}
    hooks = runpy.run_path(str(ROOT / "docs" / "hooks.py"))
    documented = {name for part in hooks["API"].values() for name in hooks["api_modules"](part)}
    elsewhere = ("__main__", "cli", "config", "sandbox", *hooks["INTERNAL"])
    assert {name for name in modules - documented if not name.startswith(elsewhere)} == set()
    assert [prefix for prefix in hooks["INTERNAL"] if not any(name.startswith(prefix) for name in modules)] == []
    anchors = pages["api.html"].anchors
    assert {name for name in documented if not any(a.startswith(f"credit_trl.{name}.") for a in anchors)} == set()


def test_pages_stay_within_their_size():
    """130 KiB in total, and 20 KiB per page."""
    sizes = {path.name: path.stat().st_size for path in (ROOT / "docs").glob("*.md")}
    assert sum(sizes.values()) <= 130 * 1024
    assert {name for name, size in sizes.items() if size > 20 * 1024} == set()
