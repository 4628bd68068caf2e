"""The cost controller as it was first written, one choice after another: the reference that its faster form must choose as.

It knows no widths of a drafter's calls: all cost what one of any width does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from power_lab.engine.speculation.width import Choice, Costs, WidthAsk

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


MEASURED = 4  # steps without drafts that are run at most to learn what a number of rows costs
STALE = 128  # steps with drafts after which one without is run, so that its cost is known as it is now
FREE = 0.02  # share of a step's seconds below which drafting is taken to cost nothing
PROBE = 1  # drafts of the first probe after a pause; doubled while all are accepted
PAUSE, LONGEST = 4, 24  # rounds without drafts where they do not pay; doubled with each probe that failed


@dataclass(slots=True)
class _State:
    """One request.

    Attributes:
        survival: of its drafts. answered: how often its drafter had some.
        pause: rounds without drafts that are due; next_pause: of the one after.
        probe: drafts of the probe that is due, or 0. tried: whether any of its drafts were verified.
        asked: how many its drafter was asked for this round; confidence: of the drafts that are kept.
        dear: whether its drafter's time counted when it was last asked. opinion: whether its drafts say how sure they are.
        refused: rounds in a row whose drafts were not worth verifying.
    """

    drafter: str
    survival: Survival = field(default_factory=lambda: Survival(FADE))
    answered: Rate = field(default_factory=Rate)
    pause: int = 0
    next_pause: int = PAUSE
    probe: int = 0
    tried: bool = False
    asked: int = 0
    confidence: tuple[float, ...] = ()
    dear: bool = False
    opinion: bool = False
    refused: int = 0


@dataclass(frozen=True, slots=True)
class Best:
    """The best drafts of a step: how many of each request, tokens and seconds of such a step, and those of one without drafts."""

    drafts: tuple[int, ...]
    tokens: float
    seconds: float
    plain_tokens: float
    plain_seconds: float

    @property
    def why(self) -> str:
        return (
            f"{self.tokens:.2f} tokens in {1e3 * self.seconds:.2f} ms,"
            f" {self.plain_tokens:.0f} in {1e3 * self.plain_seconds:.2f} without drafts"
        )


def best(survival: Sequence[Sequence[float]], rows: int, costs: Costs, drafting: float) -> Best:
    """The drafts that maximise tokens a second.

    Args:
        survival: for each request that of its drafts, none greater than the one before.
        rows: of the step without drafts; each counts as a token, a prompt's too: it waits as long as the others.
        costs: of steps of any size; see `_estimates` for those that were not measured.
        drafting: seconds that are added to a step with any draft.
    """
    # Ties are broken by position first: a request's drafts stay in order.
    slots = sorted((-value, at, index) for index, values in enumerate(survival) for at, value in enumerate(values))
    seconds = _estimates([costs.step(rows + budget) for budget in range(len(slots) + 1)], rows)
    tokens, count = float(rows), 0
    best_tokens, best_seconds = tokens, seconds[0]
    for budget, (value, _, _) in enumerate(slots[: len(seconds) - 1], 1):
        tokens -= value
        spent = seconds[budget] + drafting
        if tokens * best_seconds > best_tokens * spent:
            count, best_tokens, best_seconds = budget, tokens, spent
    drafts = [0] * len(survival)
    for _, _, index in slots[:count]:
        drafts[index] += 1
    return Best(tuple(drafts), best_tokens, best_seconds, float(rows), seconds[0])


def _estimates(measured: Sequence[float | None], rows: int) -> list[float]:
    """Seconds of steps of `rows` rows and more, one by one, as measured or guessed; of as many as may be tried.

    A gap costs what the size below it does, so it is tried where it would be best, and known then; the beginning what the first above it
    does. Beyond the last, the line through the last two goes on, up to twice the rows: what is far from all that was measured is come to
    step by step. Where nothing was measured, all cost 1: tokens alone decide.
    """
    known = [(budget, seconds) for budget, seconds in enumerate(measured) if seconds]
    if not known:
        return [1.0] * len(measured)
    last, (end, above) = known[-2:], known[-1]
    slope = max(0.0, (above - last[0][1]) / (end - last[0][0])) if len(last) == 2 else 0.0
    estimates, below = [], known[0][1]
    for budget, seconds in enumerate(measured[: rows + 2 * end + 1]):
        below = seconds or below
        estimates.append(below if budget <= end else above + slope * (budget - end))
    return estimates


class CostController:
    """Tokens a second over the whole step, with what was measured.

    A request whose drafts do not pay decodes plainly for a pause, is probed with few drafts, goes on with more while all are accepted, and
    where that does not make them pay either, pauses for twice as long. No pause is for ever. New requests of a drafter that did not pay
    elsewhere are probed first. Drafts that say how sure they are and cost nothing are asked for every time: what is verified of them
    is settled when they are there.
    """

    name = "cost"

    def __init__(self) -> None:
        self._states: dict[int, _State] = {}
        self._shared: dict[str, Survival] = {}
        # By bit length of the rows: steps that were run without drafts to measure them, and those with drafts since the last without.
        self._measuring: Counter[int] = Counter()
        self._since: Counter[int] = Counter()

    def begin(self, request_id: int, drafter: str) -> None:
        self._shared.setdefault(drafter, Survival(FADE_SHARED))
        self._states[request_id] = _State(drafter)

    def ask(self, asks: Sequence[WidthAsk], other_rows: int, costs: Costs) -> list[Choice]:
        rows = other_rows + len(asks)
        if not asks:
            return []
        if why := self._measures(rows, costs):
            return [self._give(ask, 0, f"0: {why}") for ask in asks]
        choices: dict[int, Choice] = {}
        open_asks = []
        for ask in asks:
            state = self._states[ask.request_id]
            if state.pause:
                rest = state.pause - 1
                state.pause, state.probe = 0, PROBE
                why = f"0: drafts did not pay, {rest} rounds more without"
                choices[ask.request_id] = self._give(ask, 0, why, rest)
            elif state.probe:
                drafts = min(ask.most, state.probe)
                choices[ask.request_id] = self._give(ask, drafts, f"{drafts}: a probe")
            else:
                open_asks.append(ask)
        choices |= self._bound(open_asks, rows - len(open_asks), costs)
        return [choices[ask.request_id] for ask in asks]

    def keep(self, asks: Sequence[WidthAsk], other_rows: int, costs: Costs) -> list[Choice]:
        states = [self._states[ask.request_id] for ask in asks]
        survival = [self._survival(ask) for ask in asks]
        found = best(survival, other_rows + len(asks), costs, 0.0)
        choices = []
        for ask, state, values, drafts in zip(asks, states, survival, found.drafts, strict=True):
            state.opinion = bool(ask.confidence)
            if not drafts and not state.probe:
                self._refuse(state)
            if state.probe and drafts < min(ask.most, state.probe):
                drafts = min(ask.most, state.probe)
                choices.append(Choice(drafts, f"{drafts}: a probe"))
            else:
                why = found.why if drafts else f"the first draft survives with {values[0]:.2f}, which does not pay"
                choices.append(Choice(drafts, f"{drafts}: {why}"))
            state.confidence = ask.confidence[:drafts]
        self._since[(other_rows + len(asks)).bit_length()] += any(choice.drafts for choice in choices)
        return choices

    def observe(self, request_id: int, drafted: int, accepted: int, seconds: float) -> None:
        state = self._states[request_id]
        if state.asked:
            state.answered.add(bool(drafted), not drafted, FADE)
        if drafted:
            state.tried = True
            for survival in (state.survival, self._shared[state.drafter]):
                survival.add(drafted, accepted, state.confidence[:drafted])
            if state.probe:
                state.probe = 2 * state.probe if accepted == drafted and state.asked == state.probe else 0
            elif accepted:
                state.next_pause, state.refused = PAUSE, 0
        elif state.probe and state.asked and state.dear:
            state.probe = 0
            self._rest(state)
        state.asked, state.confidence = 0, ()

    def end(self, request_id: int) -> None:
        self._states.pop(request_id, None)

    def _measures(self, rows: int, costs: Costs) -> str:
        """Why the step goes without drafts for the sake of its time, or "": at most a few times at first, and seldom later."""
        octave = rows.bit_length()
        if costs.step(rows) is None and self._measuring[octave] < MEASURED:
            self._measuring[octave] += 1
            return f"a step of {rows} rows is not measured yet"
        if self._since[octave] >= STALE:
            self._since[octave] = 0
            return f"{STALE} steps with drafts, one without is measured anew"
        return ""

    def _bound(self, asks: Sequence[WidthAsk], other_rows: int, costs: Costs) -> dict[int, Choice]:
        """Choices of the requests that neither pause nor are probed, by what is learnt of their drafts."""
        states = [self._states[ask.request_id] for ask in asks]
        drafting = self._drafting(states, costs)
        dear = drafting > FREE * (costs.step(other_rows + len(asks)) or 0.0)
        for state in states:
            state.dear = dear
        if not dear and all(state.opinion for state in states):
            why = "asking costs nothing, and the drafts say how sure they are"
            return {ask.request_id: self._give(ask, ask.most, f"{ask.most}: {why}") for ask in asks}
        survival = [s.survival.learnt(self._shared[s.drafter], ask.most) for s, ask in zip(states, asks, strict=True)]
        found = best(survival, other_rows + len(asks), costs, drafting)
        choices = {}
        for ask, state, values, drafts in zip(asks, states, survival, found.drafts, strict=True):
            if drafts or (
                state.opinion and not dear
            ):  # one more than pays as far as is known, so that the width can grow
                drafts = min(ask.most, drafts + 1) if dear else ask.most
                choice = self._give(ask, drafts, f"{drafts}: {found.why}")
            elif not state.tried:
                state.probe = PROBE
                choice = self._give(ask, PROBE, f"{PROBE}: a first probe")
            else:
                self._rest(state)
                dearly = f" and costs {1e3 * drafting:.2f} ms to make" if dear else ""
                why = f"0: the first draft survives with {values[0]:.2f}{dearly}, which does not pay"
                rest, state.pause, state.probe = state.pause, 0, PROBE
                choice = self._give(ask, 0, f"{why}; {rest} rounds more without", rest)
            choices[ask.request_id] = choice
        return choices

    def _drafting(self, states: Sequence[_State], costs: Costs) -> float:
        """Seconds of the drafter calls for these requests, for each that is answered: a drafter that seldom has drafts costs as often."""
        total = 0.0
        for drafter in sorted({state.drafter for state in states}):
            rates = [state.answered.mean(1.0) for state in states if state.drafter == drafter]
            total += (costs.draft(drafter, len(rates)) or 0.0) * len(rates) / sum(rates)
        return total

    def _survival(self, ask: WidthAsk) -> list[float]:
        state = self._states[ask.request_id]
        shared = self._shared[state.drafter]
        if ask.confidence:
            return state.survival.calibrated(shared, ask.confidence)
        return state.survival.learnt(shared, ask.most)

    def _give(self, ask: WidthAsk, drafts: int, why: str, rest: int = 0) -> Choice:
        self._states[ask.request_id].asked = drafts
        return Choice(drafts, why, rest)

    def _refuse(self, state: _State) -> None:
        """A round's drafts are not worth verifying: so many in a row, and some are probed nevertheless; what was learnt may not hold."""
        state.refused += 1
        if not state.opinion:
            self._rest(state)
        elif state.refused > state.next_pause:
            state.refused, state.probe = 0, PROBE
            state.next_pause = min(LONGEST, 2 * state.next_pause)

    def _rest(self, state: _State) -> None:
        state.pause = state.next_pause
        state.next_pause = min(LONGEST, 2 * state.next_pause)
