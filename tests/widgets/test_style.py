"""The style that outputs carry: small, enough for what they hold, and of no effect on others."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import sync_playwright

from power_lab.lessons import PoolWalk, SoftmaxWalk
from power_lab.run import Run
from power_lab.tuning.sweep import sweep
from power_lab.widgets.acceptance import Acceptance
from power_lab.widgets.blocks import Blocks
from power_lab.widgets.lens import Lens
from power_lab.widgets.prefixes import Prefixes
from power_lab.widgets.shapes import Shapes
from power_lab.widgets.style import framed, live_style
from power_lab.widgets.timeline import Timeline
from power_lab.widgets.watch import Watch
from tests.browser.lab import FLAGS, chromium
from tests.factories import block_states, run_record
from tests.tuning.fakes import FakeLab
from tests.widgets.films import attended, film
from tests.widgets.reports import forked, lookup_report, shape, shapes_report
from tests.widgets.test_lens import RUN, answer
from tests.widgets.test_watch import Source

CARRIED = 6_500
"""Bytes of style that a saved output may carry."""
SCRIPT = 24_000
"""Bytes of a view's script; a sweep's view, which opens traces of two kinds, has the most."""

# The look of every element, as the page computes it.
LOOKS = """root => [root, ...root.querySelectorAll(".pl-body, .pl-body *")].map(node => {
  const look = getComputedStyle(node);
  const told = [...look].filter(name => !name.startsWith("--")).map(name => `${name}:${look.getPropertyValue(name)}`);
  return `${node === root ? "root" : node.outerHTML.slice(0, 60)}: ${told.join(";")}`;
})"""


def prefixes():
    view = Prefixes(forked, lambda *_, **__: lookup_report())
    view.lookup("a prompt")
    return view


def swept():
    lab = FakeLab(broken=lambda config: config.kv_tokens == 4096)
    settings = {"width": [1, 3], "speculate": ["off", "ngram"], "kv_tokens": [8192, 4096]}
    return sweep(lab, "one", repeats=1, max_tokens=20, progress=False, base=lab.config, **settings)


VIEWS = {
    "acceptance": lambda: Acceptance(Run(run_record(16, logprobs=True))),
    "blocks": lambda: Blocks(block_states),
    "lens": lambda: Lens(answer, RUN),
    "pool walk": lambda: PoolWalk(film()),
    "prefixes": prefixes,
    "shapes": lambda: Shapes(lambda: shapes_report(shape(4), shape(8, eager=4, why={"tall": 3}, held=False))),
    "softmax walk": lambda: SoftmaxWalk(attended()),
    "sweep": lambda: swept().show(),
    "sweep front": lambda: swept().pareto(),
    "sweep heat map": lambda: swept().heatmap("width", "speculate"),
    "sweep parallel": lambda: swept().parallel(),
    "timeline": lambda: Timeline(run=Run(run_record(16))),
    "watch": lambda: Watch(Source()),
}


@pytest.fixture(params=VIEWS)
def view(request):
    made = VIEWS[request.param]()
    yield made
    made.close()


@pytest.fixture(scope="module")
def page():
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium(), args=FLAGS)
        yield browser.new_page()
        browser.close()


def style_of(html):
    return re.findall("<style>(.*?)</style>", html, re.DOTALL)


def test_an_output_carries_one_small_style_and_a_script_that_is_small(view):
    styles = style_of(view.to_html())
    assert len(styles) == 1
    assert 300 < len(styles[0].encode()) < CARRIED
    assert len(view._esm.encode()) < SCRIPT
    assert len(view._css.encode()) < 30_000
    assert style_of(view.body()) == []


def test_what_an_output_carries_is_all_that_its_content_needs(view, page):
    """It looks as under the whole sheet, which a live view has, in the light and in the dark."""
    html = view.to_html()
    body = html.partition("</style>")[2]
    for theme in ("true", "false"):
        page.set_content(f'<body data-jp-theme-light="{theme}">{html}</body>')
        alone = page.eval_on_selector(".power-lab", LOOKS)
        page.set_content(
            f'<body data-jp-theme-light="{theme}"><style>{live_style()}</style><div class="power-lab pl-on">{body}</body>'
        )
        whole = page.eval_on_selector(".power-lab", LOOKS)
        assert len(alone) > 5
        assert [one for one, other in zip(alone, whole, strict=True) if one != other] == []


def test_other_outputs_change_nothing(view, page):
    html = view.to_html()
    page.set_content(f'<body data-jp-theme-light="true">{html}</body>')
    alone = page.eval_on_selector(".power-lab", LOOKS)
    others = "".join(
        framed(f'<p class="{names}">x</p>') for names in ("pl-t", "pl-sample pl-t", "pl-rounds", "pl-c pl-used")
    )
    page.set_content(f'<body data-jp-theme-light="true">{html}{others}</body>')
    assert page.eval_on_selector(".power-lab", LOOKS) == alone


def test_one_style_for_equal_needs_and_no_colours_without_use():
    one, other = framed('<p class="pl-note">a</p>'), framed('<p class="pl-note">b</p>')
    assert style_of(one) == style_of(other)
    assert "--pl-accepted" not in one
    assert "--pl-accepted:" in framed('<p class="pl-accepted">a</p>')
    assert "--pl-next:" in framed('<p style="color:var(--pl-next)">a</p>')


def test_it_fits_a_narrow_place_as_saved_and_alive(view, page):
    """Nothing makes the page scroll to the side at 240 pixels; what is wider scrolls in a box of its own, which keys reach."""
    try:
        page.set_viewport_size({"width": 240, "height": 800})
        html = view.to_html()
        alive = f"<style>{live_style()}</style>" + html.replace('class="power-lab', 'class="power-lab pl-on', 1)
        for shown in (html, alive):
            page.set_content(f'<body data-jp-theme-light="true" style="margin:0">{shown}</body>')
            assert page.evaluate("document.documentElement.scrollWidth") <= 240
            boxes = page.evaluate(
                """() => [...document.querySelectorAll(".power-lab *")].filter(node => node.scrollWidth > node.clientWidth + 1
                  && ["auto", "scroll"].includes(getComputedStyle(node).overflowX) && node.tabIndex < 0).map(node => node.className)"""
            )
            assert boxes == [], "boxes that scroll and that no key reaches"
    finally:
        page.set_viewport_size({"width": 1280, "height": 720})
