"""A real page for the scripts of views, with a model in the kernel's place that the test plays."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from power_lab.widgets.view import View
from tests.browser.lab import FLAGS, chromium

FAKE_MODEL = """
window.fake = (traits) => {
  const handlers = {};
  return {
    sent: [],
    get: (key) => traits[key],
    set: (key, value) => { traits[key] = value; },
    save_changes: () => {},
    send(message) { this.sent.push(message); if (this.dead) throw new Error("closed"); },
    on: (name, handler) => (handlers[name] ??= []).push(handler),
    off: (name, handler) => { handlers[name] = (handlers[name] ?? []).filter((other) => other !== handler); },
    answer: (...values) => (handlers["msg:custom"] ?? []).forEach((handler) => handler(...values)),
    fire: (name, value) => (handlers[name] ?? []).forEach((handler) => handler(value)),
    count: () => Object.values(handlers).flat().length,
  };
};
"""
_IMPORT = """async (source) => { const blob = new Blob([source], { type: "text/javascript" });
  window.view = (await import(URL.createObjectURL(blob))).default; }"""
_BEGIN = "traits => { window.traits = traits; window.model = fake(traits); window.stop = view.initialize({ model }); }"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """It ends with the module: while Playwright's synchronous form is open, no other test may run an event loop."""
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium(), args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """An empty page; an error of its scripts fails the test."""
    page = browser.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.evaluate(FAKE_MODEL)
    yield page
    assert errors == []
    page.close()


def hydrate(page: Page, view: View) -> None:
    """The view as it is saved, then its script: `model`, `traits` and `stop` are the page's own names of its other side."""
    page.evaluate("html => { document.body.innerHTML = html; }", view._repr_mimebundle_()["text/html"])
    load(page, view)
    page.evaluate(_BEGIN, json.loads(json.dumps(_traits(view))))


def load(page: Page, view: View) -> None:
    """The view's script alone, as `view`."""
    page.add_style_tag(content=view._css)
    page.evaluate(_IMPORT, view._esm)


def _traits(view: View) -> dict[str, Any]:
    """What the page is told of the view, but for bytes and what is ipywidgets' own."""
    return {
        name: getattr(view, name)
        for name in view.trait_names(sync=True)
        if not name.startswith("_") and name not in ("layout", "tooltip", "tabbable", "frame", "comm")
    }
