"""The shape planner: its buckets are the best there are (against brute force), and it says what the present ones waste."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import combinations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from power_lab.engine.planner import PADDED_ROWS, BucketPlan, CostCurve, plan_buckets
from power_lab.engine.shapes import Coverage
from power_lab.errors import ConfigError

SIZES = 9  # brute force tries every subset of 1..SIZES

demands = st.dictionaries(st.integers(1, SIZES), st.integers(0, 50), min_size=1).filter(lambda d: any(d.values()))
coverages = st.sets(st.integers(1, SIZES + 3), min_size=1).map(lambda rows: Coverage(tuple(sorted(rows))))
curves = st.dictionaries(st.integers(1, SIZES), st.integers(0, 20).map(float), min_size=1).map(
    lambda points: CostCurve(tuple(sorted(points.items())))
)
rising = curves.map(lambda c: CostCurve(tuple((rows, 5.0 * i + cost / 4) for i, (rows, cost) in enumerate(c.points))))


def total(demand: Mapping[int, int], buckets: Iterable[int], cost: CostCurve) -> float:
    """By the definition: each step runs in the smallest bucket that holds it, or in its own size."""
    ordered = sorted(buckets)
    ran = ((next((b for b in ordered if b >= rows), rows), steps) for rows, steps in demand.items())
    return math.fsum(cost(bucket) * steps for bucket, steps in ran)


def brute_force(demand: Mapping[int, int], most: int, cost: CostCurve, budget: int) -> float:
    largest = max(budget, *(rows for rows, steps in demand.items() if steps))
    subsets = (set(c) for n in range(1, most + 1) for c in combinations(range(1, SIZES + 1), n) if max(c) >= largest)
    return min(total(demand, subset, cost) for subset in subsets)


@settings(deadline=None)
@given(demands, st.integers(1, 5), coverages, curves, st.sampled_from((0, SIZES)))
def test_no_other_buckets_are_cheaper(
    demand: dict[int, int], most: int, present: Coverage, cost: CostCurve, budget: int
) -> None:
    """Also for costs that fall with more rows somewhere, as measured ones do."""
    found = plan_buckets(demand, most, present, cost, budget=budget)
    assert len(found.buckets) <= most and found.buckets[-1] >= max(budget, *(r for r, n in demand.items() if n))
    assert found.cost == pytest.approx(brute_force(demand, most, cost, budget))
    assert found.cost == pytest.approx(total(demand, found.buckets, cost))
    assert found.present_cost == pytest.approx(total(demand, present.rows, cost))
    assert found.ideal_cost == pytest.approx(brute_force(demand, SIZES, cost, 0))


@settings(deadline=None)
@given(demands, st.integers(1, 5), coverages, rising)
def test_costs_stand_in_their_order(demand: dict[int, int], most: int, present: Coverage, cost: CostCurve) -> None:
    found = plan_buckets(demand, most, present, cost)
    own_size = math.fsum(cost(rows) * steps for rows, steps in demand.items())
    assert found.ideal_cost == pytest.approx(own_size)
    assert found.ideal_cost <= found.cost + 1e-9
    covered = present.most >= found.buckets[-1]
    if len(present.rows) <= most and covered:
        assert found.cost <= found.present_cost + 1e-9
    fewer = plan_buckets(demand, max(1, most - 1), present, cost)
    assert found.cost <= fewer.cost + 1e-9
    everything = plan_buckets(demand, SIZES, present, cost)
    assert everything.cost == pytest.approx(everything.ideal_cost)


@given(demands, st.integers(1, 5), coverages, curves)
def test_every_step_is_in_one_bucket_and_waste_is_what_it_costs_over_the_ideal(
    demand: dict[int, int], most: int, present: Coverage, cost: CostCurve
) -> None:
    found = plan_buckets(demand, most, present, cost)
    for uses, spent in ((found.uses, found.cost), (found.present_uses, found.present_cost)):
        assert sum(use.steps for use in uses) == found.steps == sum(demand.values())
        assert sum(use.real_rows for use in uses) == sum(rows * steps for rows, steps in demand.items())
        assert math.fsum(use.cost for use in uses) == pytest.approx(spent)
        assert math.fsum(use.waste for use in uses) == pytest.approx(spent - found.ideal_cost, abs=1e-6)
        assert all(use.padding_rows >= 0 and use.waste >= -1e-9 for use in uses)
        assert all(use.padding_rows == use.rows * use.steps - use.real_rows for use in uses if use.rows)
    assert all(use.rows for use in found.uses), "the planned buckets cover all"


def test_padded_rows_are_the_default_cost() -> None:
    found = plan_buckets({1: 100, 3: 10, 5: 10, 100: 1}, 3, Coverage((1, 2, 4, 8, 64)))
    assert found.unit == "rows" and found.buckets == (1, 5, 100)
    assert (found.cost, found.present_cost, found.ideal_cost) == (300, 320, 280)
    assert found.saved == pytest.approx(1 / 16)
    present = {use.rows: use for use in found.present_uses}
    assert (present[2].steps, present[4].padding_rows, present[8].waste) == (0, 10, 30)
    assert (present[0].steps, present[0].padding_rows, present[0].cost) == (1, 0, 100), "not covered: the dynamic path"
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=BucketPlan) == found


def test_a_measured_cost_may_choose_a_larger_bucket_than_any_step() -> None:
    """Where a tile is full, more rows can be cheaper."""
    cost = CostCurve(((1, 3.0), (8, 2.0), (16, 4.0)))
    assert plan_buckets({5: 10}, 2, Coverage.exact(16), cost).buckets == (8,)


@pytest.mark.parametrize(("rows", "expected"), [(1, 4.0), (2, 4.0), (3, 5.0), (4, 6.0), (6, 7.0), (8, 8.0), (12, 10.0)])
def test_costs_between_and_beyond_the_measured_points(rows: int, expected: float) -> None:
    assert CostCurve(((2, 4.0), (4, 6.0), (8, 8.0)))(rows) == expected


def test_a_cost_never_falls_beyond_what_was_measured() -> None:
    falling = CostCurve(((1, 4.0), (2, 2.0)))
    assert falling(2) == falling(1000) == 2.0
    assert CostCurve(((4, 1.5),))(1) == CostCurve(((4, 1.5),))(9) == 1.5
    assert [PADDED_ROWS(rows) for rows in (1, 2, 77)] == [1, 2, 77]


@pytest.mark.parametrize(
    ("key", "arguments"),
    [
        ("demand", ({}, 1)),
        ("demand", ({4: 0}, 1)),
        ("demand", ({0: 1}, 1)),
        ("demand", ({4: -1}, 1)),
        ("most", ({4: 1}, 0)),
    ],
)
def test_what_cannot_be_planned_is_named(key: str, arguments: tuple[dict[int, int], int]) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_buckets(*arguments, Coverage((8,)))
    assert caught.value.key == key


def test_a_budget_below_the_demand_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match="budget: 8 rows do not hold the demanded 9"):
        plan_buckets({9: 1}, 1, Coverage((8,)), budget=8)


@pytest.mark.parametrize("points", [(), ((0, 1.0),), ((2, 1.0), (2, 1.0)), ((1, math.nan),), ((1, -1.0),)])
def test_points_that_are_no_costs_are_refused(points: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        CostCurve(points)
    assert caught.value.key == "cost"
