"""The first five minutes: the tour, opened and run in a browser."""

from __future__ import annotations

import pytest

from tests.browser.lab import OUTPUT, THEMES


@pytest.mark.timeout(600)
def test_the_tour_runs_from_top_to_bottom(lab_page):
    lab_page.open("tour.ipynb")
    assert lab_page.state()["kernel"] == "power_lab"
    lab_page.run_all(timeout=500)
    cells = [cell for cell in lab_page.state()["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    failed = [output for cell in cells for output in cell["outputs"] if output["output_type"] == "error"]
    assert failed == []
    for theme in THEMES:
        lab_page.theme(theme)
        for source, words in [
            ("run = lab.generate", "exact"),
            ("lab.inspect.acceptance", "accept"),
            ("lab.inspect.blocks", "cached"),
            ("import os, signal", "cancelled"),
            ("lab.explain", "the model's own limit"),
        ]:
            output = lab_page.show(source)
            output.filter(has_text=words).wait_for()
            assert lab_page.accessibility(OUTPUT) == [], f"{source} in the {theme.lower()} theme"
            lab_page.snap(f"tour-{source.split()[0].strip('=').replace('.', '-')}-{theme.lower()}")
