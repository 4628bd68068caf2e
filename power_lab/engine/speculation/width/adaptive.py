"""A width for each request that follows its acceptance: A3S Power's `AdaptiveSpeculationController`.

The rules are those of its source as of its last indexed commit; where a start outside of the rollback window leads (the wide probe), they
are inferred from its documentation and the names of its tests. The width grows by one after whole rounds, is halved after empty ones,
stays where at least half was accepted, because a step of a known shape costs least, and else follows an average of the accepted lengths.
A request whose drafts fail for a dozen rounds never speculates again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from power_lab.engine.speculation.width import Choice, Costs, WidthAsk

WEIGHT = 0.35  # of the latest round in the average of accepted lengths
WINDOW = 12  # rounds that the circuit looks at
POOR = 0.75  # accepted drafts a round below which, with half of the rounds empty, the circuit opens
INITIAL = 4


@dataclass(slots=True)
class _State:
    """One request: its width, how far that may grow, what it was last moved by, and the accepted lengths of its last rounds."""

    most: int
    width: int
    cap: int
    probing: bool
    why: str = "start"
    mean: float | None = None
    recent: deque[int] = field(default_factory=lambda: deque(maxlen=WINDOW))
    open: bool = False
    guarded: bool = False


class AdaptiveController:
    """Follows the acceptance of each request by itself.

    Args:
        initial: width of a request's first round.
        least: narrowest width (>= 1).
        rollback: drafts that can be taken back without a replay; None where any number can, as with paged KV. A start that it narrows
            is followed by one wide probe: accepted whole, the width jumps to the request's most; else it never passes the window.
    """

    name = "adaptive"

    def __init__(self, initial: int = INITIAL, least: int = 1, rollback: int | None = None) -> None:
        self._initial = initial
        self._least = least
        self._rollback = rollback
        self._states: dict[int, _State | None] = {}

    def begin(self, request_id: int, drafter: str) -> None:
        self._states[request_id] = None  # its most is known when it first asks

    def ask(self, asks: Sequence[WidthAsk], other_rows: int, costs: Costs) -> list[Choice]:
        return [self._choose(ask) for ask in asks]

    def ask_ahead(self, asks: Sequence[WidthAsk], other_rows: int, costs: Costs) -> list[Choice]:
        return self.ask(asks, other_rows, costs)

    def keep(self, asks: Sequence[WidthAsk], other_rows: int, costs: Costs) -> list[Choice]:
        return [self._choose(ask) for ask in asks]

    def observe(self, request_id: int, drafted: int, accepted: int, seconds: float) -> None:
        state = self._states[request_id]
        if state is None or not drafted or state.open:
            return
        self._guard(state, drafted - accepted)
        whole = accepted == drafted
        state.mean = accepted if state.mean is None else WEIGHT * accepted + (1 - WEIGHT) * state.mean
        if state.probing:
            state.probing = False
            if whole:
                state.width, state.why = state.most, f"the first round was accepted whole ({accepted})"
            else:
                state.cap = min(state.cap, self._rollback or state.cap)
                self._move(state, drafted, accepted)
        else:
            self._move(state, drafted, accepted)
        state.recent.append(accepted)
        zeros = state.recent.count(0)
        if len(state.recent) == WINDOW and sum(state.recent) / WINDOW < POOR and 2 * zeros >= WINDOW:
            state.open = True
            state.why = f"{sum(state.recent)} drafts accepted in {WINDOW} rounds, {zeros} of them empty"

    def end(self, request_id: int) -> None:
        self._states.pop(request_id, None)

    def _choose(self, ask: WidthAsk) -> Choice:
        state = self._states[ask.request_id]
        if state is None:
            state = self._states[ask.request_id] = self._start(ask.most)
        drafts = 0 if state.open else min(ask.most, state.width)
        return Choice(drafts, f"{drafts}: {state.why}")

    def _start(self, most: int) -> _State:
        initial = max(min(self._least, most), min(self._initial, most))
        width = initial if self._rollback is None else min(initial, self._rollback)
        return _State(most, width, most, probing=width < initial)

    def _guard(self, state: _State, rejected: int) -> None:
        """A round that could not be rolled back narrows its request to the window."""
        if self._rollback is not None and rejected > self._rollback and state.most > self._rollback:
            state.most = self._rollback
            state.cap = min(state.cap, state.most)
            state.width = min(state.width, state.most)
            state.guarded = True

    def _move(self, state: _State, drafted: int, accepted: int) -> None:
        told = f"{accepted} of {drafted} accepted"
        least = min(self._least, state.cap)
        if not accepted:
            state.width, state.why = max(least, math.ceil(state.width / 2)), f"{told}, halved"
        elif accepted == drafted:
            state.width, state.why = min(state.cap, state.width + 1), f"{told}, one more"
        elif 2 * accepted >= drafted:
            state.why = f"{told}, kept"
        else:
            assert state.mean is not None
            state.width = max(least, min(state.cap, math.ceil(state.mean) + 1))
            state.why = f"{told}, {state.mean:.2f} on average"
