"""A browser that shows pages."""

import shutil
from typing import Any

import numpy as np
import pytest

# Chromium without features that use the network.
BROWSER_ARGUMENTS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()


@pytest.fixture(scope="module")
def browser():
    """A headless browser; skips if none is installed. Playwright keeps an event loop running until it ends."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install credit-trl[dev]")
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    path = next((executable for name in names if (executable := shutil.which(name))), None)
    if path is None:
        pytest.skip("needs a browser: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        launched = driver.chromium.launch(executable_path=path, args=BROWSER_ARGUMENTS)
        yield launched
        launched.close()


@pytest.fixture
def open_page(browser):
    """Factory of a page of the browser; afterwards no page may have had an error, a dialog or a request."""
    opened: list[Any] = []

    def make(path, width=1400, **options):
        page = browser.new_page(viewport={"width": width, "height": 900}, **options)
        complaints: list[str] = []
        page.complaints = complaints
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: (complaints.append("dialog"), dialog.dismiss()))
        page.on("request", lambda request: request.url == path.as_uri() or complaints.append(request.url))
        page.goto(path.as_uri())
        opened.append(page)
        return page

    yield make
    complaints = [complaint for page in opened for complaint in page.complaints]
    for page in opened:
        page.close()
    assert complaints == []


@pytest.fixture
def scores():
    """(runs, evaluations, prompts)."""
    return np.random.default_rng(0).integers(0, 5, size=(6, 3, 20)) / 4
