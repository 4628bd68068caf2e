"""The first five minutes: the tour, opened and run in a browser."""

from __future__ import annotations

import pytest

from tests.browser.lab import OUTPUTS, THEMES

SHOWN = {
    "run = lab.generate": "exact",
    "lab.inspect.acceptance": "accept",
    "lab.inspect.blocks": "cached",
    "import os, signal": "cancelled",
    "lab.explain": "the model's own limit",
}
"""Beginning of a cell -> words that its output has."""


@pytest.mark.timeout(600)
def test_the_tour_runs_from_top_to_bottom(lab_page):
    lab_page.open("tour.ipynb")
    assert lab_page.state()["kernel"] == "power_lab"
    lab_page.run_all(timeout=500)
    cells = [cell for cell in lab_page.state()["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    failed = [output for cell in cells for output in cell["outputs"] if output["output_type"] == "error"]
    assert failed == []
    for source, words in SHOWN.items():
        lab_page.show(source).filter(has_text=words).wait_for()
    for theme in THEMES:
        lab_page.theme(theme)
        found = [one for one in lab_page.accessibility(OUTPUTS) if not one.startswith("empty-table-header")]  # pandas' tables
        assert found == [], f"{theme.lower()} theme"
        lab_page.snap(f"tour-{theme.lower()}")
