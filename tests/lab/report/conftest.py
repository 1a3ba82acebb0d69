"""A browser that shows pages."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

# Chromium without features that use the network.
BROWSER_ARGUMENTS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless browser; skips if none is installed. Playwright keeps an event loop running until it ends."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install credit-trl[dev]")
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    path = next((found for name in names if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip("needs a browser: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        launched = driver.chromium.launch(executable_path=path, args=BROWSER_ARGUMENTS)
        yield launched
        launched.close()
