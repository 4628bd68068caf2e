"""Fixtures of tests in a page."""

from tests.pages import browser, page

__all__ = ["browser", "page"]
