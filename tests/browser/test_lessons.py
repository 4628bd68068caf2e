"""The lessons as a reader finds them: saved outputs, not run, not trusted."""

from __future__ import annotations

import pytest

from tests.browser.lab import OUTPUT, THEMES


@pytest.mark.timeout(300)
def test_figures_of_the_lesson_on_speculation_read_well_before_it_is_run(lab_page):
    lab_page.open("lessons/speculation.ipynb")
    for theme in THEMES:
        lab_page.theme(theme)
        for number, (source, words) in enumerate(
            [
                ("window_table(scope.windows[1]", "equal: kept"),
                ("lucky =", "target's score"),
                ("grid =", "best alone"),
                ("ticket =", "cursor"),
                ("from power_lab import Samp", "exact"),
                ("lab.load", "times one row"),
                ("run = by_width", "in vain"),
            ]
        ):
            output = lab_page.show(source)
            output.filter(has_text=words).wait_for()
            assert lab_page.accessibility(OUTPUT) == [], f"{source} in the {theme.lower()} theme"
            lab_page.snap(f"speculation-{number}-{theme.lower()}")
