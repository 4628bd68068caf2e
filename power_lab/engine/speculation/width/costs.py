"""What steps and drafter calls cost on this engine, measured while it works."""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence

from power_lab.engine.report import Decision

DROPPED = 2  # first samples of a shape: it compiles, is captured, or finds cold caches
KEPT = 31  # samples that a median is taken of, the latest
AGE = 1024  # samples of all sizes after which one is no longer among them, unless there is no other
SHAPES = 1024  # that are known to be warm


class MeasuredCosts:
    """Running medians of seconds by rows of a step, and by drafter and requests of a call.

    A step's seconds are those between commits: from the commit before it, or from its own beginning if that is later, to its own commit.
    So they are what the step took of the engine's time, its Python included, whether or not the device ran ahead; drafting is not in them.

    Args:
        buckets: row counts that steps are padded to, ascending; () where they are not. Up to the largest, costs are a staircase. Above it,
            counts that differ by less than an eighth share a median, and between two that were measured the cost is a straight line.
    """

    def __init__(self, buckets: Sequence[int] = ()) -> None:
        self._buckets = tuple(buckets)
        self._steps = _Medians()
        self._drafts: dict[str, _Medians] = {}

    def add_step(self, shape: Hashable, rows: int, seconds: float) -> None:
        """A committed step. shape: what it ran in, for telling first samples; rows: of that shape, padding included."""
        self._steps.add(shape, self._point(rows), seconds)

    def add_draft(self, drafter: str, requests: int, seconds: float) -> None:
        """A call of a drafter for so many requests."""
        self._drafts.setdefault(drafter, _Medians()).add(requests, requests, seconds)

    def step(self, rows: int) -> float | None:
        point = self._point(rows)
        if self._buckets and rows <= self._buckets[-1]:
            return self._steps.at(point)
        return self._steps.between(point)

    def draft(self, drafter: str, requests: int) -> float | None:
        """Of a call for the nearest count that was measured, or between two."""
        medians = self._drafts.get(drafter)
        return None if medians is None else medians.nearest(requests)

    def points(self) -> dict[int, float]:
        """Rows -> seconds of every size of step that was measured."""
        return self._steps.points()

    def decision(self) -> Decision:
        told = [f"{rows}: {1e3 * seconds:.2f}" for rows, seconds in self.points().items()]
        drafts = [
            f"{name} {1e3 * medians.points()[n]:.3f} for {n}"
            for name, medians in self._drafts.items()
            for n in medians.points()
        ]
        return Decision(
            key="step_costs",
            value=", ".join(told[:16]) or "not measured yet",
            owner="runtime",
            reason=f"ms of a step by rows, medians of the last {KEPT} between commits, which controller='cost' weighs drafts with"
            + (f"; of a drafter's call by requests: {', '.join(drafts[:8])}" if drafts else ""),
        )

    def _point(self, rows: int) -> int:
        at = bisect_left(self._buckets, rows)
        if at < len(self._buckets):
            return self._buckets[at]
        unit = max(1, 1 << max(0, rows.bit_length() - 4))
        return -(-rows // unit) * unit


class _Medians:
    """Medians of the latest samples at whole numbers."""

    def __init__(self) -> None:
        self._warm: OrderedDict[Hashable, int] = OrderedDict()  # shape -> samples seen, up to DROPPED
        self._samples: dict[int, deque[tuple[int, float]]] = {}  # (number of the sample, seconds)
        self._count = 0
        self._medians: dict[int, float] = {}
        self._known: list[int] = []  # keys of the medians, ascending

    def add(self, shape: Hashable, point: int, seconds: float) -> None:
        seen = self._warm.get(shape, 0)
        if seen < DROPPED:
            self._warm[shape] = seen + 1
            if len(self._warm) > SHAPES:
                self._warm.popitem(last=False)
            return
        self._count += 1
        samples = self._samples.setdefault(point, deque(maxlen=KEPT))
        samples.append((self._count, seconds))
        while samples[0][0] <= self._count - AGE:
            samples.popleft()
        if point not in self._medians:
            self._known.insert(bisect_left(self._known, point), point)
        self._medians[point] = statistics.median(seconds for _, seconds in samples)

    def at(self, point: int) -> float | None:
        return self._medians.get(point)

    def between(self, point: int) -> float | None:
        """At a point, or on the line between its neighbours; None outside of what was measured."""
        if point in self._medians:
            return self._medians[point]
        at = bisect_left(self._known, point)
        if not 0 < at < len(self._known):
            return None
        low, high = self._known[at - 1], self._known[at]
        share = (point - low) / (high - low)
        return (1 - share) * self._medians[low] + share * self._medians[high]

    def nearest(self, point: int) -> float | None:
        if not self._known:
            return None
        return self.between(min(max(point, self._known[0]), self._known[-1]))

    def points(self) -> dict[int, float]:
        return {point: self._medians[point] for point in self._known}
