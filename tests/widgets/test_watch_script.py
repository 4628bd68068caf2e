"""The dashboard's script in a real page: what it says while there is nothing to watch, and after."""

from __future__ import annotations

import pytest
from axe_playwright_python.sync_playwright import Axe

from power_lab.widgets.watch import Watch
from tests.pages import hydrate
from tests.widgets.test_watch import Source


def show(page, view):
    hydrate(page, view)
    view.close()


def tell(page, **facts):
    page.evaluate("facts => { traits.facts = facts; model.fire('change:facts'); }", facts)


def test_what_is_missing_is_said_once(page):
    show(page, Watch(Source(there=False)))
    page.get_by_text("Looking for one every two seconds").wait_for()
    words = page.inner_text(".power-lab")
    assert words.count("No engine is running") == 1
    assert words.count("No engine to watch") == 1
    tell(page, state="none", message="The host has no engine.")
    assert page.inner_text(".power-lab").count("The host has no engine.") == 1
    assert "No engine is running" not in page.inner_text(".power-lab")
    found = Axe().run(page, context=".power-lab").response["violations"]
    assert [(one["id"], one["nodes"][0]["html"][:160]) for one in found] == []
    page.evaluate("stop()")


def test_numbers_of_an_engine_that_has_gone_are_said_to_be_old(page):
    show(page, Watch(Source()))
    tell(page, state="none", message="The host has no engine.")
    page.get_by_text("Disconnected; these are the last numbers.").wait_for()
    assert page.locator(".pl-stale").count() == 1
    page.evaluate("stop()")


@pytest.mark.parametrize("width", [240, 320])
def test_it_fits_a_narrow_place(page, width):
    page.set_viewport_size({"width": width, "height": 700})
    show(page, Watch(Source()))
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "it would have to be scrolled sideways"
    page.evaluate("stop()")


def test_no_line_is_drawn_over_a_pause(page):
    """Samples of two seconds, none for a minute, samples of two seconds: two lines and nothing between them."""
    view = Watch(Source())
    show(page, view)
    drawn = page.evaluate(
        """async () => {
          const pen = CanvasRenderingContext2D.prototype, moved = [], move = pen.moveTo, line = pen.lineTo;
          pen.moveTo = function (x, y) { moved.push("M"); move.call(this, x, y); };
          pen.lineTo = function (x, y) { moved.push("L"); line.call(this, x, y); };
          const rows = [0, 1, 2, 62, 63, 64].map((at) => traits.fields.map((_, i) => (i ? 5 : at)));
          model.answer({ kind: "history" }, [new DataView(Float64Array.from(rows.flat()).buffer)]);
          await new Promise((done) => setTimeout(done, 300));
          Object.assign(pen, { moveTo: move, lineTo: line });
          return moved.join("");
        }"""
    )
    assert drawn.startswith("MLLMLL")
    page.evaluate("stop()")
