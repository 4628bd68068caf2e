"""Views of a sweep in a real page: from a point to its trace by pointer and by keys, and what a lost kernel says."""

from __future__ import annotations

import pytest
from axe_playwright_python.sync_playwright import Axe
from ipywidgets.widgets.widget import _instances

from power_lab.errors import ConfigError
from power_lab.tuning.sweep import sweep
from tests.pages import hydrate
from tests.tuning.fakes import FakeLab
from tests.widgets.answers import asked
from tests.widgets.test_page import SEEN, drag_range

SHOWN = {
    "table": lambda found: found.show(),
    "front": lambda found: found.pareto(),
    "heat": lambda found: found.heatmap("width", "speculate"),
    "parallel": lambda found: found.parallel(),
}


def grid(**changes):
    lab = FakeLab(broken=lambda config: config.kv_tokens == 4096, **changes)
    settings = {"width": [1, 3, 7], "speculate": ["off", "ngram"], "kv_tokens": [8192, 4096]}
    return sweep(lab, ["one", "two"], repeats=1, max_tokens=30, progress=False, base=lab.config, **settings)


@pytest.fixture(params=SHOWN)
def view(request):
    made = SHOWN[request.param](grid())
    yield made
    made.close()


def play(page, view, monkeypatch):
    """Let the kernel's side answer what the page has sent last."""
    answers = []
    monkeypatch.setattr(view, "send", lambda content, buffers=None: answers.append(content))
    asked(view, page.evaluate("model.sent.at(-1)"))
    page.evaluate("answer => model.answer(answer)", answers[-1])
    return answers[-1]


def test_one_click_from_a_point_to_its_trace(page, view, monkeypatch):
    hydrate(page, view)
    name = "button.pl-open" if page.locator("button.pl-open").count() else "button.pl-spot"
    opener = page.locator(name).nth(1)
    if name == "button.pl-spot":
        opener.press("Enter")
    else:
        opener.click()
    assert page.evaluate("model.sent.at(-1).kind") == "trace"
    answer = play(page, view, monkeypatch)
    point = view.sweep.point(answer["point"])
    panel = page.locator(".pl-trace")
    assert view.sweep.plan.told(point.trial) in panel.locator("> .pl-title").inner_text()
    assert "tokens" in panel.inner_text()
    panel.get_by_text("Timeline", exact=True).click()
    assert page.evaluate("model.sent.at(-1).what") == "timeline"
    play(page, view, monkeypatch)
    assert panel.locator(".pl-lanes").count() == 1
    drag_range(page, 0.25, 0.75)
    assert page.evaluate(SEEN) == pytest.approx([0.25, 0.75], abs=0.02)
    panel.get_by_text("Prompt 1", exact=True).click()
    assert page.evaluate("model.sent.at(-1).prompt") == 1
    play(page, view, monkeypatch)
    assert page.evaluate(SEEN)[1] >= 1, "other lanes are shown whole"
    found = Axe().run(page, context=".power-lab").response["violations"]
    assert [(one["id"], one["nodes"][0]["html"][:120]) for one in found] == []
    panel.get_by_text("Close", exact=True).click()
    assert panel.is_hidden()
    assert page.evaluate(f"document.activeElement === document.querySelectorAll('{name}')[1]")


def test_arrow_keys_walk_over_a_picture(page):
    view = grid().parallel()
    hydrate(page, view)
    page.locator("button.pl-spot").first.focus()
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement === document.querySelectorAll('.pl-spot')[1]")
    assert page.locator(".pl-detail").inner_text().startswith("point ")
    page.keyboard.press("Enter")
    assert page.evaluate("model.sent.at(-1).kind") == "trace"
    view.close()


def test_a_pointer_means_the_nearest_point_where_places_lie_on_each_other(page):
    view = grid().parallel()
    hydrate(page, view)
    page.evaluate("""() => {
      window.spots = [...document.querySelectorAll('.pl-spot')];
      spots.forEach((spot, at) => Object.assign(spot.style, {left: '50%', top: `calc(50% + ${3 * at}px)`}));
    }""")
    for at in (0, 2):
        page.evaluate(
            """at => {
          const box = spots[at].getBoundingClientRect();
          const where = {clientX: box.left + box.width / 2, clientY: box.top + box.height / 2, detail: 1, bubbles: true};
          spots.at(-1).dispatchEvent(new MouseEvent('click', where));
        }""",
            at,
        )
        assert page.evaluate("model.sent.at(-1).point") == int(page.evaluate("at => spots[at].dataset.point", at))
    view.close()


def test_a_point_without_measurement_has_no_button_but_its_reason(page):
    view = grid().show()
    hydrate(page, view)
    assert page.locator("button.pl-open").count() == sum(point.measured for point in view.sweep.points)
    assert "needs 9 blocks, 8 are there" in page.locator("td.pl-reason").first.inner_text()
    view.close()


def test_a_lost_kernel_says_so_and_everything_is_left_as_it_was(page):
    view = grid().show()
    hydrate(page, view)
    page.evaluate("model.dead = true")
    page.locator("button.pl-open").first.click()
    assert "Disconnected from the kernel" in page.locator(".pl-trace").inner_text()
    page.evaluate("stop()")
    assert page.locator("button.pl-open, .pl-trace").count() == 0
    assert page.locator("td.pl-number").first.inner_text()
    assert page.evaluate("model.count()") == 0
    view.close()


def test_a_click_in_a_bokeh_plot_opens_the_trace_in_one_view(page):
    view = grid().pareto()
    hydrate(page, view)
    tell = "sweep => document.dispatchEvent(new CustomEvent('power-lab-point', {cancelable: true, detail: {sweep, point: 1}}))"
    assert page.evaluate(tell, "another sweep") is True
    assert page.evaluate("model.sent.length") == 0
    assert page.evaluate(tell, view.sweep_id) is False, "it is taken, so that no other view opens one too"
    assert page.evaluate("model.sent.at(-1).point") == 1
    view.close()


def test_questions_of_a_page_are_not_trusted(monkeypatch):
    view = grid().show()
    answers = []
    monkeypatch.setattr(view, "send", lambda content, buffers=None: answers.append(content))
    for question in ({"point": 99}, {"point": "1"}, {"point": 0, "prompt": 7}, {"point": 0, "what": "rm"}, {}):
        asked(view, {"kind": "trace", "what": "acceptance", **question})
        assert answers[-1]["failed"]
    view.close()


def test_a_trace_opens_no_widget_of_its_own(monkeypatch):
    view = grid().show()
    before = set(_instances)
    monkeypatch.setattr(view, "send", lambda content, buffers=None: None)
    made = []
    monkeypatch.setattr("ipywidgets.Widget.open", lambda self: made.append(self))
    for what in ("acceptance", "timeline"):
        asked(view, {"kind": "trace", "what": what, "point": 1})
    assert not made and set(_instances) == before
    view.close()


def test_a_difference_is_a_band_in_every_view():
    lab = FakeLab(other_output=lambda config, params: params.width == 3)
    found = sweep(
        lab, "a", repeats=1, max_tokens=30, progress=False, base=lab.config, width=[1, 3], speculate=["off", "ngram"]
    )
    for name, show in SHOWN.items():
        view = show(found)
        assert "pl-broken" in view.to_html(), name
        view.close()


def test_pictures_and_plots_of_what_was_not_measured_are_words():
    lab = FakeLab(broken=lambda config: True)
    found = sweep(lab, "a", repeats=1, progress=False, base=lab.config, width=[1, 3], speculate=["off", "ngram"])
    for name, show in SHOWN.items():
        view = show(found)
        html = view.to_html()
        assert "needs 9 blocks" in html or "No point" in html, name
        view.close()


def test_heat_maps_name_what_they_cannot_show():
    found = grid()
    for arguments, options, key in (
        (("width", "width"), {}, "y"),
        (("width", "cache"), {}, "cache"),
        (("width", "speculate", "speed"), {}, "speed"),
        (("width", "speculate"), {"kv_tokens": 7}, "kv_tokens"),
    ):
        with pytest.raises(ConfigError) as caught:
            found.heatmap(*arguments, **options)
        assert caught.value.key == key


def test_bokeh_draws_the_same_points():
    found = grid()
    views = [found.pareto(), found.heatmap("width", "speculate"), found.parallel()]
    for view in views:
        plot = view.explore()
        sources = [one.data_source for one in plot.renderers if "point" in getattr(one.data_source, "data", {})]
        numbers = {number for source in sources for number in source.data["point"]}
        assert numbers == {point.number for point in found.points if point.measured}
        view.close()
