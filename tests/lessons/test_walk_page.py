"""The lessons' walks in a real page: by keys alone from one step to the next, readable in the light and in the dark."""

from __future__ import annotations

import json

import pytest
from axe_playwright_python.sync_playwright import Axe

from power_lab.lessons import PoolWalk, SoftmaxWalk
from tests.pages import hydrate
from tests.widgets.films import attended, film

WALKS = {"pool": lambda: PoolWalk(film(), at=0), "softmax": lambda: SoftmaxWalk(attended(), at=0)}


@pytest.fixture(params=WALKS)
def walk(request, page, monkeypatch):
    view = WALKS[request.param]()
    hydrate(page, view)
    monkeypatch.setattr(
        view, "send", lambda content, buffers=None: page.evaluate(f"model.answer({json.dumps(content)})")
    )
    yield view
    view.close()


def press(page, walk, key):
    """A key on what has the focus; the kernel's side answers what the page then asks."""
    page.keyboard.press(key)
    walk._answer(walk, page.evaluate("model.sent.at(-1)"), None)


def test_it_is_walked_by_keys_and_the_focus_stays(page, walk):
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "« First"
    for _ in range(2):
        page.keyboard.press("Tab")
    focused = page.evaluate("document.activeElement.textContent")
    assert focused.startswith("Next ")
    before = page.inner_text(".pl-body")
    press(page, walk, "Enter")
    assert walk.at == 1
    assert page.inner_text(".pl-body") != before
    assert page.evaluate("document.activeElement.textContent") == focused
    press(page, walk, "Space")
    assert walk.at == 2
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline != "none", "who walks by keys must see where"


def test_axe_finds_nothing_in_either_theme(page, walk):
    for theme in ("true", "false"):
        page.evaluate(
            """light => { document.body.dataset.jpThemeLight = light;
              document.body.style.cssText = light === "true" ? "background:#fff;color:#212121" : "background:#111;color:#e0e0e0"; }""",
            theme,
        )
        found = Axe().run(page, context=".power-lab").response["violations"]
        assert [(one["id"], one["nodes"][0]["html"][:160]) for one in found] == [], f"light: {theme}"


def test_what_is_shown_stays_when_the_kernel_is_gone(page, walk):
    page.evaluate("model.dead = true")
    before = page.inner_text(".pl-body")
    button = page.locator(".pl-tools button", has_text="Next").first
    button.click()
    assert button.is_disabled()
    assert page.inner_text(".pl-body") == before
