"""How likely drafts are accepted, learnt from those that were verified. Counts fade, so that what changes is learnt anew."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from operator import add, mul, truediv

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
    """Rates by position in the draft: that a draft is accepted, given that those before it were. See `Rate`."""

    __slots__ = ("_all", "_fade", "_no", "_weight", "_yes")

    def __init__(self, fade: float) -> None:
        self._fade = fade
        self._all = Rate()
        self._yes: list[float] = []
        self._no: list[float] = []
        self._weight: list[float] = []  # of these and the prior together

    def add(self, drafted: int, accepted: int) -> None:
        """A verified round. Nothing is learnt of drafts behind the first that was refused."""
        fade, yes, no, reached = self._fade, self._yes, self._no, min(accepted + 1, drafted)
        if (missing := reached - len(yes)) > 0:
            for counts in (yes, no, self._weight):
                counts += [0.0] * missing
        for position in range(reached):
            hit = position < accepted
            yes[position] = fade * yes[position] + hit
            no[position] = fade * no[position] + (not hit)
            self._weight[position] = yes[position] + no[position] + STRENGTH
        self._all.add(accepted, reached - accepted, fade)

    def survival(self, priors: Sequence[float], scaled: Sequence[float]) -> list[float]:
        """Products of the first rates, one by one. scaled: STRENGTH times the priors."""
        known = map(truediv, map(add, self._yes, scaled), self._weight)
        return list(accumulate(chain(known, priors[len(self._yes) :]), mul))

    def means(self, priors: Sequence[float]) -> list[float]:
        """The first rates, with these priors."""
        scaled = [STRENGTH * prior for prior in priors]
        return [*map(truediv, map(add, self._yes, scaled), self._weight), *priors[len(self._yes) :]]

    def overall(self, prior: float) -> float:
        return self._all.mean(prior)


class Calibration:
    """What a drafter's confidence is worth: rates of acceptance by tenths of confidence. See `Rate`."""

    __slots__ = ("_fade", "_no", "_weight", "_yes")

    def __init__(self, fade: float) -> None:
        self._fade = fade
        # The last one is what a confidence of 1 finds: the same as the one before.
        self._yes, self._no, self._weight = [0.0] * (BINS + 1), [0.0] * (BINS + 1), [STRENGTH] * (BINS + 1)

    def add(self, confidence: Sequence[float], accepted: int) -> None:
        """confidence: of the drafts that were verified."""
        fade, yes, no, weight = self._fade, self._yes, self._no, self._weight
        for position, sure in enumerate(confidence[: accepted + 1]):
            at, hit = min(BINS - 1, int(sure * BINS)), position < accepted
            yes[at] = fade * yes[at] + hit
            no[at] = fade * no[at] + (not hit)
            weight[at] = yes[at] + no[at] + STRENGTH
        yes[BINS], no[BINS], weight[BINS] = yes[BINS - 1], no[BINS - 1], weight[BINS - 1]

    def survival(self, shared: Calibration, confidence: Sequence[float]) -> list[float]:
        """Products of the rates of these drafts, one by one; their prior is what `shared` makes of their confidence."""
        yes, weight, theirs, all = self._yes, self._weight, shared._yes, shared._weight
        products, product = [], 1.0
        for sure in confidence:
            at = int(sure * BINS)
            product *= (yes[at] + STRENGTH * ((theirs[at] + STRENGTH * sure) / all[at])) / weight[at]
            products.append(product)
        return products


class Survival:
    """What one request's drafts taught, or those of all requests of a drafter."""

    __slots__ = ("_acceptance", "_calibration", "_priors")

    def __init__(self, fade: float) -> None:
        self._acceptance = Acceptance(fade)
        self._calibration = Calibration(fade)
        self._priors: dict[int, tuple[list[float], list[float]]] = {}

    def add(self, drafted: int, accepted: int, confidence: Sequence[float]) -> None:
        """A verified round. confidence: of its drafts, or ()."""
        self._acceptance.add(drafted, accepted)
        if confidence:
            self._calibration.add(confidence, accepted)
        self._priors.clear()

    def learnt(self, shared: Survival, most: int) -> list[float]:
        """For each of so many drafts the probability that it and all before it are accepted.

        shared: what its drafter's other requests taught, for what is not known of this one.
        """
        return self._acceptance.survival(*(shared._priors.get(most) or shared._prior(most)))

    def calibrated(self, shared: Survival, confidence: Sequence[float]) -> list[float]:
        """The same from what the drafter says of these drafts, as far as its word was good before."""
        return self._calibration.survival(shared._calibration, confidence)

    def _prior(self, most: int) -> tuple[list[float], list[float]]:
        """What this teaches others of the first positions, and the same times STRENGTH; kept until there is more of it."""
        means = self._acceptance.means([self._acceptance.overall(PRIOR)] * most)
        self._priors[most] = means, [STRENGTH * mean for mean in means]
        return self._priors[most]
