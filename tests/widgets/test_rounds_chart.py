"""The chart of rounds draws what the rounds hold, and no more of them than it says."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from power_lab.run import Run
from power_lab.widgets.rounds_chart import MOST, rounds_chart
from tests.factories import run_record


def heights(svg: ElementTree.Element, hollow: bool) -> float:
    """Summed heights of the bars below or above the line."""
    return sum(float(bar.get("height", "")) for bar in svg.iter("rect") if (bar.get("fill") == "none") == hollow)


def test_bars_are_as_tall_as_what_was_emitted_and_wasted() -> None:
    record = run_record(60, seed=3)
    svg = ElementTree.fromstring(rounds_chart(record.rounds))
    wasted = sum(len(entry.rejected) for entry in record.rounds)
    assert len(svg.findall("g")) == len(record.rounds)
    assert heights(svg, hollow=False) / 60 == pytest.approx(heights(svg, hollow=True) / wasted)
    line = svg.find("line")
    assert line is not None
    for bar in svg.iter("rect"):
        below = float(bar.get("y", "")) >= float(line.get("y1", ""))
        assert below == (bar.get("fill") == "none")


def test_long_runs_say_what_is_not_drawn() -> None:
    chart = rounds_chart(run_record(MOST + 3, drafter="off").rounds)
    assert chart.count("<g>") == MOST
    assert "3 more rounds not drawn" in chart
    assert rounds_chart(()).count("<g>") == 0


def test_a_what_if_shows_its_rounds() -> None:
    shown = Run(run_record(30)).what_if(speculate="off")._repr_html_()
    assert shown.count("<g>") == 30
    assert "<table>" in shown
