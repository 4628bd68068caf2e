"""Measured costs: medians by padded rows, a staircase up to the largest bucket and lines above, without the samples that compile."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from power_lab.engine.speculation.width.costs import AGE, DROPPED, KEPT, MeasuredCosts, RoundCosts


def measured(costs: MeasuredCosts, rows: int, *seconds: float) -> None:
    for each in (*(99.0,) * DROPPED, *seconds):
        costs.add_step(("shape", rows), rows, each)


def test_nothing_is_known_before_it_is_measured() -> None:
    costs = MeasuredCosts((1, 2, 4))
    assert (costs.step(1), costs.step(100), costs.draft("ngram", 1), costs.points()) == (None, None, None, {})
    assert costs.decision().value == "not measured yet"


def test_the_first_samples_of_a_shape_are_dropped() -> None:
    costs = MeasuredCosts((1, 2, 4))
    for _ in range(DROPPED):
        costs.add_step("greedy", 4, 50.0)
        costs.add_step("random", 4, 60.0)
    assert costs.step(4) is None
    costs.add_step("random", 4, 2.0)
    assert costs.step(4) == 2.0


def test_medians_are_of_the_latest_and_bear_outliers() -> None:
    costs = MeasuredCosts((1,))
    measured(costs, 1, *(1.0,) * KEPT, 1e6)
    assert costs.step(1) == 1.0
    measured(costs, 1, *(2.0,) * KEPT)
    assert costs.step(1) == 2.0


def test_padded_steps_are_a_staircase() -> None:
    costs = MeasuredCosts((1, 4, 8, 16))
    measured(costs, 1, 1.0)
    measured(costs, 8, 3.0)
    assert [costs.step(rows) for rows in (1, 2, 4, 5, 8, 9)] == [1.0, None, None, 3.0, 3.0, None]


def test_between_points_above_the_largest_bucket_is_a_line_and_outside_nothing() -> None:
    costs = MeasuredCosts((1, 4))
    measured(costs, 4, 2.0)
    measured(costs, 8, 4.0)
    assert [costs.step(rows) for rows in (3, 4, 5, 6, 8)] == [2.0, 2.0, 2.5, 3.0, 4.0]
    assert costs.step(9) is None


def test_steps_that_are_not_padded_are_lines_and_large_ones_share_points() -> None:
    costs = MeasuredCosts()
    measured(costs, 1, 1.0)
    measured(costs, 250, 3.0)
    assert costs.step(256) == costs.step(241) == 3.0
    assert costs.step(257) is None
    assert costs.step(128) == pytest.approx(1 + 2 * 127 / 255)


def test_calls_of_drafters_are_known_by_the_nearest_count() -> None:
    costs = MeasuredCosts()
    for requests, seconds in ((2, 1.0), (4, 2.0)):
        for each in (*(99.0,) * DROPPED, seconds):
            costs.add_draft("mtp", requests, 3, each)
    for width in (3, None):
        assert [costs.draft("mtp", requests, width) for requests in (1, 2, 3, 4, 9)] == [1.0, 1.0, 1.5, 2.0, 2.0]
        assert costs.draft("ngram", 2, width) is None
    assert "mtp 1000.000 for 2 x 3, mtp 2000.000 for 4 x 3" in costs.decision().reason


def test_calls_of_several_widths_are_a_line_and_outside_of_them_what_is_worth_trying() -> None:
    costs = MeasuredCosts()
    for width, seconds in ((7, 8.0), (3, 4.0)):
        for each in (*(99.0,) * DROPPED, seconds):
            costs.add_draft("mtp", 1, width, each)
    assert [costs.draft("mtp", 1, width) for width in (1, 2, 3, 5, 7, 15)] == pytest.approx([4 / 3, 8 / 3, 4, 6, 8, 8])
    assert costs.draft("mtp", 1, 4) == costs.draft("mtp", 1, 5), "measured together"
    assert costs.draft("mtp", 1, 1000) == 8
    for each in (*(99.0,) * DROPPED, 3.5):
        costs.add_draft("mtp", 1, 1, each)
    assert costs.draft("mtp", 1, 1) == 3.5, "a block costs the same"


@given(st.sets(st.integers(1, 300)), st.integers(1, 200), st.integers(0, 200), st.sampled_from([(), (1, 4, 8, 16, 64)]))
def test_a_staircase_is_its_steps(known: set[int], rows: int, count: int, buckets: tuple[int, ...]) -> None:
    costs = MeasuredCosts(buckets)
    for at in known:
        measured(costs, at, float(at))
    assert costs.staircase(rows, count) == [costs.step(at) for at in range(rows, rows + count)]


def test_shapes_without_end_take_no_memory_without_end() -> None:
    costs = MeasuredCosts()
    for shape in range(5000):
        costs.add_step(shape, 300, 1.0)
    assert costs.step(300) is None and len(costs._steps._warm) <= 1024


def test_old_samples_go_when_newer_ones_come() -> None:
    costs = MeasuredCosts((1, 2))
    measured(costs, 1, *(1.0,) * KEPT)
    measured(costs, 2, *(5.0,) * AGE)
    assert costs.step(1) == 1.0, "the last known is better than nothing"
    costs.add_step(("shape", 1), 1, 3.0)
    assert costs.step(1) == 3.0


def test_rounds_with_and_without_a_network_are_told_apart() -> None:
    costs = RoundCosts((1, 2, 4, 8, 16))
    for _ in range(DROPPED + 3):
        costs.add_step("plain", 1, 1.0, drafts=False, light=False)
        costs.add_step("network", 16, 3.0, drafts=True, light=False)
        costs.add_step("copies", 16, 2.0, drafts=True, light=True)
    assert (costs.heavy.step(1), costs.light.step(1)) == (1.0, 1.0)
    assert (costs.heavy.step(12), costs.light.step(12)) == (3.0, 2.0)
