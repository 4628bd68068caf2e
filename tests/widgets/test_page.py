"""The script of the inspectors in a real page, with a model that the test plays."""

from __future__ import annotations

import pytest
from axe_playwright_python.sync_playwright import Axe

from power_lab.run import Run
from power_lab.widgets.chances import HINT
from power_lab.widgets.inspect import Inspect
from power_lab.widgets.lens import Lens
from power_lab.widgets.timeline import Timeline
from tests.factories import block_states, run_record
from tests.pages import hydrate, load
from tests.widgets.test_lens import RUN, answer
from tests.widgets.test_timeline import step


class Lab:
    def blocks(self):
        return block_states()


@pytest.fixture
def page(page):
    page.clock.install()
    return page


@pytest.fixture
def inspect():
    views = Inspect(Lab())
    yield views
    views.close()


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
    status = page.locator(".pl-live .pl-status")
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
    load(page, view)
    page.evaluate(
        "() => { window.model = fake({refreshable: true, live: false}); window.el = document.createElement('div'); }"
    )
    page.evaluate("() => { document.body.append(el); window.stop = view.render({ model, el }); }")
    assert page.evaluate("model.sent") == [{"kind": "refresh"}]
    page.evaluate("html => model.fire('msg:custom', {kind: 'body', html})", view.body())
    assert page.locator(".pl-c").count() == 256
    assert page.locator(".pl-live").count() == 1
    page.evaluate("stop()")
    assert page.evaluate("model.count()") == 0


def test_files_are_saved_from_what_the_kernel_sends(page, inspect):
    hydrate(page, inspect.acceptance(Run(run_record(30))))
    page.get_by_role("button", name="SVG").click()
    assert page.evaluate("model.sent") == [{"kind": "export", "format": "svg"}]
    with page.expect_download() as saved:
        page.evaluate(
            "model.answer({kind: 'file', name: 'a.svg', mime: 'image/svg+xml'}, [new TextEncoder().encode('<svg/>')])"
        )
    assert saved.value.suggested_filename == "a.svg"
    assert saved.value.path().read_text() == "<svg/>"
    assert page.inner_text(".pl-tools .pl-status") == "Saved a.svg"
    page.evaluate("model.answer({kind: 'failed', message: 'no file'})")
    assert page.inner_text(".pl-tools .pl-status") == "no file"
    page.evaluate("model.dead = true")
    page.get_by_role("button", name="CSV").click()
    assert page.inner_text(".pl-tools .pl-status") == "Disconnected from the kernel"
    page.evaluate("stop()")
    assert page.locator(".pl-tools").count() == 0
    assert page.evaluate("model.count()") == 0


def test_sliders_answer_without_the_kernel(page, inspect):
    view = inspect.acceptance(Run(run_record(60)))
    hydrate(page, view)
    page.click(".pl-choices summary")
    said = page.locator("output")
    results = view.choices.results["ngram"]
    name, own = view.choices.own
    assert page.locator(".pl-choices select").input_value() == name
    assert page.locator("tr.pl-chosen td").first.inner_text() == str(own), "sliders begin at the run's own setting"
    page.select_option(".pl-choices select", "ngram")
    page.focus(".pl-choices input")
    for width, result in results.items():
        page.evaluate(
            "at => { const s = document.querySelector('.pl-choices input'); s.value = at; s.dispatchEvent(new Event('input')); }",
            list(results).index(width),
        )
        assert f"Width {width}: {result.target_passes} rounds" in said.inner_text()
        assert page.locator("tr.pl-chosen td").first.inner_text() == str(width)
    assert page.locator(".pl-choice table:visible").count() == 1
    page.keyboard.press("ArrowLeft")
    assert f"Width {list(results)[-2]}:" in said.inner_text()
    page.clock.run_for(200)
    assert page.evaluate("model.sent.at(-1)") == {"kind": "what-if", "drafter": "ngram", "width": list(results)[-2]}
    page.evaluate("model.answer({kind: 'part', html: '<p id=chart>chart</p>'})")
    assert page.inner_text("#chart") == "chart"
    page.evaluate("model.dead = true")
    page.keyboard.press("ArrowLeft")
    page.clock.run_for(200)
    assert f"Width {list(results)[-3]}:" in said.inner_text()
    page.evaluate("stop()")
    assert page.locator(".pl-choice table:visible").count() == len(view.choices.results)
    assert page.locator("input[type=range], .pl-chosen").count() == 0


def test_a_timeline_zooms_and_pans_by_keys_buttons_and_wheel(page, inspect):
    hydrate(page, inspect.timeline(Run(run_record(60))))
    wide = "document.querySelector('.pl-lane img').getBoundingClientRect().width"
    before = page.evaluate(wide)
    page.get_by_role("button", name="Zoom in").click()
    assert page.evaluate(wide) == pytest.approx(2 * before)
    page.focus(".pl-lanes")
    page.keyboard.press("+")
    assert page.evaluate(wide) == pytest.approx(4 * before)
    at = page.evaluate("document.querySelector('.pl-lanes').scrollLeft")
    assert at > 0  # the middle stays where it was
    page.keyboard.press("ArrowRight")
    page.wait_for_function("at => document.querySelector('.pl-lanes').scrollLeft > at", arg=at)
    page.keyboard.press("-")
    page.get_by_role("button", name="Show all").click()
    assert page.evaluate(wide) == pytest.approx(before)
    page.hover(".pl-lane img")
    page.keyboard.down("Control")
    page.mouse.wheel(0, -300)
    page.keyboard.up("Control")
    page.wait_for_function(f"{wide} > {1.5 * before}")
    page.focus(".pl-lanes")
    page.keyboard.press("0")
    assert page.evaluate(wide) == pytest.approx(before)


def test_a_timeline_is_panned_by_dragging(page, inspect):
    hydrate(page, inspect.timeline(Run(run_record(60))))
    left = "document.querySelector('.pl-lanes').scrollLeft"
    for _ in range(2):
        page.get_by_role("button", name="Zoom in").click()
    at, box = page.evaluate(left), page.locator(".pl-lanes").bounding_box()
    x, y = box["x"] + box["width"] / 2, page.locator(".pl-lane img").first.bounding_box()["y"] + 5
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + 2, y)
    assert page.evaluate(left) == at, "a click that trembles"
    page.mouse.move(x - 60, y, steps=3)
    assert page.evaluate(left) == pytest.approx(at + 60, abs=1)
    assert page.locator(".pl-panning").count() == 1
    page.mouse.move(x + 40, box["y"] + box["height"] + 30, steps=3)  # also where the pointer has left the box
    assert page.evaluate(left) == pytest.approx(at - 40, abs=1)
    page.mouse.up()
    assert page.locator(".pl-panning").count() == 0
    assert page.evaluate("getSelection().toString()") == ""
    page.mouse.move(x, y)
    assert page.evaluate(left) == pytest.approx(at - 40, abs=1), "it is let go"


def test_a_range_of_a_timeline_is_zoomed_into_and_left_again(page, inspect):
    hydrate(page, inspect.timeline(Run(run_record(60))))
    wide = "document.querySelector('.pl-lane img').getBoundingClientRect().width"
    left = "document.querySelector('.pl-lanes').scrollLeft"
    box, lane = page.locator(".pl-lanes").bounding_box(), page.locator(".pl-lane img").first.bounding_box()
    seen, begin = box["x"] + box["width"] - lane["x"], page.evaluate(wide)
    y = lane["y"] + 5

    def drag(low, high, *, release=True):
        """Over shares of what is seen of the lanes."""
        page.keyboard.down("Shift")
        page.mouse.move(lane["x"] + low * seen, y)
        page.mouse.down()
        page.mouse.move(lane["x"] + high * seen, y, steps=4)
        if release:
            page.mouse.up()
        page.keyboard.up("Shift")

    drag(0.5, 0.75)
    assert page.evaluate(wide) == pytest.approx(4 * begin, rel=0.01)
    assert page.evaluate(left) == pytest.approx(2 * seen, rel=0.01), "what was in the range fills the box"
    assert page.locator(".pl-range").count() == 0
    drag(0.5, 1.2)  # beyond the box's end: taken as its end
    assert page.evaluate(wide) == pytest.approx(8 * begin, rel=0.02)
    page.mouse.dblclick(lane["x"] + 0.5 * seen, y)
    drag(0.75, 0.5)  # backwards
    assert page.evaluate(wide) == pytest.approx(16 * begin, rel=0.02)
    page.keyboard.press("Escape")
    assert page.evaluate(wide) == pytest.approx(4 * begin, rel=0.01)
    assert page.evaluate(left) == pytest.approx(2 * seen, rel=0.01)
    drag(0.1, 0.3, release=False)
    assert page.locator(".pl-range").bounding_box()["width"] == pytest.approx(0.2 * seen, abs=2)
    page.keyboard.press("Escape")
    assert page.locator(".pl-range").count() == 0
    page.mouse.up()
    assert page.evaluate(wide) == pytest.approx(4 * begin, rel=0.01), "it was let go"
    drag(0.4, 0.402)
    assert page.evaluate(wide) == pytest.approx(4 * begin, rel=0.01), "a click that trembles"
    page.mouse.dblclick(lane["x"] + 0.5 * seen, y)
    assert page.evaluate(wide) == pytest.approx(begin)
    assert page.evaluate(left) == 0
    drag(0.2, 0.6)
    page.get_by_role("button", name="Show all").click()
    page.focus(".pl-lanes")
    page.evaluate("addEventListener('keydown', event => { window.heard = event.key; })")
    page.keyboard.press("Escape")
    assert page.evaluate("[heard, getSelection().toString()]") == ["Escape", ""], "nothing to go back to"
    assert page.evaluate(wide) == pytest.approx(begin)


def ring(count, since=0):
    """An engine's steps `since` to `count`, 10 ms each; the clock began long ago."""
    return tuple(step(at, 5000 + at * 0.01, 5000.009 + at * 0.01) for at in range(since, count))


@pytest.fixture
def engine(page):
    """A live timeline whose steps the test tells: `told(steps)` is what the kernel answers."""
    steps = [ring(100)]
    view = Timeline(lambda: steps[0], live=True)
    hydrate(page, view)

    def told(now):
        steps[0] = now
        page.evaluate("html => model.answer({kind: 'body', html})", view.renew())

    yield told
    view.close()


SEEN = """() => { const box = document.querySelector(".pl-lanes"), lane = box.querySelector("img").getBoundingClientRect();
  const labels = box.scrollLeft + lane.left - box.getBoundingClientRect().left;
  return [box.scrollLeft / lane.width, (box.scrollLeft + box.clientWidth - labels) / lane.width]; }"""
"""Shares of the lanes, from where to where they are seen."""


def drag_range(page, low, high, *, release=True):
    """With Shift, over shares of the lanes where all are seen."""
    lane = page.locator(".pl-lane img").first.bounding_box()
    page.keyboard.down("Shift")
    page.mouse.move(lane["x"] + low * lane["width"], lane["y"] + 5)
    page.mouse.down()
    page.mouse.move(lane["x"] + high * lane["width"], lane["y"] + 5, steps=3)
    if release:
        page.mouse.up()
    page.keyboard.up("Shift")


def test_a_live_timeline_keeps_the_range_while_steps_come_and_go(page, engine):
    assert page.evaluate(SEEN)[1] >= 1, "all of it fits beside the labels"
    drag_range(page, 0.5, 0.75)
    engine(ring(200))
    assert page.evaluate(SEEN) == pytest.approx([0.25, 0.375], abs=0.003), "the same steps, of twice as many"
    before = page.evaluate(SEEN)
    for count in range(201, 240):
        engine(ring(count))
    engine(ring(200))
    assert page.evaluate(SEEN) == pytest.approx(before, abs=0.001), "it does not drift"
    engine(ring(240, since=40))
    assert page.evaluate(SEEN) == pytest.approx([0.05, 0.175], abs=0.003), "the ring has forgotten what came first"
    page.focus(".pl-lanes")
    page.keyboard.press("Escape")
    assert page.evaluate(SEEN) == pytest.approx([0, 1], abs=0.003), "all of them, also those that came since"
    engine(ring(250, since=40))
    assert page.evaluate(SEEN) == pytest.approx([0, 1], abs=0.003)
    page.get_by_role("button", name="Zoom in").click()
    engine(ring(260, since=40))
    assert page.evaluate(SEEN)[1] < 0.8
    page.get_by_role("button", name="Show all").click()
    engine(ring(270, since=40))
    assert page.evaluate(SEEN) == pytest.approx([0, 1], abs=0.003)


def test_who_looks_at_the_end_of_a_live_timeline_sees_what_comes(page, engine):
    drag_range(page, 0.75, 1)
    engine(ring(200))
    assert page.evaluate(SEEN) == pytest.approx([0.875, 1], abs=0.003)
    engine((*ring(200), step(200, 5060, 5060.009)))  # a long pause is cut out of the axis
    low, high = page.evaluate(SEEN)
    assert high == pytest.approx(1, abs=0.003) and low < 1
    page.evaluate("document.querySelector('.pl-lanes').scrollLeft = 0")
    before = page.evaluate(SEEN)
    engine((*ring(200), step(200, 5060, 5060.009), step(201, 5060.01, 5060.019)))
    assert page.evaluate(SEEN)[0] == pytest.approx(before[0], abs=0.003), "who went away from it is left there"


def test_an_answer_waits_for_the_pointer_and_keeps_what_was_opened(page, engine):
    page.evaluate("() => { document.querySelector('details').open = true; }")
    drag_range(page, 0.2, 0.6, release=False)
    engine(ring(200))
    assert page.locator(".pl-range").count() == 1, "nothing is taken away below a drag"
    page.mouse.up()
    assert page.evaluate(SEEN) == pytest.approx([0.2, 0.6], abs=0.01)
    button = page.get_by_role("button", name="Zoom out")
    button.focus()
    engine(ring(201))
    assert page.evaluate(SEEN) == pytest.approx([0.1, 0.3], abs=0.01)
    assert page.evaluate("document.querySelector('details').open")
    assert page.evaluate("document.activeElement.title") == "Zoom out"
    assert button.evaluate("one => one.tabIndex") == 0
    sent = page.evaluate("model.sent.length")
    page.uncheck(".pl-live input")
    lane = page.locator(".pl-lane img").first.bounding_box()
    page.mouse.move(lane["x"] + 300, lane["y"] + 5)
    page.mouse.down()
    engine(ring(300))
    page.mouse.up()
    page.clock.run_for(1100)
    assert page.evaluate("model.sent.length") == sent + 1, "a snapshot that came meanwhile is asked for again"


def test_a_lens_walks_by_buttons_and_its_content_is_replaced(page):
    view = Lens(answer, RUN)
    hydrate(page, view)
    page.get_by_role("button", name="Position after").click()
    assert page.evaluate("model.sent") == [{"kind": "go", "to": "after"}]
    page.evaluate("html => model.answer({kind: 'body', html})", "<p>other place</p>")
    assert page.inner_text(".pl-body") == "other place"
    page.evaluate("model.dead = true")
    page.get_by_role("button", name="Position before").click()
    assert page.get_by_role("button", name="Position before").is_disabled()
    view.close()


def test_a_walk_that_takes_its_time_says_so_and_is_asked_once(page):
    view = Lens(answer, RUN)
    view.newest = False  # as in lessons, where a step leads on from the one before
    hydrate(page, view)
    after, status = page.get_by_role("button", name="Position after"), page.locator(".pl-tools .pl-status").first
    after.click()
    after.click()
    assert page.evaluate("model.sent.length") == 1
    assert status.inner_text() == ""  # most answers come at once
    page.clock.run_for(600)
    assert status.inner_text() == "Asked; no answer yet"
    page.evaluate("model.answer({kind: 'gone', message: 'More than 60 s. Look again.'})")
    assert status.inner_text() == "More than 60 s. Look again."
    assert page.locator(".pl-stale").count() == 1
    after.click()
    assert page.evaluate("model.sent.length") == 2
    page.evaluate("model.answer({kind: 'body', html: 'other place'})")
    assert (status.inner_text(), page.locator(".pl-stale").count()) == ("", 0)
    after.click()
    page.clock.run_for(16000)
    after.click()
    assert page.evaluate("model.sent.length") == 4, "a lost question does not lock the buttons for ever"
    view.close()


def test_clicks_on_a_lens_do_not_wait_for_each_other(page):
    view = Lens(answer, RUN)
    hydrate(page, view)
    after, status = page.get_by_role("button", name="Position after"), page.locator(".pl-tools .pl-status").first
    after.click()
    after.click()
    assert page.evaluate("model.sent.length") == 2
    page.clock.run_for(600)
    page.evaluate("model.answer({kind: 'stopped', asked: 'go'})")
    assert status.inner_text() == "Stopped; this is the last place"
    after.click()
    page.evaluate("model.answer({kind: 'body', html: 'other place'})")
    assert status.inner_text() == ""
    view.close()


def test_what_is_pointed_at_is_asked_for_once_and_late(page, inspect):
    record = run_record(60, seed=2)
    view = inspect.acceptance(Run(record))
    hydrate(page, view)
    token, refused = page.locator("tbody .pl-accepted").first, page.locator("tbody .pl-rejected[data-at]").first
    line, sent = page.locator(".pl-detail"), "model.sent"
    over = "(one, at) => one.dispatchEvent(new PointerEvent('pointerover', {bubbles: true, clientX: at}))"
    page.evaluate(
        f"(all) => all.forEach({over})", [token.element_handle(), refused.element_handle()]
    )  # with no time between
    page.clock.run_for(200)
    refused.hover()
    assert HINT.strip() in line.inner_text()
    at, other = int(refused.get_attribute("data-at")), int(token.get_attribute("data-at"))
    assert page.evaluate(sent) == [{"kind": "chance", "position": at, "rejected": True}]
    reply = {"kind": "chance", "position": at, "rejected": True, "title": "rejected · 3.0%", "known": True}
    page.evaluate("reply => model.answer(reply)", reply)
    assert "rejected · 3.0%" in line.inner_text() and refused.get_attribute("title") == "rejected · 3.0%"
    assert page.locator(f'.pl-t[data-at="{at}"]:not(.pl-rejected)').get_attribute("title") != "rejected · 3.0%"
    token.hover()
    page.clock.run_for(200)
    refused.hover()  # is known
    page.clock.run_for(200)
    assert [one["position"] for one in page.evaluate(sent)] == [at, other]
    page.evaluate("reply => model.answer(reply)", {**reply, "position": other, "rejected": False, "known": False})
    token.hover()  # was not known: it is asked for again
    page.clock.run_for(200)
    assert [one["position"] for one in page.evaluate(sent)] == [at, other, other]
    page.evaluate("model.dead = true")
    page.locator(".pl-scroll").first.focus()
    page.keyboard.press("Enter")
    page.keyboard.press("ArrowRight")
    page.clock.run_for(200)
    page.evaluate("stop()")
    assert page.evaluate("model.count()") == 0


@pytest.mark.parametrize("name", ["acceptance", "timeline", "empty", "lens"])
def test_accessible_to_axe(page, inspect, name):
    run = Run(run_record(60, logprobs=True))
    view = {
        "acceptance": lambda: inspect.acceptance(run),
        "timeline": lambda: inspect.timeline(run),
        "empty": lambda: inspect.acceptance(Run(run_record(10, drafter="off", params={"speculate": "off"}))),
        "lens": lambda: Lens(answer, RUN),
    }[name]()
    page.clock.resume()
    hydrate(page, view)
    page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    found = Axe().run(page, context=".power-lab").response["violations"]
    assert [(one["id"], one["nodes"][0]["html"][:120]) for one in found] == []
    view.close()
