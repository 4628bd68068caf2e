"""Speculate or not, by a race of measured times: TensorSharp's cost governor.

Some rounds with drafts and some without are timed; drafts stay while a token costs at most 15 % more with them than without, and are parked
for growing pauses otherwise. Constants are the published ones. Two points are ours to decide: the counts of a probe include the sample
that is discarded, and there is one race for each drafter, which all its requests run in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from power_lab.engine.speculation.width import Choice, Costs, WidthAsk

PROBE, REPROBE = 8, 3  # rounds with drafts in a race, and in one after a loss
PLAIN = 3  # rounds without
TOLERANCE = 1.15  # drafts win up to this ratio of the costs of a token
HOLD = 64  # rounds that a win holds
WATCH = 8  # of them, the latest that are compared with the rounds without
PARK, LONGEST, DOUBLINGS = 32, 256, 5  # rounds without drafts after a loss
HOPELESS = 4  # measured rounds of a probe without an accepted draft: it is lost at once

Phase = Literal["probe", "plain", "hold", "park"]


@dataclass(frozen=True, slots=True)
class Sample:
    """A timed round: seconds, tokens emitted, drafts accepted."""

    seconds: float
    tokens: int
    accepted: int


def per_token(samples: Sequence[Sample]) -> float:
    """Seconds a token over all rounds."""
    return sum(sample.seconds for sample in samples) / sum(sample.tokens for sample in samples)


def without_worst(samples: Sequence[Sample]) -> float:
    """Seconds a token, its dearest round left out if that is less."""
    worst = max(range(len(samples)), key=lambda i: samples[i].seconds / samples[i].tokens)
    rest = [*samples[:worst], *samples[worst + 1 :]]
    return min(per_token(samples), per_token(rest)) if rest else per_token(samples)


@dataclass(slots=True)
class Race:
    """One drafter's state. `count` rounds of the phase are done; `left` is what is left of a pause."""

    phase: Phase = "probe"
    count: int = 0
    left: int = 0
    losses: int = 0
    plain: float | None = None
    samples: list[Sample] = field(default_factory=list)
    _spec: list[Sample] = field(default_factory=list)  # of the probe that waits for rounds without drafts
    recent: deque[Sample] = field(default_factory=lambda: deque(maxlen=WATCH))
    why: str = "no times yet"

    @property
    def speculates(self) -> bool:
        return self.phase in ("probe", "hold")

    def restart(self) -> None:
        """A request begins: at most one loss and the shortest pause are remembered."""
        self.losses = min(self.losses, 1)
        if self.phase == "park":
            self.left = min(self.left, PARK)
        else:
            self._enter("probe", "a request began")

    def add(self, sample: Sample) -> None:
        """A round of the kind that the phase wants."""
        self.count += 1
        if self.phase == "hold":
            self._hold(sample)
            return
        if self.count > 1:  # the first of each kind is discarded: it may compile
            self.samples.append(sample)
        if self.phase == "probe":
            self._probe()
        elif self.phase == "plain" and self.count == PLAIN:
            self.plain = per_token(self.samples)
            self._decide(without_worst(self._spec))
        elif self.phase == "park":
            self._park()

    def _probe(self) -> None:
        if len(self.samples) >= HOPELESS and not any(sample.accepted for sample in self.samples):
            self._lose(f"{len(self.samples)} probes without an accepted draft")
        elif self.count >= (REPROBE if self.losses else PROBE):
            self._spec = self.samples
            if self.plain is None:
                self._enter("plain", "drafts were timed, now rounds without")
            else:
                self._decide(without_worst(self._spec))

    def _hold(self, sample: Sample) -> None:
        self.recent.append(sample)
        assert self.plain is not None
        if len(self.recent) == WATCH and per_token(self.recent) > TOLERANCE * self.plain:
            self._lose(self._compare(per_token(self.recent)))
        elif self.count >= HOLD:
            self.plain = None  # both sides are measured anew
            self._enter("probe", f"{HOLD} rounds held")

    def _park(self) -> None:
        self.left -= 1
        if self.samples:  # a pause measures rounds without drafts by the way
            self.plain = per_token(self.samples)
        if self.left <= 0:
            self._enter("probe", f"tried again after loss {self.losses}")

    def _decide(self, spec: float) -> None:
        assert self.plain is not None
        if spec > TOLERANCE * self.plain:
            self._lose(self._compare(spec))
        else:
            self.losses = 0
            self._enter("hold", self._compare(spec))

    def _lose(self, why: str) -> None:
        self.losses += 1
        self._enter("park", why)
        self.left = min(LONGEST, PARK << min(self.losses - 1, DOUBLINGS))

    def _enter(self, phase: Phase, why: str) -> None:
        self.phase, self.why = phase, why
        self.count, self.samples = 0, []
        self.recent.clear()

    def _compare(self, spec: float) -> str:
        assert self.plain is not None
        return f"{1e3 * spec:.2f} ms a token with drafts, {1e3 * self.plain:.2f} without"


class GovernorController:
    """All drafts or none, for all requests of a drafter together."""

    name = "governor"

    def __init__(self) -> None:
        self._races: dict[str, Race] = {}
        self._drafters: dict[int, str] = {}
        self._asked: dict[int, bool] = {}  # whether the round under way asked its drafter

    def begin(self, request_id: int, drafter: str) -> None:
        self._drafters[request_id] = drafter
        if drafter in self._races:
            self._races[drafter].restart()
        else:
            self._races[drafter] = Race()

    def ask(self, asks: Sequence[WidthAsk], other_rows: int, costs: Costs) -> list[Choice]:
        choices = []
        for ask in asks:
            race = self._races[self._drafters[ask.request_id]]
            self._asked[ask.request_id] = race.speculates
            drafts = ask.most if race.speculates else 0
            left = f", {race.left} rounds more" if race.phase == "park" else ""
            choices.append(Choice(drafts, f"{drafts}: {race.phase}, {race.why}{left}"))
        return choices

    def ask_ahead(self, asks: Sequence[WidthAsk], other_rows: int, costs: Costs) -> list[Choice]:
        return self.ask(asks, other_rows, costs)

    def keep(self, asks: Sequence[WidthAsk], other_rows: int, costs: Costs) -> list[Choice]:
        races = [self._races[self._drafters[ask.request_id]] for ask in asks]
        return [
            Choice(ask.most, f"{ask.most}: {race.phase}, {race.why}") for ask, race in zip(asks, races, strict=True)
        ]

    def observe(self, request_id: int, drafted: int, accepted: int, seconds: float) -> None:
        """A drafter that was asked and had nothing is a round with drafts that emitted one token."""
        race = self._races[self._drafters[request_id]]
        if self._asked.pop(request_id, False) == race.speculates:  # else the phase has changed under the round
            race.add(Sample(seconds, accepted + 1, accepted))

    def end(self, request_id: int) -> None:
        self._drafters.pop(request_id, None)
        self._asked.pop(request_id, None)
