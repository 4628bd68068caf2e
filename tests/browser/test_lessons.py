"""The lessons as a reader finds them: saved outputs, not run, not trusted."""

from __future__ import annotations

from tests.browser.lab import OUTPUTS, THEMES

SHOWN = {
    "window_table(scope.windows[1]": "equal: kept",
    "lucky =": "target's score",
    "grid =": "best alone",
    "ticket =": "cursor",
    "from power_lab import Samp": "exact",
    "lab.load": "times one row",
    "run = by_width": "in vain",
}
"""Beginning of a cell -> words that its output has."""


def test_figures_of_the_lesson_on_speculation_read_well_before_it_is_run(lab_page):
    lab_page.open("lessons/speculation.ipynb")
    for source, words in SHOWN.items():
        lab_page.show(source).filter(has_text=words).wait_for()
    for theme in THEMES:
        lab_page.theme(theme)
        assert lab_page.accessibility(OUTPUTS) == [], f"{theme.lower()} theme"
        lab_page.snap(f"speculation-{theme.lower()}")
