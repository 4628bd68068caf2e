"""Bokeh's figures: light paper, turned around while the page is dark."""

from __future__ import annotations

import colorsys
import io

import pytest
from bokeh.embed import file_html
from bokeh.models import Plot
from bokeh.resources import INLINE
from PIL import Image
from playwright.sync_api import sync_playwright

from power_lab.run import Run
from power_lab.widgets.timeline import Timeline
from tests.browser.lab import FLAGS, chromium
from tests.factories import run_record


@pytest.fixture
def figure():
    view = Timeline(run=Run(run_record(40)))
    yield view.explore()
    view.close()


def test_every_plot_of_a_layout_is_dressed(figure):
    plots = list(figure.select({"type": Plot}))
    assert len(plots) == 3
    assert all(plot.background_fill_color == "#ffffff" and plot.toolbar.logo is None for plot in plots)
    assert figure.css_classes == ["pl-figure"]


def test_it_follows_the_pages_theme_and_keeps_its_hues(figure):
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium(), args=FLAGS)
        page = browser.new_page()
        page.set_content(file_html(figure, INLINE))
        page.locator(".pl-figure canvas").first.wait_for()
        page.wait_for_timeout(300)
        seen = {}
        for theme in ("true", "false", "true"):
            page.evaluate("light => (document.body.dataset.jpThemeLight = light)", theme)
            seen[theme] = Image.open(io.BytesIO(page.locator(".pl-figure").screenshot())).convert("RGB")
        browser.close()
    light, dark = seen["true"], seen["false"]
    assert paper(light) > 240 > 40 > paper(dark)
    hue_of = [abs(a - b) % 1 for a, b in zip(main_hue(light), main_hue(dark), strict=True)]
    assert max(min(one, 1 - one) for one in hue_of) < 0.06


def paper(image):
    """Brightness of the colour that there is most of."""
    _, colour = max(image.getcolors(1 << 24))
    return sum(colour) / 3


def main_hue(image):
    """Hues of the two commonest strong colours."""
    strong = [
        (count, colour) for count, colour in image.getcolors(1 << 24) if max(colour) - min(colour) > 60 and count > 200
    ]
    top = sorted(strong, reverse=True)[:2]
    assert top
    return sorted(colorsys.rgb_to_hsv(*(one / 255 for one in colour))[0] for _, colour in top)
