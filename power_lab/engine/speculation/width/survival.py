"""How likely drafts are accepted, learnt from those that were verified. Counts fade, so that what changes is learnt anew."""

from __future__ import annotations

from collections.abc import Sequence

PRIOR = 0.6  # acceptance of a draft of which nothing is known
STRENGTH = 3.0  # observations that a prior weighs as much as
FADE, FADE_SHARED = 0.9, 0.99  # of a request's counts, and of those of all requests of a drafter, a round
BINS = 10  # of confidence


class Rate:
    """A success rate with a prior: the mean of a Beta distribution whose counts fade."""

    __slots__ = ("no", "yes")

    def __init__(self) -> None:
        self.yes = self.no = 0.0

    def add(self, yes: float, no: float, fade: float) -> None:
        self.yes = fade * self.yes + yes
        self.no = fade * self.no + no

    def mean(self, prior: float) -> float:
        return (self.yes + STRENGTH * prior) / (self.yes + self.no + STRENGTH)


class Acceptance:
    """Rates by position in the draft: that a draft is accepted, given that those before it were."""

    def __init__(self, fade: float) -> None:
        self._fade = fade
        self._all = Rate()
        self._at: list[Rate] = []

    def add(self, drafted: int, accepted: int) -> None:
        """A verified round. Nothing is learnt of drafts behind the first that was refused."""
        reached = min(accepted + 1, drafted)
        while len(self._at) < reached:
            self._at.append(Rate())
        for position in range(reached):
            hit = position < accepted
            self._at[position].add(hit, not hit, self._fade)
        self._all.add(accepted, reached - accepted, self._fade)

    def at(self, position: int, prior: float) -> float:
        return self._at[position].mean(prior) if position < len(self._at) else prior

    def overall(self, prior: float) -> float:
        return self._all.mean(prior)


class Calibration:
    """What a drafter's confidence is worth: rates of acceptance by tenths of confidence."""

    def __init__(self, fade: float) -> None:
        self._fade = fade
        self._bins = [Rate() for _ in range(BINS)]

    def add(self, confidence: Sequence[float], accepted: int) -> None:
        """confidence: of the drafts that were verified."""
        for position, sure in enumerate(confidence[: accepted + 1]):
            hit = position < accepted
            self._bin(sure).add(hit, not hit, self._fade)

    def at(self, confidence: float, prior: float) -> float:
        return self._bin(confidence).mean(prior)

    def _bin(self, confidence: float) -> Rate:
        return self._bins[min(BINS - 1, int(confidence * BINS))]


class Survival:
    """What one request's drafts taught, or those of all requests of a drafter."""

    def __init__(self, fade: float) -> None:
        self._acceptance = Acceptance(fade)
        self._calibration = Calibration(fade)

    def add(self, drafted: int, accepted: int, confidence: Sequence[float]) -> None:
        """A verified round. confidence: of its drafts, or ()."""
        self._acceptance.add(drafted, accepted)
        self._calibration.add(confidence, accepted)

    def learnt(self, shared: Survival, most: int) -> list[float]:
        """For each of so many drafts the probability that it and all before it are accepted.

        shared: what its drafter's other requests taught, for what is not known of this one.
        """
        overall = shared._acceptance.overall(PRIOR)
        return _products([self._acceptance.at(at, shared._acceptance.at(at, overall)) for at in range(most)])

    def calibrated(self, shared: Survival, confidence: Sequence[float]) -> list[float]:
        """The same from what the drafter says of these drafts, as far as its word was good before."""
        return _products([self._calibration.at(sure, shared._calibration.at(sure, sure)) for sure in confidence])


def _products(rates: Sequence[float]) -> list[float]:
    survival, product = [], 1.0
    for rate in rates:
        product *= rate
        survival.append(product)
    return survival
