"""The chart of rounds draws what the rounds hold, however many there are, as an image that untrusted pages keep."""

from __future__ import annotations

import re
from urllib.parse import unquote
from xml.etree import ElementTree

import msgspec
import pytest

from power_lab.engine.trace import Round
from power_lab.run import Run
from power_lab.widgets.rounds_chart import _LANE, MOST, course_chart, rounds_chart, rounds_svg
from tests.factories import run_record

SPACE = "{http://www.w3.org/2000/svg}"
BOX = re.compile(r"M(?P<x>[\d.]+) (?P<y>[\d.]+)h(?P<w>[\d.]+)v(?P<h>[\d.]+)h-[\d.]+z")


def boxes(svg: str, kind: str) -> list[tuple[float, float]]:
    """Top and height of the bars of one kind."""
    data = [path.get("d", "") for path in ElementTree.fromstring(svg).iter(f"{SPACE}path") if path.get("class") == kind]
    return [(float(box["y"]), float(box["h"])) for path in data for box in BOX.finditer(path)]


def test_bars_are_as_tall_as_what_was_emitted_and_wasted() -> None:
    record = run_record(60, seed=3)
    svg = rounds_svg(record.rounds)
    tall = {kind: boxes(svg, kind) for kind in ("accepted", "correction", "bonus", "plain", "rejected")}
    above = sum(height for kind, found in tall.items() if kind != "rejected" for _, height in found)
    below = sum(height for _, height in tall["rejected"])
    wasted = sum(len(entry.rejected) for entry in record.rounds)
    assert above / 60 == pytest.approx(below / wasted, rel=0.01)  # a tenth of a pixel is what is written
    assert len(tall["accepted"]) == sum(1 for entry in record.rounds if entry.accepted)
    line = max(
        top + height for _, found in tall.items() if found for top, height in found if found is not tall["rejected"]
    )
    assert all(top >= line - 0.2 for top, _ in tall["rejected"])


def parts(rounds: int) -> tuple[Round, ...]:
    """Rounds whose drafts are copied and guessed in turn."""
    found = run_record(rounds, seed=3).rounds
    names = ("copy", "mtp")
    return tuple(
        msgspec.structs.replace(entry, drafter=names[at % 2] if entry.drafted else "") for at, entry in enumerate(found)
    )


@pytest.mark.parametrize("tokens", [60, 3000])
def test_of_several_drafters_each_has_a_line_of_its_rounds(tokens: int) -> None:
    rounds = parts(tokens)
    svg = rounds_svg(rounds)
    marks = boxes(svg, "by")
    words = [text.text for text in ElementTree.fromstring(svg).iter(f"{SPACE}text")]
    assert "copy" in words and "mtp" in words
    whole = _LANE - 4  # px: of a bar whose rounds are all of one
    each = sum(height for _, height in marks) / whole * -(-len(rounds) // MOST)
    assert each == pytest.approx(sum(bool(entry.drafted) for entry in rounds), rel=0.02)
    one = rounds_svg(tuple(msgspec.structs.replace(entry, drafter="mtp") for entry in rounds))
    assert not boxes(one, "by"), "of one there is nothing to tell apart"


@pytest.mark.parametrize("rounds", [0, 1, MOST, MOST + 3, 5000])
def test_pictures_are_bounded_and_show_all(rounds: int) -> None:
    record = run_record(max(1, rounds), drafter="off")
    chart = course_chart(record.rounds[:rounds])
    assert len(chart) < 30_000
    assert f"{rounds:,} round" in chart
    assert ("Each bar is the mean" in chart) == (rounds > MOST)
    many = rounds_svg(run_record(6 * max(1, rounds)).rounds)
    assert len(many) < 40_000
    ElementTree.fromstring(many)


def test_the_image_holds_its_drawing_and_no_markup_of_the_page() -> None:
    record = run_record(40)
    chart = rounds_chart(record.rounds)
    source = re.search(r'src="data:image/svg\+xml,([^"]*)"', chart)
    assert source is not None
    assert "<" not in source[1]
    assert "#" not in source[1]
    assert unquote(source[1].replace("&amp;", "&")) == rounds_svg(record.rounds, course=False)


def test_a_what_if_shows_its_rounds() -> None:
    shown = Run(run_record(30)).what_if(speculate="off")._repr_html_()
    assert "30 rounds as bars" in shown
    assert "<table>" in shown
