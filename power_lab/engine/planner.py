"""The shape planner: which row buckets would serve a recorded demand best, and what the present ones waste."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import msgspec
import numpy as np

from power_lab.engine.shapes import Coverage
from power_lab.errors import ConfigError


@dataclass(frozen=True, slots=True)
class CostCurve:
    """What a step costs by its rows, padding included: straight lines between measured points.

    Below the first point a step costs as much as there: few rows are bound by the weights that are read. Above the last one the last
    line goes on, but never falls.

    Attributes:
        points: (rows, cost), rows ascending and at least 1, costs finite and not negative.
        unit: of the costs.

    Raises ConfigError for other points.
    """

    points: tuple[tuple[int, float], ...]
    unit: str = "s"

    def __post_init__(self) -> None:
        ascending = all(low < high for low, high in pairwise((0, *(rows for rows, _ in self.points))))
        if not self.points or not ascending:
            raise ConfigError("cost", "points must have ascending rows of at least 1", "Measure at least one step.")
        for rows, cost in self.points:
            if not (math.isfinite(cost) and cost >= 0):
                raise ConfigError("cost", f"{cost} {self.unit} at {rows} rows is no cost")

    def __call__(self, rows: int) -> float:
        at = bisect_left(self.points, rows, key=lambda point: point[0])
        if at == 0 or len(self.points) == 1:
            return self.points[0][1]
        (low, cheap), (high, dear) = self.points[min(at, len(self.points) - 1) - 1 :][:2]
        slope = (dear - cheap) / (high - low)
        return cheap + slope * (rows - low) if rows <= high else dear + max(slope, 0.0) * (rows - high)


PADDED_ROWS = CostCurve(((1, 1.0), (2, 2.0)), "rows")
"""Every computed row costs the same: a fair guess for prompts, too dear for the padding of a few decode rows."""


class BucketUse(msgspec.Struct, frozen=True, kw_only=True):
    """What one bucket does for a demand.

    Attributes:
        rows: of the bucket; 0 for the steps that no bucket covers, which run in their own size.
        steps, real_rows, padding_rows: that it serves.
        cost: of its steps; waste: how much less they would cost at the cheapest size that holds them.
    """

    rows: int
    steps: int
    real_rows: int
    padding_rows: int
    cost: float
    waste: float


class BucketPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The best buckets for a demand beside the present ones.

    Attributes:
        buckets: ascending; the last holds the largest step.
        unit: of the costs: "rows", or "s".
        steps: that the demand holds.
        cost: of all steps in the planned buckets; present_cost: in the present ones; ideal_cost: with a bucket for every size.
        uses, present_uses: what each bucket does, those that serve nothing included.
    """

    buckets: tuple[int, ...]
    unit: str
    steps: int
    cost: float
    present_cost: float
    ideal_cost: float
    uses: tuple[BucketUse, ...]
    present_uses: tuple[BucketUse, ...]

    @property
    def saved(self) -> float:
        """Share of the present cost that the planned buckets save; below 0 when fewer are allowed than there are now."""
        return 1 - self.cost / self.present_cost if self.present_cost else 0.0


def plan_buckets(
    demand: Mapping[int, int], most: int, present: Coverage, cost: CostCurve = PADDED_ROWS, *, budget: int = 0
) -> BucketPlan:
    """The at most `most` buckets that cover every step with the least total cost, by dynamic programming: exact for such a cost.

    Args:
        demand: token rows -> steps, as `Registry.demanded_rows()` gives them.
        most: captures that are allowed.
        present: the buckets to compare with.
        cost: of a step by its padded rows.
        budget: rows that the largest bucket must hold even if no step had so many yet.

    Raises ConfigError for an empty or malformed demand, and for a budget that a step exceeds.
    """
    steps = _checked(demand)
    if most < 1:
        raise ConfigError("most", f"{most} buckets cover no step", "Allow at least one.")
    largest = max(steps)
    if 0 < budget < largest:
        raise ConfigError("budget", f"{budget} rows do not hold the demanded {largest}", f"Use at least {largest}.")
    largest = max(largest, budget)
    sizes = sorted(
        {*steps, *(rows for rows, _ in cost.points), largest}
    )  # a lowest cost between them lies at one of them
    buckets = _best(steps, sizes, most, cost, largest)
    ideal = _ideal(steps, sizes, cost)
    uses, present_uses = (_uses(steps, rows, cost, ideal) for rows in (buckets, present.rows))
    return BucketPlan(
        buckets=buckets,
        unit=cost.unit,
        steps=sum(steps.values()),
        cost=math.fsum(use.cost for use in uses),
        present_cost=math.fsum(use.cost for use in present_uses),
        ideal_cost=math.fsum(count * ideal[rows] for rows, count in steps.items()),
        uses=uses,
        present_uses=present_uses,
    )


def _checked(demand: Mapping[int, int]) -> dict[int, int]:
    """The demand in ascending order, without sizes that nobody asked for."""
    for rows, count in demand.items():
        if rows < 1 or count < 0:
            raise ConfigError("demand", f"{count} steps of {rows} rows cannot be")
    steps = {rows: count for rows, count in sorted(demand.items()) if count}
    if not steps:
        raise ConfigError("demand", "no steps were recorded", "Let the engine generate something first.")
    return steps


def _best(steps: Mapping[int, int], sizes: list[int], most: int, cost: CostCurve, largest: int) -> tuple[int, ...]:
    """Buckets out of `sizes`, one of at least `largest` among them, and no more than help. O(most * sizes^2)."""
    costs = np.array([cost(rows) for rows in sizes])
    below = np.cumsum([steps.get(rows, 0) for rows in sizes])  # steps of at most so many rows
    ends = bisect_left(sizes, largest)  # the last bucket is at least here
    least = below * costs  # of the steps up to each size, that size being the last of the buckets used so far
    before: list[np.ndarray] = []  # for each further bucket: the size below it, for every last size
    best, chosen = _ending(least, ends, before)
    for _ in range(1, min(most, len(sizes))):
        following = np.full(len(sizes), np.inf)
        choice = np.zeros(len(sizes), np.int64)
        for last in range(1, len(sizes)):
            totals = least[:last] + (below[last] - below[:last]) * costs[last]
            choice[last] = totals.argmin()
            following[last] = totals[choice[last]]
        least = following
        before.append(choice)
        total, ending = _ending(least, ends, before)
        if total < best:
            best, chosen = total, ending
    return tuple(sizes[at] for at in chosen)


def _ending(least: np.ndarray, ends: int, before: list[np.ndarray]) -> tuple[float, list[int]]:
    """The cheapest last size from `ends` on: what all steps cost then, and the sizes that lead to it, ascending."""
    chosen = [ends + int(least[ends:].argmin())]
    total = float(least[chosen[0]])
    for choice in reversed(before):
        chosen.append(int(choice[chosen[-1]]))
    return total, chosen[::-1]


def _ideal(steps: Mapping[int, int], sizes: list[int], cost: CostCurve) -> dict[int, float]:
    """Rows -> cost of a step of so many at the cheapest size that holds it, from the largest size down."""
    ideal, cheapest = {}, math.inf
    for rows in reversed(sizes):
        cheapest = min(cheapest, cost(rows))
        if rows in steps:
            ideal[rows] = cheapest
    return ideal


def _uses(
    steps: Mapping[int, int], buckets: tuple[int, ...], cost: CostCurve, ideal: Mapping[int, float]
) -> tuple[BucketUse, ...]:
    """What each bucket serves, in order; steps above the largest come last, as bucket 0, when there are any."""
    coverage = Coverage(buckets)
    served: dict[int, list[int]] = {bucket: [] for bucket in buckets}
    for rows in steps:
        served.setdefault(coverage.cover(rows) or 0, []).append(rows)
    return tuple(_use(bucket, sizes, steps, cost, ideal) for bucket, sizes in served.items())


def _use(
    bucket: int, sizes: list[int], steps: Mapping[int, int], cost: CostCurve, ideal: Mapping[int, float]
) -> BucketUse:
    real = sum(rows * steps[rows] for rows in sizes)
    spent = math.fsum(cost(bucket or rows) * steps[rows] for rows in sizes)
    return BucketUse(
        rows=bucket,
        steps=sum(steps[rows] for rows in sizes),
        real_rows=real,
        padding_rows=sum((bucket or rows) * steps[rows] for rows in sizes) - real,
        cost=spent,
        waste=spent - math.fsum(ideal[rows] * steps[rows] for rows in sizes),
    )
