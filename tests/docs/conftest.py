"""The browser in which pages of the site are tried."""

from lab.report.conftest import browser

__all__ = ["browser"]
