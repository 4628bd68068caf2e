"""The script of the inspectors in a real page, with a model that the test plays."""

from __future__ import annotations

import json

import pytest
from playwright.sync_api import sync_playwright

from power_lab.run import Run
from power_lab.widgets.inspect import Inspect
from power_lab.widgets.view import View
from tests.browser.lab import FLAGS, chromium
from tests.factories import block_states, run_record

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
    fire: (name, value) => (handlers[name] ?? []).forEach((handler) => handler(value)),
    count: () => Object.values(handlers).flat().length,
  };
};
"""


class Lab:
    def blocks(self):
        return block_states()


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium(), args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser):
    page = browser.new_page()
    page.errors = []
    page.on("pageerror", lambda error: page.errors.append(str(error)))
    page.clock.install()
    page.evaluate(FAKE_MODEL)
    source = json.dumps(View._esm)
    page.evaluate(
        f"async () => {{ window.view = (await import(URL.createObjectURL(new Blob([{source}], {{type: 'text/javascript'}})))).default; }}"
    )
    yield page
    assert page.errors == []
    page.close()


@pytest.fixture
def inspect():
    views = Inspect(Lab())
    yield views
    views.close()


def hydrate(page, view):
    page.evaluate("html => { document.body.innerHTML = html; }", view._repr_mimebundle_()["text/html"])
    traits = json.dumps({"view_id": view.view_id, "refreshable": view.refreshable, "live": view.live})
    page.evaluate(f"() => {{ window.model = fake({traits}); window.stop = view.initialize({{ model }}); }}")


def test_details_follow_the_pointer_and_the_arrow_keys(page, inspect):
    run = Run(run_record(60, logprobs=True))
    hydrate(page, inspect.acceptance(run))
    page.hover("tbody .pl-accepted")
    assert "accepted · position" in page.inner_text(".pl-detail")
    assert "model" in page.inner_text(".pl-detail")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "pl-scroll"
    page.keyboard.press("Enter")
    assert "position 80" in page.inner_text(".pl-detail")
    page.keyboard.press("ArrowDown")
    assert "position 81" in page.inner_text(".pl-detail")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("End")
    assert page.locator(".pl-t").last.get_attribute("title") in page.inner_text(".pl-detail")
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.className") == "pl-scroll"


def test_a_view_that_appears_later_is_found_and_left_as_it_was(page, inspect):
    view = inspect.acceptance(Run(run_record(30)))
    hydrate(page, view)
    page.evaluate(
        "html => { document.body.innerHTML = ''; document.body.innerHTML = html; }",
        view._repr_mimebundle_()["text/html"],
    )
    page.clock.run_for(200)
    assert page.locator(".pl-detail").count() == 1
    page.evaluate("stop()")
    assert page.locator(".pl-detail").count() == 0
    assert page.evaluate("model.count()") == 0


def test_refresh_live_and_lost_kernels(page, inspect):
    hydrate(page, inspect.blocks())
    status = page.locator(".pl-status")
    assert status.inner_text() == "Snapshot from when the cell ran"
    page.click(".pl-live button")
    assert page.evaluate("model.sent") == [{"kind": "refresh"}]
    page.evaluate("model.fire('msg:custom', {kind: 'body', html: '<p>new</p>'})")
    assert page.inner_text(".pl-body") == "new"
    page.check(".pl-live input")
    page.clock.run_for(1100)
    page.evaluate("model.fire('msg:custom', {kind: 'body', html: '<p>newer</p>'})")
    assert status.inner_text() == "Updated every second"
    page.clock.run_for(5000)
    assert "No answer from the kernel" in status.inner_text()
    assert page.locator(".pl-stale").count() == 1
    waiting = page.evaluate("model.sent.length")
    page.clock.run_for(8000)
    assert page.evaluate("model.sent.length") == waiting  # a busy kernel does not collect questions
    page.clock.run_for(8000)
    assert page.evaluate("model.sent.length") == waiting + 1
    page.evaluate("model.fire('msg:custom', {kind: 'body', html: '<p>back</p>'})")
    assert page.locator(".pl-stale").count() == 0
    page.evaluate("model.fire('msg:custom', {kind: 'gone', message: 'The engine was closed.'})")
    assert "The engine is gone" in status.inner_text()
    assert not page.is_checked(".pl-live input")
    sent = page.evaluate("model.sent.length")
    page.clock.run_for(5000)
    assert page.evaluate("model.sent.length") == sent  # a gone engine is not asked again
    page.evaluate("model.dead = true")
    page.click(".pl-live button")
    assert "Disconnected" in status.inner_text()
    page.evaluate("stop()")
    assert page.locator(".pl-live").count() == 0
    assert page.evaluate("model.count()") == 0


def test_a_refresh_keeps_scroll_and_focus(page, inspect):
    view = inspect.blocks()
    hydrate(page, view)
    page.evaluate("document.querySelector('.pl-scroll').focus()")
    page.keyboard.press("Enter")
    page.keyboard.press("ArrowRight")
    before = page.evaluate("document.activeElement.title")
    page.evaluate("html => model.fire('msg:custom', {kind: 'body', html})", view.body())
    assert page.evaluate("document.activeElement.title") == before


def test_a_layout_asks_for_the_content(page, inspect):
    view = inspect.blocks()
    page.evaluate(
        "() => { window.model = fake({refreshable: true, live: false}); window.el = document.createElement('div'); }"
    )
    page.evaluate("() => { document.body.append(el); window.stop = view.render({ model, el }); }")
    assert page.evaluate("model.sent") == [{"kind": "refresh"}]
    page.evaluate("html => model.fire('msg:custom', {kind: 'body', html, style: '.power-lab{color:red}'})", view.body())
    assert page.locator(".pl-c").count() == 256
    assert page.locator(".pl-live").count() == 1
    page.evaluate("stop()")
    assert page.evaluate("model.count()") == 0
