"""A sweep in a real notebook with a real model: one click from a point to its trace, and Stop."""

from __future__ import annotations

import re

import pytest

from tests.browser.conftest import PICTURES
from tests.browser.lab import OUTPUT, OUTPUTS, THEMES, ran

SWEEP = (
    'found = lab.sweep("Say this again: one two three one two three one two three.", speculate=["off", "ngram"], width=[2, 6],'
    ' controller="fixed", max_tokens=24, repeats=1)\nfound'
)
LONG = 'long = lab.sweep("Tell a story.", width=[1, 2, 3], speculate="ngram", max_tokens=1500, ignore_eos=True, repeats=3)\nlong'
DRAWN = ("found.heatmap", "found.pareto", "found.parallel")


@pytest.fixture(scope="module")
def swept(lab_server, browser):
    """A page with a sweep and its pictures."""
    pictures = ['found.heatmap("width", "speculate")', "found.pareto()", "found.parallel()"]
    cells = ['lab.load("smollm2")', SWEEP, *pictures]
    with ran(browser, lab_server, PICTURES, "swept.ipynb", cells) as page:
        yield page


def alive(swept, source):
    output = swept.show(source)
    output.locator(".pl-detail").first.wait_for(state="attached")
    return output


def test_one_click_leads_from_a_points_number_to_its_trace(swept):
    output = alive(swept, "found = lab.sweep")
    output.get_by_role("button", name=re.compile("^Point 2: open")).click()
    trace = output.get_by_role("group", name="Trace of a point")
    trace.get_by_text(re.compile("^Point 2: .*ngram")).wait_for()
    trace.get_by_text("tokens per pass").first.wait_for()
    assert trace.locator("tbody .pl-accepted").count() > 0
    trace.get_by_role("button", name="Timeline").click()
    trace.locator(".pl-lanes").first.wait_for()
    for theme in THEMES:
        swept.theme(theme)
        assert swept.accessibility(OUTPUT) == [], f"{theme.lower()} theme"
        swept.snap(f"swept-trace-{theme.lower()}")
    trace.get_by_role("button", name="Close").click()
    trace.wait_for(state="hidden")


@pytest.mark.parametrize("source", DRAWN)
def test_one_click_leads_from_a_place_on_a_picture_to_its_trace(swept, source):
    output = alive(swept, source)
    output.locator("button.pl-spot").first.click(force=True)  # others may lie on it: the nearest is meant
    trace = output.get_by_role("group", name="Trace of a point")
    trace.get_by_text(re.compile(r"^Point \d: ")).wait_for()
    assert output.locator('button.pl-spot[aria-pressed="true"]').count() > 0


def test_axe_finds_nothing_on_the_whole_page(swept):
    for theme in THEMES:
        swept.theme(theme)
        assert swept.accessibility(OUTPUTS) == [], f"{theme.lower()} theme"
        swept.snap(f"swept-{theme.lower()}")


def test_stop_ends_a_sweep_and_what_is_finished_comes_back(swept):
    swept.command("notebook:move-cursor-down")
    swept.show("found.parallel")
    swept.begin(LONG)
    swept.page.locator('progress[max="12"][aria-label*="width 1"]').wait_for()  # it has loaded, and measures
    swept.command("notebook:interrupt-kernel")
    swept.wait_idle(60)
    output = swept.show("long = lab.sweep")
    output.filter(has_text="Stopped: interrupted").wait_for()
    output.filter(has_text=".resume()").wait_for()
    assert swept.accessibility(OUTPUT) == []
    assert (
        swept.run("lab.generate('Hello', max_tokens=4, stream=False).finish")[-1]["data"]["text/plain"] == "'length'"
    ), "the next call works"
