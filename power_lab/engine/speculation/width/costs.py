"""What steps and drafter calls cost on this engine, measured while it works."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from typing import Protocol

from power_lab.engine.report import Decision
from power_lab.engine.speculation.width import Costs

DROPPED = 2  # first samples of a shape: it compiles, is captured, or finds cold caches
KEPT = 31  # samples that a median is taken of, the latest
AGE = 1024  # samples of all sizes after which one is no longer among them, unless there is no other
SHAPES = 1024  # that are known to be warm
WIDTHS = (1, 2, 3, 5, 7, 11, 15, 23, 31, 47, 63)
"""Widths of a drafter's calls that are measured; what lies between two of them counts as the wider one."""


class MeasuredCosts:
    """Running medians of seconds by rows of a step, and by drafter, width and requests of a call.

    A step's seconds are those between commits: from the commit before it, or from its own beginning if that is later, to its own commit.
    So they are what the step took of the engine's time, its Python included, whether or not the device ran ahead; drafting is not in them.

    Args:
        buckets: row counts that steps are padded to, ascending; () where they are not. Up to the largest, costs are a staircase. Above it,
            counts that differ by less than an eighth share a median, and between two that were measured the cost is a straight line.
    """

    def __init__(self, buckets: Sequence[int] = ()) -> None:
        self._buckets = tuple(buckets)
        self._steps = _Medians()
        self._drafts: dict[str, dict[int, _Medians]] = {}  # by width, ascending
        self._known: dict[tuple[str, int], list[tuple[int, float]]] = {}

    def add_step(self, shape: Hashable, rows: int, seconds: float) -> None:
        """A committed step. shape: what it ran in, for telling first samples; rows: of that shape, padding included."""
        self._steps.add(shape, self._point(rows), seconds)

    def add_draft(self, drafter: str, requests: int, width: int, seconds: float) -> None:
        """A call of a drafter for so many requests, the widest of which asked for `width` drafts."""
        widths, width = self._drafts.setdefault(drafter, {}), _width(width)
        if width not in widths:
            self._drafts[drafter] = widths = dict(sorted({**widths, width: _Medians()}.items()))
        widths[width].add(requests, requests, seconds)
        self._known.clear()

    def step(self, rows: int) -> float | None:
        point = self._point(rows)
        if self._buckets and rows <= self._buckets[-1]:
            return self._steps.at(point)
        return self._steps.between(point)

    def staircase(self, rows: int, count: int) -> list[float | None]:
        seconds: list[float | None] = []
        end = rows + count
        while rows < end:  # all up to a point share it
            point = self._point(rows)
            seconds += [self.step(rows)] * (min(point + 1, end) - rows)
            rows = point + 1
        return seconds

    def draft(self, drafter: str, requests: int, width: int | None = None) -> float | None:
        """Of a call for the nearest count of requests that was measured, or between two, and between two widths on a straight line.

        Outside of the measured widths a narrower call is taken to cost in proportion, and a wider one no more: what would pay if that were
        so is tried, and known then.
        """
        known = self._known.get((drafter, requests)) or self._learn(drafter, requests)
        width = WIDTHS[-1] if width is None else _width(width)
        low, below = 0, 0.0
        for high, seconds in known:
            if high == width:
                return seconds
            if high > width:
                return below + (seconds - below) * ((width - low) / (high - low))
            low, below = high, seconds
        return below if known else None

    def points(self) -> dict[int, float]:
        """Rows -> seconds of every size of step that was measured."""
        return self._steps.points()

    def decision(self) -> Decision:
        told = [f"{rows}: {1e3 * seconds:.2f}" for rows, seconds in self.points().items()]
        drafts = [
            f"{name} {1e3 * seconds:.3f} for {n} x {width}"
            for name, widths in self._drafts.items()
            for width, medians in widths.items()
            for n, seconds in medians.points().items()
        ]
        return Decision(
            key="step_costs",
            value=", ".join(told[:16]) or "not measured yet",
            owner="runtime",
            reason=f"ms of a step by rows, medians of the last {KEPT} between commits, which controller='cost' weighs drafts with"
            + (f"; of a drafter's call by requests x drafts: {', '.join(drafts[:8])}" if drafts else ""),
        )

    def _learn(self, drafter: str, requests: int) -> list[tuple[int, float]]:
        """(width, seconds) of calls for so many requests, ascending; kept until there is another call of the drafter."""
        widths = self._drafts.get(drafter, {})
        known = [(at, seconds) for at, medians in widths.items() if (seconds := medians.nearest(requests)) is not None]
        self._known[drafter, requests] = known
        return known

    def _point(self, rows: int) -> int:
        at = bisect_left(self._buckets, rows)
        if at < len(self._buckets):
            return self._buckets[at]
        unit = max(1, 1 << max(0, rows.bit_length() - 4))
        return -(-rows // unit) * unit


class OnwardCosts(Protocol):
    """What rounds cost that go from drafter to target on the device. See `RoundCosts`."""

    @property
    def heavy(self) -> Costs: ...

    @property
    def light(self) -> Costs: ...


class RoundCosts:
    """The same of rounds that go from drafter to target on the device, drafting included: those with a network in them cost more.

    Attributes:
        heavy, light: with and without a network; steps without drafts count in both.
    """

    def __init__(self, buckets: Sequence[int] = ()) -> None:
        self.heavy, self.light = MeasuredCosts(buckets), MeasuredCosts(buckets)

    def add_step(self, shape: Hashable, rows: int, seconds: float, *, drafts: bool, light: bool) -> None:
        """As `MeasuredCosts.add_step`. drafts: whether it has any; light: whether it makes them without a network."""
        if light or not drafts:
            self.light.add_step(shape, rows, seconds)
        if not light:
            self.heavy.add_step(shape, rows, seconds)


def _width(width: int) -> int:
    """What is measured together with it."""
    return WIDTHS[min(bisect_left(WIDTHS, width), len(WIDTHS) - 1)]


def _median(values: list[float]) -> float:
    """As `statistics.median`, which takes ten times as long: this runs in every step."""
    values.sort()
    return (values[(len(values) - 1) // 2] + values[len(values) // 2]) / 2


class _Medians:
    """Medians of the latest samples at whole numbers."""

    def __init__(self) -> None:
        self._warm: OrderedDict[Hashable, int] = OrderedDict()  # shape -> samples seen, up to DROPPED
        self._samples: dict[int, deque[tuple[int, float]]] = {}  # (number of the sample, seconds)
        self._count = 0
        self._medians: dict[int, float] = {}  # as far as they were asked for since the last sample
        self._known: list[int] = []  # keys of the samples, ascending

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
        if len(samples) == 1 and point not in self._known:
            self._known.insert(bisect_left(self._known, point), point)
        self._medians.pop(point, None)

    def at(self, point: int) -> float | None:
        if point not in self._medians:
            if point not in self._samples:
                return None
            self._medians[point] = _median([seconds for _, seconds in self._samples[point]])
        return self._medians[point]

    def between(self, point: int) -> float | None:
        """At a point, or on the line between its neighbours; None outside of what was measured."""
        if (seconds := self.at(point)) is not None:
            return seconds
        at = bisect_left(self._known, point)
        if not 0 < at < len(self._known):
            return None
        low, high = self._known[at - 1], self._known[at]
        below, above = self.at(low), self.at(high)
        assert below is not None and above is not None
        share = (point - low) / (high - low)
        return (1 - share) * below + share * above

    def nearest(self, point: int) -> float | None:
        if not self._known:
            return None
        return self.between(min(max(point, self._known[0]), self._known[-1]))

    def points(self) -> dict[int, float]:
        return {point: seconds for point in self._known if (seconds := self.at(point)) is not None}
