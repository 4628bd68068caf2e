"""Engine steps on a common clock, whether an engine tells of them or a run's record does, and the axis that they are drawn along."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from power_lab.engine.inspection import StepRecord
from power_lab.engine.trace import RunRecord

_CUT = 0.15  # a pause longer than this share of all steps' time is cut out of the axis
_LEAST = 0.1  # s; and longer than this
_CUTS = 0.25  # share of the axis that all cuts may take together
_ONE = 0.03  # and one of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One engine step.

    Attributes:
        number: of the step; begin, end: seconds since the first moment (of a run: since its submission).
        prefill, decode, verify: token rows; own: of the run that tells of it, None where an engine does.
        running, waiting, preempted: requests. shape, how, why, padded: of its graph, as in `StepRecord`.
        busy: seconds of device work, None where not known.
        free, cached, used: blocks. tokens: emitted; drafted, accepted: draft tokens; None where not known.
        parts: what the time went to -> seconds, of a run's own rounds.
    """

    number: int
    begin: float
    end: float
    prefill: int
    decode: int
    verify: int
    running: int
    waiting: int
    preempted: int
    free: int
    cached: int
    used: int
    own: int | None = None
    shape: tuple[int, int] | None = None
    how: str = ""
    why: str = ""
    padded: int = 0
    busy: float | None = None
    tokens: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def duration(self) -> float:
        return self.end - self.begin

    @property
    def rows(self) -> int:
        return self.prefill + self.decode + self.verify


def of_engine(records: Sequence[StepRecord]) -> tuple[Moment, ...]:
    """Of an engine's ring, in order of time."""
    ordered = sorted(records, key=lambda one: (one.begin, one.number))
    start = ordered[0].begin if ordered else 0.0
    return tuple(
        Moment(
            number=one.number,
            begin=one.begin - start,
            end=max(one.begin, one.end) - start,
            prefill=one.prefill_rows,
            decode=one.decode_rows,
            verify=one.verify_rows,
            running=one.running,
            waiting=one.waiting,
            preempted=one.preempted,
            free=one.free_blocks,
            cached=one.cached_blocks,
            used=one.used_blocks,
            shape=one.shape,
            how=one.how,
            why=one.why,
            padded=one.padded_rows,
            busy=one.busy_s,
            tokens=one.tokens,
            drafted=one.drafted,
            accepted=one.accepted,
        )
        for one in ordered
    )


def of_run(record: RunRecord) -> tuple[Moment, ...]:
    """Of a run's own record: the steps that it took part in, in order of time."""
    rounds = {entry.step: entry for entry in record.rounds}
    found = []
    for step in record.steps:
        entry = rounds.get(step.step)
        parts = {}
        if entry is not None:
            parts = {
                "drafting": entry.draft_s,
                "model": entry.forward_s,
                "sampling": entry.sample_s,
                "commit": entry.commit_s,
            }
        found.append(
            Moment(
                number=step.step,
                begin=max(0.0, step.at - step.wall_s),
                end=max(step.at, 0.0),
                prefill=step.prefill_rows,
                decode=step.decode_rows,
                verify=step.verify_rows,
                running=step.running,
                waiting=step.waiting,
                preempted=step.preempted,
                free=step.free_blocks,
                cached=step.cached_blocks,
                used=step.used_blocks,
                own=step.own_rows,
                tokens=len(entry.emitted) if entry is not None else 0,
                drafted=len(entry.drafted) if entry is not None else 0,
                accepted=entry.accepted if entry is not None else 0,
                parts=parts,
            )
        )
    return tuple(sorted(found, key=lambda one: (one.begin, one.number)))


def gaps(moments: Sequence[Moment]) -> list[tuple[float, float]]:
    """Begin and end of the times in which no step was in flight, in order."""
    found, until = [], moments[0].end if moments else 0.0
    for one in moments[1:]:
        if one.begin > until:
            found.append((until, one.begin))
        until = max(until, one.end)
    return found


@dataclass(frozen=True, slots=True)
class Axis:
    """Time -> place, 0 to 1. Long pauses are cut short, so that minutes without work do not hide the steps.

    Attributes:
        knots: (seconds, place), ascending; straight between them.
        cuts: (begin, end) in seconds of what was cut short.
    """

    knots: tuple[tuple[float, float], ...]
    cuts: tuple[tuple[float, float], ...]

    @classmethod
    def of(cls, moments: Sequence[Moment], start: float = 0.0) -> Axis:
        """Of moments in order of time. start: where the axis begins."""
        if not moments:
            return cls(((0.0, 0.0), (1.0, 1.0)), ())
        end = max(one.end for one in moments)
        pauses = gaps(moments)
        if moments[0].begin > start:
            pauses.insert(0, (start, moments[0].begin))
        work = end - start - sum(high - low for low, high in pauses)
        limit = max(_LEAST, _CUT * work)
        cuts = tuple((low, high) for low, high in pauses if high - low > limit)
        drawn = end - start - sum(high - low for low, high in cuts)
        wide = min(_ONE, _CUTS / len(cuts)) * drawn if cuts else 0.0
        total = drawn + wide * len(cuts) or 1.0
        knots, at, last = [(start, 0.0)], 0.0, start
        for low, high in cuts:
            at += low - last
            knots.append((low, min(1.0, at / total)))
            at += wide
            knots.append((high, min(1.0, at / total)))
            last = high
        return cls((*knots, (max(end, last + 1e-9), 1.0)), cuts)

    def place(self, seconds: float) -> float:
        return _between(self.knots, seconds)

    def ticks(self, most: int = 6) -> list[tuple[float, float]]:
        """(seconds, place) of round times that are not within a cut and not too close to each other."""
        drawn = self.knots[-1][0] - self.knots[0][0] - sum(high - low for low, high in self.cuts)
        step = _round(drawn / most)
        found: list[tuple[float, float]] = []
        for (low, left), (high, right) in pairwise(self.knots):
            if any(low == cut for cut, _ in self.cuts):
                continue
            at = -(-low // step) * step
            while at <= high + 1e-12 and len(found) < 4 * most:
                place = left + (right - left) * (at - low) / ((high - low) or 1.0)
                if not found or place - found[-1][1] >= 0.5 / most:
                    found.append((at, place))
                at += step
        return found


def typical(moments: Sequence[Moment]) -> float:
    """The median duration of a step in seconds."""
    return statistics.median(one.duration for one in moments) if moments else 0.0


def _between(knots: Sequence[tuple[float, float]], value: float) -> float:
    if value <= knots[0][0]:
        return knots[0][1]
    for (low, left), (high, right) in pairwise(knots):
        if value <= high:
            return min(right, left + (right - left) * (value - low) / ((high - low) or 1.0))  # rounding must not lead beyond
    return knots[-1][1]


def _round(value: float) -> float:
    """The next of 1, 2, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value)) if value > 0 else 1.0
    return next((factor * power for factor in (1, 2, 5) if factor * power >= value), 10 * power)
