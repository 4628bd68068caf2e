"""The width that emits the most tokens a second, as far as survival of drafts and cost of steps are known. The default.

Draft k of a request survives if it and all before it are accepted. A step with the b drafts that are most likely to survive emits one token
for each row that it would have run anyway plus the sum of their survivals, and takes as long as steps of so many rows were measured to
take. The best b is looked for among all: padded steps make costs a staircase, on which the ratio has several peaks. Survival never
grows with k, so the best drafts of each request are its first ones.

The criterion is that of DSpark's scheduler in the form that vLLM gave it (PR 47808). Ours are the learnt survival for drafters without an
opinion, pauses that end, measured drafting, and exploration.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, repeat, zip_longest
from operator import add, truediv

from power_lab.engine.speculation.width import HOT, Choice, Costs, WidthAsk
from power_lab.engine.speculation.width.costs import WIDTHS
from power_lab.engine.speculation.width.survival import FADE, FADE_SHARED, Rate, Survival

MEASURED = 4  # steps without drafts that are run at most to learn what a number of rows costs
STALE = 128  # steps with drafts after which one without is run, so that its cost is known as it is now
FREE = 0.02  # share of a step's seconds below which drafting, or drafting more, is taken to cost nothing
NEAR = 1e-12  # rates that are closer are compared without a division
PROBE = 1  # drafts of the first probe after a pause; doubled while all are accepted
GROW = 8  # rounds after which a width is asked for that costs more and does not pay as far as is known
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
        refused: rounds in a row whose drafts were not worth verifying. wider: rounds since a draft more was asked for, see `GROW`.
        ahead: whether it is asked for before the round ahead is observed.
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
    wider: int = 0
    ahead: bool = False


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


def best(
    survival: Sequence[Sequence[float]], rows: int, costs: Costs, drafting: Sequence[tuple[int, float]] = ()
) -> Best:
    """The drafts that maximise tokens a second.

    Args:
        survival: for each request that of its drafts, none greater than the one before.
        rows: of the step without drafts; each counts as a token, a prompt's too: it waits as long as the others.
        costs: of steps of any size; see `_estimates` for those that were not measured.
        drafting: (width, seconds), ascending: what is added to a step with drafts, where no request has more than so many. What the last
            one does not cover is not drafted. Empty: nothing is added.
    """
    requests = len(survival)
    # Position by position, so that among equals a request's drafts stay in order, and those up to a width are the first ones.
    drafts = list(chain.from_iterable(zip_longest(*survival, fillvalue=-1.0)))
    count = sum(map(len, survival))
    order = sorted(range(len(drafts)), key=drafts.__getitem__, reverse=True)[:count]
    seconds = _estimates(costs.staircase(rows, count + 1), rows)
    chosen: Sequence[int] = ()
    tokens, spent = float(rows), seconds[0]
    for width, extra in drafting or ((len(drafts), 0.0),):
        fitting = order if width * requests >= len(drafts) else [slot for slot in order if slot < width * requests]
        reached = list(accumulate(map(drafts.__getitem__, fitting), initial=float(rows)))
        taken = [seconds[0], *map(add, seconds[1:], repeat(extra))] if extra else seconds
        rates = list(map(truediv, reached, taken))
        peak = max(rates) * (1 - NEAR)
        for budget in [at for at, rate in enumerate(rates) if rate >= peak]:
            if reached[budget] * spent > tokens * taken[budget]:
                chosen, tokens, spent = fitting[:budget], reached[budget], taken[budget]
    widths = [0] * requests
    for slot in chosen:
        widths[slot % requests] += 1
    return Best(tuple(widths), tokens, spent, float(rows), seconds[0])


def best_hot(survival: Sequence[float], rows: int, costs: Costs) -> Best:
    """The same for one request whose rounds stay on the device, of the widths that these have: the host has a round's time for all it does.

    Args:
        survival: of its drafts, none greater than the one before. rows, costs: as of `best`.
    """
    seconds = _estimates(costs.staircase(rows, len(survival) + 1), rows)
    reached = list(accumulate(survival, initial=float(rows)))
    chosen, tokens, spent = 0, float(rows), seconds[0]
    for width in HOT:
        if width < min(len(reached), len(seconds)) and reached[width] * spent > tokens * seconds[width] * (1 + NEAR):
            chosen, tokens, spent = width, reached[width], seconds[width]
    return Best((chosen,), tokens, spent, float(rows), seconds[0])


def _estimates(measured: list[float | None], rows: int) -> list[float]:
    """Seconds of steps of `rows` rows and more, one by one, as measured or guessed; of as many as may be tried.

    A gap costs what the size below it does, so it is tried where it would be best, and known then; the beginning what the first above it
    does. Beyond the last, the line through the last two goes on, up to twice the rows: what is far from all that was measured is come to
    step by step. Where nothing was measured, all cost 1: tokens alone decide.
    """
    if all(measured):
        return measured  # type: ignore[return-value]  # all of them are numbers
    known = [(budget, seconds) for budget, seconds in enumerate(measured) if seconds]
    if not known:
        return [1.0] * len(measured)
    last, (end, above) = known[-2:], known[-1]
    slope = max(0.0, (above - last[0][1]) / (end - last[0][0])) if len(last) == 2 else 0.0
    below = known[0][1]
    estimates = [below := seconds or below for seconds in measured[: end + 1]]
    beyond = min(len(measured), rows + 2 * end + 1) - len(estimates)
    return estimates + [above + slope * budget for budget in range(1, beyond + 1)]


def _call(costs: Costs, drafter: str, requests: int, width: int) -> float:
    """Seconds of a drafter's call; of any width where this one was not measured, and none where no call was."""
    known = costs.draft(drafter, requests, width)
    return (costs.draft(drafter, requests) if known is None else known) or 0.0


def _hot(drafts: int) -> int:
    """The width of the rounds that have so many, or a few more."""
    return next((width for width in HOT if width >= drafts), drafts)


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

    def ask_ahead(self, asks: Sequence[WidthAsk], other_rows: int, costs: Costs) -> list[Choice]:
        choices = self._ask(asks, other_rows, costs, ahead=True)
        self._since[(other_rows + len(asks)).bit_length()] += any(choice.drafts for choice in choices)
        return choices

    def ask(self, asks: Sequence[WidthAsk], other_rows: int, costs: Costs) -> list[Choice]:
        return self._ask(asks, other_rows, costs, ahead=False)

    def _ask(self, asks: Sequence[WidthAsk], other_rows: int, costs: Costs, ahead: bool) -> list[Choice]:
        for ask in asks:
            self._states[ask.request_id].ahead = ahead
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
                drafts = min(ask.most, _hot(state.probe) if ahead else state.probe)
                choices[ask.request_id] = self._give(ask, drafts, f"{drafts}: a probe")
            else:
                open_asks.append(ask)
        choices |= self._bound(open_asks, rows - len(open_asks), costs, ahead)
        return [choices[ask.request_id] for ask in asks]

    def keep(self, asks: Sequence[WidthAsk], other_rows: int, costs: Costs) -> list[Choice]:
        states = [self._states[ask.request_id] for ask in asks]
        survival = [self._survival(ask) for ask in asks]
        found = best(survival, other_rows + len(asks), costs)
        pays, choices = found.why, []
        for ask, state, values, drafts in zip(asks, states, survival, found.drafts, strict=True):
            state.opinion = bool(ask.confidence)
            if not drafts and not state.probe:
                self._refuse(state)
            if state.probe and drafts < min(ask.most, state.probe):
                drafts = min(ask.most, state.probe)
                choices.append(Choice(drafts, f"{drafts}: a probe"))
            else:
                why = pays if drafts else f"the first draft survives with {values[0]:.2f}, which does not pay"
                choices.append(Choice(drafts, f"{drafts}: {why}"))
            state.confidence = ask.confidence[:drafts]
        self._since[(other_rows + len(asks)).bit_length()] += any(choice.drafts for choice in choices)
        return choices

    def observe(self, request_id: int, drafted: int, accepted: int, seconds: float) -> None:
        state = self._states[request_id]
        asked = drafted if state.ahead else state.asked  # another round may have been asked for meanwhile
        if asked:
            state.answered.add(bool(drafted), not drafted, FADE)
        if drafted:
            state.tried = True
            for survival in (state.survival, self._shared[state.drafter]):
                survival.add(drafted, accepted, state.confidence[:drafted])
            if state.probe and not (state.ahead and drafted < state.probe):  # of two probes on their way one is enough
                whole = asked == state.probe or (state.ahead and asked > state.probe)
                state.probe = 2 * state.probe if accepted == drafted and whole else 0
            elif accepted:
                state.next_pause, state.refused = PAUSE, 0
        elif state.probe and asked and state.dear:
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

    def _bound(self, asks: Sequence[WidthAsk], other_rows: int, costs: Costs, ahead: bool) -> dict[int, Choice]:
        """Choices of the requests that neither pause nor are probed, by what is learnt of their drafts."""
        if not asks:
            return {}
        states = [self._states[ask.request_id] for ask in asks]
        free = FREE * (costs.step(other_rows + len(asks)) or 0.0)
        most = max(ask.most for ask in asks)
        drafting = [(most, 0.0)] if ahead else self._drafting(states, most, costs, free)
        dear = ahead or drafting[-1][1] > free
        for state in states:
            state.dear = dear
        if not dear and all(state.opinion for state in states):
            why = "asking costs nothing, and the drafts say how sure they are"
            return {ask.request_id: self._give(ask, ask.most, f"{ask.most}: {why}") for ask in asks}
        survival = [s.survival.learnt(self._shared[s.drafter], ask.most) for s, ask in zip(states, asks, strict=True)]
        if ahead and len(asks) == 1:
            found = best_hot(survival[0], other_rows + 1, costs)
        else:
            found = best(survival, other_rows + len(asks), costs, drafting)
        pays, choices = found.why, {}
        widest = max(found.drafts)
        paid = widest if ahead else next(width for width, _ in drafting if width >= widest)
        for ask, state, values, drafts in zip(asks, states, survival, found.drafts, strict=True):
            if drafts or (state.opinion and not dear):
                drafts = self._grown(state, drafts, paid) if dear else ask.most
                drafts = min(ask.most, _hot(drafts) if ahead else drafts)
                choice = self._give(ask, drafts, f"{drafts}: {pays}")
            elif not state.tried:
                state.probe = PROBE
                choice = self._give(ask, PROBE, f"{PROBE}: a first probe")
            else:
                self._rest(state)
                dearly = f" and costs {1e3 * drafting[0][1]:.2f} ms to make" if drafting[0][1] > free else ""
                why = f"0: the first draft survives with {values[0]:.2f}{dearly}, which does not pay"
                rest, state.pause, state.probe = state.pause, 0, PROBE
                choice = self._give(ask, 0, f"{why}; {rest} rounds more without", rest)
            choices[ask.request_id] = choice
        return choices

    def _drafting(self, states: Sequence[_State], most: int, costs: Costs, free: float) -> list[tuple[int, float]]:
        """Seconds of the drafter calls for these requests by the widest draft, ascending, up to the most; see `best`. A width that is
        cheaper than the next one by less than `free` is left out.

        They are for each call that is answered: a drafter that seldom has drafts costs as often.
        """
        calls: dict[str, list[float]] = {}
        for state in states:
            calls.setdefault(state.drafter, []).append(state.answered.mean(1.0))

        def seconds(width: int) -> float:
            each = ((_call(costs, name, len(rates), width), rates) for name, rates in sorted(calls.items()))
            return sum(one * len(rates) / sum(rates) for one, rates in each)

        levels = [(most, seconds(most))]
        if levels[0][1] - seconds(1) > free:
            for width in reversed(WIDTHS[: bisect_left(WIDTHS, most)]):
                if levels[-1][1] - (less := seconds(width)) > free:
                    levels.append((width, less))
        return levels[::-1]

    def _grown(self, state: _State, drafts: int, paid: int) -> int:
        """One draft more than pays as far as is known, so that the width can grow; where the drafter takes longer for it, seldom."""
        state.wider = (state.wider + 1) % GROW
        return drafts + 1 if drafts < paid or not state.wider else drafts

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
