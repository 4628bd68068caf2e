"""The Pareto front against its definition."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from power_lab.tuning.pareto import front

VALUE = st.one_of(st.integers(-3, 3).map(float), st.just(math.nan), st.sampled_from([math.inf, -math.inf]))


def beats(one, other):
    (gain, cost), (gain_2, cost_2) = one, other
    return gain >= gain_2 and cost <= cost_2 and (gain > gain_2 or cost < cost_2)


@given(st.lists(st.tuples(VALUE, VALUE), max_size=12))
@example([(1.0, 1.0), (1.0, 1.0), (1.0, 2.0), (2.0, 2.0)])
@example([(-math.inf, math.inf)])
def test_it_is_what_nothing_dominates(points):
    found = front([gain for gain, _ in points], [cost for _, cost in points])
    known = [point for point in points if not any(map(math.isnan, point))]
    wanted = {
        at
        for at, point in enumerate(points)
        if not any(map(math.isnan, point)) and not any(beats(other, point) for other in known)
    }
    assert set(found) == wanted
    assert len(found) == len(wanted)
    assert [points[at][1] for at in found] == sorted(points[at][1] for at in found)


def test_lists_must_fit():
    with pytest.raises(ValueError, match="zip"):
        front([1.0], [])
