"""Every inspector in a real notebook with a real model: alive first, then as what the saved notebook keeps of it."""

from __future__ import annotations

import json
import re

import nbformat
import pytest
from nbformat.sign import NotebookNotary

from tests.browser.conftest import PICTURES
from tests.browser.lab import OUTPUT, OUTPUTS, THEMES, ran, visit

TEXT = "The fox runs into the forest. The forest is quiet. The dog walks along the river, past the old mill. " * 4
RUN = (
    f'text = """{TEXT}"""\nrun = lab.generate("Copy this text exactly: " + text, max_tokens=48, speculate="ngram", width=6,'
    ' controller="fixed", stream=False)\nrun'
)
SHOWN = {
    "lab.inspect.acceptance(run)": "tokens per pass",
    "lab.inspect.lens(run)": "target",
    "lab.inspect.timeline()": "steps",
    "lab.inspect.shapes()": "rows",
    "lab.inspect.prefixes(text)": "would be served",
    "lab.inspect.blocks()": "cached",
    "lab.watch()": "tokens",
}
"""Cell -> words that its output has."""


@pytest.fixture(scope="module")
def explored(lab_server, browser):
    """A page with all inspectors of one run, the notebook saved."""
    cells = ['lab.load("smollm2")', RUN, *SHOWN]
    with ran(browser, lab_server, PICTURES, "explored.ipynb", cells) as page:
        page.command("docmanager:save")
        yield page


@pytest.fixture(autouse=True)
def quiet(explored):
    """The page is shared: what one test did to it is that test's."""
    yield
    assert explored.errors == []


def alive(explored, source):
    """The output of a cell, once its script has found it."""
    output = explored.show(source)
    output.locator(".pl-detail, .pl-watching").first.wait_for(state="attached")
    return output


@pytest.mark.timeout(300)
def test_all_are_drawn_with_data_in_both_themes_and_axe_finds_nothing(explored):
    for source, words in SHOWN.items():
        alive(explored, source).filter(has_text=words).wait_for()
    for theme in THEMES:
        explored.theme(theme)
        assert explored.accessibility(OUTPUTS) == [], f"{theme.lower()} theme"
        explored.snap(f"explored-{theme.lower()}")


def test_sliders_of_the_acceptance_trace_ask_the_kernel_for_the_rounds_of_another_setting(explored):
    output = alive(explored, "lab.inspect.acceptance")
    output.locator(".pl-choices summary").click()
    slider, said = output.get_by_label("Most drafts a round"), output.locator(".pl-said")
    chart = ".pl-choices details > .pl-live + div"
    output.locator(f"{chart} > *").first.wait_for(state="attached")
    assert said.inner_text().startswith("Width 6:"), "the run's own"
    before = output.locator(chart).inner_html()
    slider.focus()
    explored.page.keyboard.press("Home")
    explored.page.wait_for_function(
        "([where, old]) => document.querySelector(where).innerHTML !== old", arg=[f"{OUTPUT} {chart}", before]
    )
    assert said.inner_text().startswith("Width 1:")
    output.get_by_label("Drafter").select_option(index=1)
    assert explored.accessibility(OUTPUT) == []


def test_the_lookup_box_says_where_a_pasted_prompt_stops_hitting(explored):
    output = alive(explored, "lab.inspect.prefixes")
    box = output.get_by_label("Where would this prompt hit?")
    box.fill("Copy this text exactly: " + TEXT[:300] + "And now for something else.")
    box.press("Control+Enter")
    found = output.get_by_role("group", name="Lookup")
    found.filter(has_text="something").wait_for()
    served = int(re.search(r"(\d+) of \d+ tokens would be served", found.inner_text()).group(1))
    assert served >= 64 and served % 64 == 0
    assert output.locator(".pl-stop").count() == 1
    box.fill("Entirely different words")
    output.get_by_role("button", name="Look up").click()
    found.filter(has_text="0 of").wait_for()


def test_a_live_timeline_keeps_the_range_that_was_zoomed_into(explored):
    output = alive(explored, "lab.inspect.timeline")
    lane, box = output.locator(".pl-lane img").first, output.locator(".pl-lanes")
    whole, mouse = lane.bounding_box(), explored.page.mouse
    explored.page.keyboard.down("Shift")
    mouse.move(whole["x"] + 0.2 * whole["width"], whole["y"] + 5)
    mouse.down()
    mouse.move(whole["x"] + 0.45 * whole["width"], whole["y"] + 5, steps=4)
    mouse.up()
    explored.page.keyboard.up("Shift")
    assert lane.bounding_box()["width"] == pytest.approx(4 * whole["width"], rel=0.02)
    # The page's first question, so that the content is put in place though the engine rests.
    before = box.evaluate("one => { one.dataset.old = true; return one.scrollLeft; }")
    output.get_by_role("button", name="Refresh").click()
    output.locator(".pl-lanes:not([data-old])").wait_for()
    assert lane.bounding_box()["width"] == pytest.approx(4 * whole["width"], rel=0.02)
    assert box.evaluate("one => one.scrollLeft") == pytest.approx(before, abs=2)
    output.get_by_role("button", name="Show all").click()
    assert lane.bounding_box()["width"] == pytest.approx(whole["width"], rel=0.02)


@pytest.mark.parametrize("source", ["lab.inspect.blocks", "lab.inspect.shapes", "lab.inspect.timeline"])
def test_a_view_of_the_engine_is_refreshed_by_its_button_and_by_itself(explored, source):
    output = alive(explored, source)
    status = output.locator(".pl-live .pl-status").first
    output.get_by_role("button", name="Refresh").click()
    status.filter(has_text=re.compile(r"Snapshot from \d")).wait_for()
    live = output.get_by_label("Live", exact=True)
    live.check()
    status.filter(has_text="Updated every second").wait_for()
    live.uncheck()
    explored.page.wait_for_timeout(100)
    assert explored.accessibility(OUTPUT) == []


def test_the_timeline_is_zoomed_and_exported_as_a_chrome_trace(explored):
    output = alive(explored, "lab.inspect.timeline")
    lanes = output.locator(".pl-lanes").first
    narrow = lanes.evaluate("box => box.scrollWidth")
    output.get_by_role("button", name="Zoom in").click()
    assert lanes.evaluate("box => box.scrollWidth") > 1.5 * narrow
    before, box = lanes.evaluate("box => box.scrollLeft"), lanes.bounding_box()
    explored.page.mouse.move(box["x"] + 300, box["y"] + 20)
    explored.page.mouse.down()
    explored.page.mouse.move(box["x"] + 250, box["y"] + 20, steps=4)
    explored.page.mouse.up()
    assert abs(lanes.evaluate("box => box.scrollLeft") - before - 50) <= 1, "panned by dragging"
    output.get_by_role("button", name="Show all").click()
    assert lanes.evaluate("box => box.scrollWidth") == narrow
    explored.page.keyboard.down("Shift")
    explored.page.mouse.move(box["x"] + 300, box["y"] + 20)
    explored.page.mouse.down()
    explored.page.mouse.move(box["x"] + 400, box["y"] + 20, steps=4)
    explored.snap("timeline-range")
    explored.page.mouse.up()
    explored.page.keyboard.up("Shift")
    assert lanes.evaluate("box => box.scrollWidth") > 3 * narrow, "zoomed into what was dragged over"
    assert explored.page.locator(".jp-Cell.jp-mod-multiSelected").count() == 0, "Shift marks no cells"
    explored.page.keyboard.press("Escape")
    assert lanes.evaluate("box => box.scrollWidth") == narrow
    with explored.page.expect_download() as saved:
        output.get_by_role("button", name="Chrome").first.click()
    assert json.loads(saved.value.path().read_text())["traceEvents"]


def test_the_lens_steps_to_the_next_position(explored):
    output = alive(explored, "lab.inspect.lens")
    before = output.locator(".pl-body").inner_text()
    output.locator(".pl-tools button", has_text="Position after").first.click()
    explored.page.wait_for_function(
        "([where, old]) => document.querySelector(where).innerText !== old", arg=[f"{OUTPUT} .pl-body", before]
    )


def test_rounds_are_walked_with_the_keyboard(explored):
    """Notebooks have uses of their own for Enter and the arrow keys."""
    output = alive(explored, "lab.inspect.acceptance")
    output.locator(".pl-head").click()  # as people do, which puts the notebook into its command mode
    output.locator(".pl-scroll").first.focus()
    keys, line = explored.page.keyboard, output.locator(".pl-detail")
    keys.press("Enter")
    first = line.inner_text()
    assert "position" in first
    for key in ("ArrowRight", "ArrowDown", "End"):
        before = line.inner_text()
        keys.press(key)
        assert line.inner_text() != before, key
    keys.press("Home")
    assert line.inner_text() == first
    keys.press("Escape")
    output.get_by_role("button", name="JSON").focus()
    with explored.page.expect_download():
        keys.press("Enter")


def test_a_token_that_is_pointed_at_tells_the_probability_that_target_and_draft_gave_it(explored):
    output = alive(explored, "lab.inspect.acceptance")
    line = output.locator(".pl-detail")
    known = re.compile(r"position \d+ .*probability [\d.]+% \(logprob -?[\d.]+\), beside “.*ngram drafted it")
    output.locator("tbody .pl-accepted").nth(1).hover()
    line.filter(has_text=known).wait_for()
    output.locator(".pl-scroll").first.focus()
    explored.page.keyboard.press("Enter")
    before = line.inner_text()
    explored.page.keyboard.press("ArrowDown")
    explored.page.wait_for_function(
        "([where, old]) => document.querySelector(where).innerText !== old && /probability/.test(document.querySelector(where).innerText)",
        arg=[f"{OUTPUT} .pl-detail", before],
    )
    assert explored.accessibility(OUTPUT) == []


def test_a_page_that_scrolls_below_a_resting_pointer_does_not_cancel_the_question_for_a_focused_token(explored):
    """Browsers send `pointerover` and `pointerleave` then too; on a slow machine they come after the key."""
    output = alive(explored, "lab.inspect.acceptance")
    output.locator(".pl-body").first.evaluate(
        """body => {
            const [pointed, focused, below] = [...body.querySelectorAll(".pl-t[data-at]:not([data-known])")].slice(-3);
            const over = item => item.dispatchEvent(
                new PointerEvent("pointerover", { bubbles: true, clientX: 5, clientY: 5 }));
            over(pointed);
            focused.tabIndex = -1;
            focused.focus();
            over(below);
            body.dispatchEvent(new PointerEvent("pointerleave"));
        }"""
    )
    output.locator(".pl-t:focus[data-known]").wait_for()
    output.locator(".pl-detail").filter(has_text="probability").wait_for()


def test_the_receipt_is_drawn_by_our_renderer(explored):
    output = explored.show("text =")
    output.locator(".jp-PowerLab-receipt").wait_for()
    assert explored.accessibility(f"{OUTPUT} .jp-PowerLab-receipt") == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize("trusted", [True, False], ids=["trusted", "untrusted"])
def test_a_saved_notebook_shows_every_static_view_without_a_kernel(explored, browser, trusted):
    """Of an untrusted one JupyterLab cleans the HTML; what is left must still be read, and no script of ours may run."""
    server = explored.server
    notebook = nbformat.read(server.root / "explored.ipynb", as_version=4)
    notebook.metadata["kernelspec"] = {"name": "nowhere", "display_name": "gone", "language": "python"}
    notebook.metadata["about"] = (
        f"trusted: {trusted}"  # other content, so that the signature of the original says nothing of it
    )
    name = "trusted.ipynb" if trusted else "untrusted.ipynb"
    if trusted:
        with NotebookNotary() as notary:
            notary.sign(notebook)
    nbformat.write(notebook, server.root / name)
    with visit(browser, server, PICTURES) as reader:
        page = reader.page
        page.goto(server.page(name))
        page.locator(".jp-Dialog").get_by_role("button", name="No Kernel").click()
        known = page.evaluate(
            "() => [...window.jupyterapp.shell.currentWidget.content.model.cells].map(cell => cell.trusted)"
        )
        assert set(known[1:]) == {trusted}
        for source, words in SHOWN.items():
            reader.show(source).filter(has_text=words).wait_for()
        reader.show("text =").locator(".jp-PowerLab-receipt, pre").first.wait_for()
        scripted = ".pl-detail, .pl-live, .pl-watching, canvas, script"
        assert page.locator(OUTPUTS).locator(scripted).count() == 0
        for theme in THEMES:
            reader.theme(theme)
            found = reader.accessibility(OUTPUTS)
            # The cleaner takes `tabindex` out; a box that scrolls takes Chromium's focus without it.
            found = [one for one in found if trusted or not one.startswith("scrollable-region-focusable")]
            assert found == [], f"{theme.lower()} theme"
            reader.snap(f"saved-{'trusted' if trusted else 'untrusted'}-{theme.lower()}")
