"""Bringing what is kept of requests back to their committed lengths. No torch.

Whatever a pass writes of a request beside its tokens is a state "after exactly n tokens". A verify writes rows that may be refused, and
then it must go back. There are three means, tried in this order, and `Rollback` is the one place that chooses:

1. cursor: rows behind a length are never read and the next ones overwrite them, so nothing moves but the length (keys and values in pages,
   those of layers with a window too). Chosen at load: an engine with nothing else has no state here, and rounds pay for none.
2. snapshots, bounded: of a recurrent state, or of the rows of a ring that a verify overwrites (`snapshots`).
3. replay: what neither reaches is run again from the last length that is still held, before the request's next step, and counted with its
   seconds. Nobody waits for it where the request has ended.

Target and drafter are brought back by the same call, all requests of a step. What raises, wherever it does, leaves the last commit in
force: a state is then at a length that is committed, or before it and owes the rest. Sampling needs none of this: its noise is keyed by
position and penalties look at the tokens before a row, so a refused draft leaves no trace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import msgspec

from power_lab.engine.plan import StepPlan
from power_lab.engine.report import Decision
from power_lab.engine.request import Request
from power_lab.engine.scheduler import Outcome


@dataclass(frozen=True, slots=True)
class Cursor:
    """A state that goes back by its length alone. name: what it is."""

    name: str


class State(Protocol):
    """What is kept of requests beside their tokens and goes back otherwise. Of one that it does not know yet, it is after 0 tokens.

    Attributes:
        name: what it is. depth: refused drafts that it goes back behind at once (>= 0); of more, tokens are run again.
    """

    name: str
    depth: int

    def begin(self, request_id: int, length: int, rows: int, drafts: int) -> None:
        """So many rows behind the first `length` tokens are written next, of which the last `drafts` may be refused: keep what it takes to
        be at `length` again, and at every length from where the drafts begin, as far as `depth` goes. Older lengths make room."""
        ...

    def held(self, request_id: int, length: int) -> int:
        """The longest length up to this one that `restore` reaches. 0 is always reached."""
        ...

    def restore(self, request_id: int, length: int) -> None:
        """Be what it was after so many tokens, one of the lengths that are held; nothing longer is held then. May be asked for again."""
        ...

    def replay(self, request_id: int, start: int, tokens: Sequence[int]) -> None:
        """Run these tokens again, the first of which is token `start`; `begin` was told of them."""
        ...

    def end(self, request_id: int) -> None:
        """Forget the request, which may begin anew."""
        ...


class Replayed(msgspec.Struct, frozen=True, gc=False):
    """What was run again for one request: passes, and their seconds."""

    passes: int = 0
    seconds: float = 0.0


class Rollback:
    """All that an engine keeps of requests, target's and drafters'.

    `begin` comes before a step is launched, `restore` before it is committed, `abort` instead of that. Of two steps in flight the earlier
    one, no row of which is a draft, is committed first, and the later one aborted first.

    Args:
        states: what there is. clock: monotonic seconds.

    Attributes:
        cursors: names of what a length brings back; states: the others.
    """

    def __init__(self, states: Sequence[State | Cursor], clock: Callable[[], float]) -> None:
        self.cursors = tuple(state.name for state in states if isinstance(state, Cursor))
        self.states = tuple(state for state in states if not isinstance(state, Cursor))
        self._clock = clock
        # Of each request, by state: the length that it is at, or -1 - n while it may be anywhere and lengths up to n can be trusted.
        self._at: dict[int, list[int]] = {}
        self._untold: dict[int, Replayed] = {}

    @property
    def depth(self) -> int | None:
        """Refused drafts that never cost a replay; None where any number can be refused."""
        return min((state.depth for state in self.states), default=None)

    def decision(self) -> Decision:
        """By which means each state goes back, for `explain()`."""
        kept = [
            f"{state.name}: up to {state.depth} refused drafts from snapshots, more by replay" for state in self.states
        ]
        cursors = [f"{', '.join(self.cursors)}: refused drafts move a length"] if self.cursors else []
        value = "cursor, then snapshots, then replay" if self.states else "cursor"
        return Decision(key="rollback", value=value, owner="model", reason="; ".join([*cursors, *kept]))

    def begin(self, plan: StepPlan, requests: Mapping[int, Request]) -> float:
        """Make ready for a step's rows, and run again what is owed; returns the seconds of that. Where it raises, `abort` the plan."""
        seconds = 0.0
        for span in plan.spans if self.states else ():
            request, at = requests[span.request_id], self._at.setdefault(span.request_id, [0] * len(self.states))
            for index, state in enumerate(self.states):
                seconds += self._catch_up(index, request, span.start)
                at[index] = -1 - span.start
                state.begin(span.request_id, span.start, span.rows, span.drafts)
                at[index] = span.start + span.rows
        return seconds

    def told(self, request_id: int) -> Replayed | None:
        """What was run again for a request since this was last asked; None where that is nothing."""
        return self._untold.pop(request_id, None)

    def restore(self, plan: StepPlan, outcomes: Sequence[Outcome | None]) -> None:
        """Bring all to what a step is about to be committed as; None is a span that nobody awaits. Where it raises, `abort` the plan, and
        commit nothing."""
        for span, outcome in zip(plan.spans, outcomes, strict=True) if self.states else ():
            if outcome is None:
                self._back(span.request_id, span.start)
            elif outcome.accepted < span.drafts and outcome.finish is None:
                self._back(span.request_id, span.start + span.rows - span.drafts + outcome.accepted)

    def abort(self, plan: StepPlan) -> None:
        """Bring all back to where a step began. What fails at it is brought back when it is next begun."""
        for span in plan.spans if self.states else ():
            self._back(span.request_id, span.start, suppressed=True)

    def end(self, request_id: int) -> None:
        """A request is over."""
        self._untold.pop(request_id, None)
        if self._at.pop(request_id, None) is not None:
            for state in self.states:
                with suppress(Exception):  # as for drafters: the request is over all the same
                    state.end(request_id)

    def _catch_up(self, index: int, request: Request, length: int) -> float:
        """Bring one state to where its next rows begin; returns the seconds of what is run again for that."""
        state, at = self.states[index], self._at[request.id]
        if not 0 <= at[index] <= length:  # preempted since, or what brought it back has failed
            self._to(index, request.id, length)
        if (start := at[index]) == length:
            return 0.0
        begun = self._clock()
        at[index] = -1 - start
        state.begin(request.id, start, length - start, 0)
        state.replay(request.id, start, request.tokens[start:length])
        at[index] = length
        seconds, before = self._clock() - begun, self._untold.get(request.id, Replayed())
        self._untold[request.id] = Replayed(before.passes + 1, before.seconds + seconds)
        return seconds

    def _back(self, request_id: int, length: int, *, suppressed: bool = False) -> None:
        for index in range(len(self.states)) if request_id in self._at else ():
            try:
                self._to(index, request_id, length)
            except Exception:
                if not suppressed:
                    raise

    def _to(self, index: int, request_id: int, length: int) -> None:
        """Here it is chosen: a snapshot of this length, or the longest one before it, and the rest is owed."""
        state, at = self.states[index], self._at[request_id]
        trusted = length if at[index] >= 0 else min(length, -1 - at[index])
        at[index] = -1 - trusted
        held = state.held(request_id, trusted)
        state.restore(request_id, held)
        at[index] = held
