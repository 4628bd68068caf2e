"""Shapes of captured steps: which are declared, which one covers a step, and what became of each. No torch.

A graph is captured for one padded shape and replayed for every step that the shape covers; the difference is padding, which computes
on the dummy page and is thrown away. The registry counts all of it, so that no step runs eagerly and no row is padded unseen.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import count, pairwise, takewhile
from typing import Literal, NamedTuple

import msgspec

from power_lab.errors import ConfigError

Sampling = Literal["none", "greedy", "random", "limited", "apart"]
"""How a step samples: `none` has no logit rows; `greedy`, `random` and `limited` (top-k, top-p or min-p) draw inside of the graph; `apart`
draws after it, for a reason."""

_DECODE_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
_FOLDED = 32  # distinct reasons that are kept by their words
_OTHER = "other reasons"
_SUMMED = (
    "recordings",
    "captures",
    "replays",
    "evictions",
    "real_rows",
    "padding_rows",
    "real_logits",
    "padding_logits",
)


@dataclass(frozen=True, slots=True)
class Shape:
    """What a step computes: as it was asked for, or padded to what was captured.

    Attributes:
        rows: token rows; 0 only in `OTHERS`.
        sampled: logit rows.
        sampling: how they are drawn.
        reason: why sampling is apart; it does not tell shapes from each other.
    """

    rows: int
    sampled: int
    sampling: Sampling
    reason: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if min(self.rows, self.sampled) < 0 or (self.sampled == 0) != (self.sampling == "none"):
            raise ValueError(f"no step has {self.rows} rows, {self.sampled} of them sampled ({self.sampling})")
        if (self.sampling == "apart") != bool(self.reason):
            raise ValueError(f"sampling apart has a reason, and nothing else has one: {self.sampling}, {self.reason!r}")

    def __hash__(self) -> int:
        """Of what most shapes differ in, whatever kinds of shape add: a step looks shapes up ten times."""
        return hash((self.rows, self.sampled, self.sampling))

    def covers(self, asked: Shape) -> bool:
        """Whether a graph of this shape can run the step."""
        return self.rows >= asked.rows and self.sampled >= asked.sampled and self.sampling == asked.sampling


@dataclass(frozen=True, slots=True)
class ResumedShape(Shape):
    """A step that goes on from the one before it on the device. drafting: the shape of the drafter's part of it, if there is one."""

    drafting: Shape | None = None

    __hash__ = Shape.__hash__


OTHERS = Shape(0, 0, "none")
"""Where the registry counts steps of no declared shape, and shapes that it forgot, together."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """The row buckets that a model declares on a device.

    Attributes:
        rows: ascending and different, each at least 1.

    Raises ConfigError for other rows.
    """

    rows: tuple[int, ...]

    def __post_init__(self) -> None:
        ascending = all(low < high for low, high in pairwise((0, *self.rows)))
        if not self.rows or not ascending:
            told = ", ".join(map(str, self.rows[:16])) or "none"
            raise ConfigError("coverage", f"row buckets must be ascending and at least 1, not {told}")

    @classmethod
    def exact(cls, most: int) -> Coverage:
        """Every count of rows up to `most`: nothing is padded. For devices where a capture costs little, such as the CPU."""
        return cls(tuple(range(1, most + 1)))

    @classmethod
    def standard(cls, most: int) -> Coverage:
        """For GPUs: 1, 2, 4, 8, 16, 24, 32, 48, ... 128 for decoding, then 192, 256, 384, 512, ... for prompts, and `most` itself.

        A third of a bucket above 16 rows is padding at the worst; `planner.plan_buckets` finds better ones for a recorded demand.
        """
        prompts = (rows for power in count(7) for rows in (3 << (power - 1), 2 << power))
        below = (*_DECODE_ROWS, *takewhile(lambda rows: rows < most, prompts))
        return cls((*(rows for rows in below if rows < most), most))

    @property
    def most(self) -> int:
        return self.rows[-1]

    def cover(self, rows: int) -> int | None:
        """The smallest bucket of at least so many rows. None above the largest: such a step takes the dynamic path."""
        at = bisect_left(self.rows, rows)
        return self.rows[at] if at < len(self.rows) else None


def pad(asked: Shape, rows: Coverage, sampled: Coverage) -> Shape | None:
    """The shape to capture for a step, its token rows and its logit rows padded each to their bucket; None when one is not covered."""
    padded, logits = rows.cover(asked.rows), sampled.cover(asked.sampled) if asked.sampled else 0
    return None if padded is None or logits is None else Shape(padded, logits, asked.sampling, asked.reason)


class ShapeStats(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one padded shape since the engine started. Each step counts once: as a capture, as a replay or as eager.

    Attributes:
        shape: the shape; rows 0 stands for all that have no line of their own.
        recordings, evictions: how often its graph was made, and given up.
        captures: steps whose graph was recorded for them, before they ran in it; one recorded behind an eager step is no such step.
        replays: steps that ran in a graph that was there.
        eager: reason -> steps that ran operation by operation.
        apart: reason -> steps whose sampling ran after the graph.
        real_rows, padding_rows, real_logits, padding_logits: rows that steps asked for, and that were added to them.
        nbytes: of its capture, 0 when none is held now.
        held: whether a capture is held now.
        last_step: when it was last used, counting steps from 1; 0 is never.
    """

    shape: Shape
    recordings: int
    captures: int
    replays: int
    evictions: int
    eager: dict[str, int]
    apart: dict[str, int]
    real_rows: int
    padding_rows: int
    real_logits: int
    padding_logits: int
    nbytes: int
    held: bool
    last_step: int

    @property
    def steps(self) -> int:
        return self.captures + self.replays + sum(self.eager.values())

    @property
    def waste(self) -> float:
        """Share of the computed token rows that was padding, 0 to 1."""
        return self.padding_rows / max(1, self.real_rows + self.padding_rows)


class ShapeTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over all shapes: `steps` are captures, replays and eager ones. `hit_rate`: share of the last `window` steps that replayed a
    graph that was there, None before the first step."""

    steps: int
    recordings: int
    captures: int
    replays: int
    eager: int
    evictions: int
    real_rows: int
    padding_rows: int
    real_logits: int
    padding_logits: int
    graphs: int
    nbytes: int
    hit_rate: float | None
    window: int


class Ran(NamedTuple):
    """One step: its shape as it was asked for and as it ran (None: in no declared one), `replay`, `capture` or `eager`, and why eagerly."""

    asked: Shape
    shape: Shape | None
    how: str
    why: str


@dataclass(slots=True)
class _Counts:
    recordings: int = 0
    captures: int = 0
    replays: int = 0
    evictions: int = 0
    eager: Counter[str] = field(default_factory=Counter)
    apart: Counter[str] = field(default_factory=Counter)
    real_rows: int = 0
    padding_rows: int = 0
    real_logits: int = 0
    padding_logits: int = 0
    nbytes: int = 0
    held: bool = False
    last_step: int = 0

    def absorb(self, other: _Counts) -> None:
        """Add a line that is no longer kept; its capture is gone, so it has no bytes."""
        for name in _SUMMED:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for mine, its in ((self.eager, other.eager), (self.apart, other.apart)):
            for reason, steps in its.items():
                _tally(mine, reason, steps)
        self.last_step = max(self.last_step, other.last_step)

    def stats(self, shape: Shape) -> ShapeStats:
        counts = {name: getattr(self, name) for name in (*_SUMMED, "nbytes", "held", "last_step")}
        return ShapeStats(shape=shape, eager=dict(self.eager), apart=dict(self.apart), **counts)


class Registry:
    """Counts what steps asked for and how they ran. The engine's thread writes; snapshots may be taken on any, and may miss half a step.

    Args:
        window: steps that the hit rate looks back on.
        recent: steps that are kept in order.
        lines: shapes, and asked shapes, that are kept one by one; what comes on top is counted together.

    Attributes:
        steps, recordings, captures, replays: so far, as `ShapeStats` has them. ran: the last steps.
    """

    def __init__(self, window: int = 1024, recent: int = 4096, lines: int = 4096) -> None:
        self._lines = lines
        self._shapes: dict[Shape, _Counts] = {}
        self._others = _Counts()
        self._demand: Counter[Shape] = Counter()
        self.ran: deque[Ran] = deque(maxlen=recent)
        self._hits: deque[bool] = deque(maxlen=window)
        self.steps = self.recordings = self.captures = self.replays = 0
        self.unrecorded = 0  # steps that the demand has no room for

    def captured(self, shape: Shape, nbytes: int) -> None:
        """A graph of `shape` is held now."""
        self.recordings += 1
        counts = self._line(shape)
        counts.recordings += 1
        counts.nbytes, counts.held = nbytes, True

    def evicted(self, shape: Shape) -> None:
        """Its graph is held no longer."""
        counts = self._line(shape)
        counts.evictions += 1
        counts.nbytes, counts.held = 0, False

    def replayed(self, asked: Shape, shape: Shape, *, hit: bool = True) -> None:
        """A step ran in the graph of `shape`: a replay if it was there, else a capture, for it was recorded for this step."""
        counts = self._ran(asked, shape, "replay" if hit else "capture")
        if hit:
            self.replays += 1
            counts.replays += 1
        else:
            self.captures += 1
            counts.captures += 1

    def eager(self, asked: Shape, shape: Shape | None, reason: str) -> None:
        """A step ran operation by operation for a reason, padded to `shape` or, with None, in no declared shape."""
        counts = self._ran(asked, shape, "eager", reason)
        _tally(counts.eager, reason, 1)

    def snapshot(self) -> tuple[ShapeStats, ...]:
        """All shapes, in order of rows, sampled rows and sampling; `OTHERS` is first, where it has counts. O(shapes)."""
        rest = [(OTHERS, self._others)] if self._others.last_step or self._others.recordings else []
        lines = [*rest, *self._shapes.items()]
        return tuple(counts.stats(shape) for shape, counts in sorted(lines, key=lambda line: _order(line[0])))

    def totals(self) -> ShapeTotals:
        """Sums over `snapshot()`, and the hit rate."""
        lines = self.snapshot()
        sums = {name: sum(getattr(line, name) for line in lines) for name in (*_SUMMED, "steps", "nbytes")}
        return ShapeTotals(
            **sums,
            eager=sums["steps"] - sums["captures"] - sums["replays"],
            graphs=sum(line.held for line in lines),
            hit_rate=self.hit_rate,
            window=self._hits.maxlen or 0,
        )

    def demand(self) -> dict[Shape, int]:
        """Shapes as they were asked for -> steps, in order; `unrecorded` steps are missing."""
        return {shape: self._demand[shape] for shape in sorted(self._demand, key=_order)}

    def demanded_rows(self) -> dict[int, int]:
        """Token rows -> steps that asked for so many, ascending: what `planner.plan_buckets` plans for."""
        rows: Counter[int] = Counter()
        for shape, steps in tuple(self._demand.items()):
            rows[shape.rows] += steps
        return dict(sorted(rows.items()))

    def recent(self) -> tuple[Shape, ...]:
        """The shapes that the last steps asked for, the latest last."""
        return tuple(ran.asked for ran in tuple(self.ran))

    @property
    def hit_rate(self) -> float | None:
        """Share of the last `window` steps that replayed a graph that was there; None before the first."""
        hits = tuple(self._hits)
        return sum(hits) / len(hits) if hits else None

    def _ran(self, asked: Shape, shape: Shape | None, how: str, why: str = "") -> _Counts:
        if shape is not None and not shape.covers(asked):
            raise ValueError(f"{shape} does not cover {asked}")
        self.steps += 1
        self._hits.append(how == "replay")
        self.ran.append(Ran(asked, shape, how, why))
        if asked in self._demand or len(self._demand) < self._lines:
            self._demand[asked] += 1
        else:
            self.unrecorded += 1
        counts = self._others if shape is None else self._line(shape)
        ran = shape or asked
        counts.real_rows += asked.rows
        counts.padding_rows += ran.rows - asked.rows
        counts.real_logits += asked.sampled
        counts.padding_logits += ran.sampled - asked.sampled
        counts.last_step = self.steps
        if asked.reason:
            _tally(counts.apart, asked.reason, 1)
        return counts

    def _line(self, shape: Shape) -> _Counts:
        counts = self._shapes.get(shape)
        if counts is None:
            if len(self._shapes) >= self._lines:
                self._forget()
            counts = self._shapes[shape] = _Counts()
        return counts

    def _forget(self) -> None:
        """Count half of the shapes without a graph, those that were not used for longest, with the others. A budget bounds the graphs."""
        idle = sorted(
            ((line.last_step, shape) for shape, line in self._shapes.items() if not line.held), key=lambda old: old[0]
        )
        for _, shape in idle[: (len(idle) + 1) // 2]:
            self._others.absorb(self._shapes.pop(shape))


def _tally(counter: Counter[str], reason: str, steps: int) -> None:
    """Count a reason; those beyond a bound go together, for a reason that holds a number would make one a step."""
    counter[reason if reason in counter or len(counter) < _FOLDED else _OTHER] += steps


def _order(shape: Shape) -> tuple[int, int, str]:
    return shape.rows, shape.sampled, shape.sampling
