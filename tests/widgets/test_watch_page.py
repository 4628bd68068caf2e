"""The dashboard's script and the lookup box in a real page, with a model that the test plays."""

from __future__ import annotations

import time

import pytest

from power_lab.widgets.inspect import Inspect
from power_lab.widgets.prefixes import Prefixes
from power_lab.widgets.watch import Watch
from tests.pages import hydrate
from tests.widgets import answers
from tests.widgets.reports import vitals
from tests.widgets.test_prefixes import Engine, forked
from tests.widgets.test_watch import Source, on_a_gpu

FRAMES = """(rows) => { for (const row of rows) {
    traits.frame = new DataView(new Float64Array(row.map((x) => x ?? NaN)).buffer); model.fire('change:frame'); } }"""


@pytest.fixture
def watch():
    view = Watch(Source())
    yield view
    view.close()


def rows(view, count):
    made = []
    for at in range(count):
        sample = vitals(at, at=2000.0 + at / 10, tokens=100 + 4 * at, running=3)
        made.append([None if x != x else float(x) for x in view.history.add(sample, sample.engines[0])])
    return made


def test_numbers_and_lines_follow_the_samples(page, watch):
    hydrate(page, watch)
    assert page.evaluate("model.sent[0].kind") == "watch"
    assert page.evaluate("model.sent[0].on") is True
    page.evaluate(FRAMES, rows(watch, 40))
    page.wait_for_selector("canvas")
    page.wait_for_function("document.querySelector('[data-field=tokens_per_s] b').textContent === '40.0'")
    assert page.inner_text("[data-field=running] b") == "3"
    assert page.inner_text(".pl-status") == "Live"
    inked = "c => [...c.getContext('2d').getImageData(0, 0, c.width, c.height - 2).data].some(Boolean)"
    assert page.eval_on_selector("[data-field=tokens_per_s] canvas", inked)


def test_an_engine_on_another_device_gets_its_tiles(page, watch):
    """The page was made for a CPU; the engine is loaded again where temperature and power can be read."""
    hydrate(page, watch)
    page.evaluate(FRAMES, rows(watch, 2))
    page.wait_for_selector("canvas")
    assert page.locator("[data-field=temperature_c]").count() == 0
    assert page.evaluate("model.sent.filter(one => one.kind === 'refresh').length") == 0
    told = on_a_gpu(0)
    watch._source.on_vitals(told)
    page.evaluate("facts => { traits.facts = facts; model.fire('change:facts'); }", watch.facts)
    frame = [None if x != x else float(x) for x in watch.history.table[-1]]
    page.evaluate(FRAMES, [frame])
    page.wait_for_function("model.sent.some(one => one.kind === 'refresh')")
    page.evaluate(FRAMES, [frame])
    page.evaluate("html => model.answer({ kind: 'body', html }, [])", watch.renew())
    page.wait_for_selector("[data-field=temperature_c] canvas")
    assert page.inner_text("[data-field=power_w] b") == "120 W"
    assert page.evaluate("model.sent.filter(one => one.kind === 'refresh').length") == 1


def test_silence_is_told_within_two_seconds(page, watch):
    hydrate(page, watch)
    page.evaluate(FRAMES, rows(watch, 3))
    began = time.monotonic()
    page.wait_for_function("document.querySelector('.pl-status').textContent.startsWith('Disconnected')", timeout=4000)
    assert time.monotonic() - began < 3
    assert page.locator(".pl-stale").count() == 1
    page.evaluate(FRAMES, rows(watch, 1))
    assert page.inner_text(".pl-status") == "Live"
    page.evaluate(
        "() => { traits.facts = {...traits.facts, state: 'ended', message: 'Gone.'}; model.fire('change:facts'); }"
    )
    assert page.inner_text(".pl-status") == "Disconnected. Gone."
    page.evaluate(
        "() => { traits.facts = {state: 'none', message: 'No engine is running.'}; model.fire('change:facts'); }"
    )
    status = page.inner_text(".pl-status")
    assert status == "Disconnected; these are the last numbers. No engine is running.", "the kernel has asked again"
    assert page.locator(".pl-body.pl-stale").count() == 1


def test_hidden_it_draws_nothing_and_asks_for_nothing(page, watch):
    hydrate(page, watch)
    page.evaluate(FRAMES, rows(watch, 3))
    page.evaluate("() => { document.querySelector('.power-lab').style.marginTop = '5000px'; }")
    page.wait_for_function("model.sent.at(-1).on === false")
    assert page.inner_text(".pl-status") == "Paused while hidden"
    page.evaluate("() => { document.querySelector('.power-lab').style.marginTop = '0'; }")
    page.wait_for_function("model.sent.at(-1).on === true")
    page.evaluate("stop()")
    assert page.evaluate("model.sent.at(-1).on") is False
    assert page.evaluate("model.count()") == 0
    assert page.locator(".pl-watching").count() == 0


def test_the_lookup_box_asks_and_shows(page):
    engine = Engine(forked())
    inspect = Inspect(engine)
    view = inspect.prefixes()
    hydrate(page, view)
    page.fill("textarea", "Hello")
    page.keyboard.press("Control+Enter")
    asked = page.evaluate("model.sent.at(-1)")
    assert asked == {"kind": "lookup", "prompt": "Hello", "cache_key": "", "chat": None}
    sent = []
    view.send = sent.append
    answers.asked(view, asked)
    page.evaluate("message => model.fire('msg:custom', message)", sent[-1])
    assert "stops here" in page.inner_text(".pl-strip")
    assert page.input_value("textarea") == "Hello"
    page.evaluate("model.fire('msg:custom', {kind: 'looked', html: '', message: 'Too long.'})")
    assert page.inner_text("form output") == "Too long."
    page.evaluate("model.dead = true")
    page.click("form button")
    assert "Disconnected" in page.inner_text("form output")
    page.evaluate("stop()")
    assert page.locator("form").count() == 0
    assert isinstance(view, Prefixes)
    inspect.close()


def test_the_lookup_box_says_what_python_looked_up_and_never_takes_what_is_typed(page):
    inspect = Inspect(Engine(forked()))
    hydrate(page, inspect.prefixes("Once upon a time", chat=False, cache_key="tales"))
    assert page.input_value("textarea") == "Once upon a time"
    assert page.input_value("form input[type=text]") == "tales"
    assert page.is_checked("form input[type=checkbox]")
    other = "() => { traits.box = {prompt: 'Another', cache_key: '', raw: false}; model.fire('change:box'); }"
    page.evaluate("() => { traits.box = {prompt: '', note: '3 token ids'}; model.fire('change:box'); }")
    assert page.get_attribute("textarea", "placeholder").startswith("Below: 3 token ids, looked up in Python.")
    page.evaluate(other)
    assert page.input_value("textarea") == "Another"
    page.fill("textarea", "My own")
    page.evaluate(other)
    assert page.input_value("textarea") == "My own"
    page.evaluate("stop()")
    inspect.close()
