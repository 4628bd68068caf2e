"""One speculation round as a transaction: propose, verify by sample-and-match, then commit or restore.

Verification draws the target's own token at every row with noise keyed by its position, so a draft is accepted exactly while it
equals what the target would have said without it. Every emitted token is the target's; speculation cannot change the output at any
temperature, with any sampler chain. (Sample-and-match; for point-mass drafts its acceptance equals that of Leviathan et al. 2023.)

With paged KV the checkpoint is the request's committed length: rejected rows lie beyond it and are overwritten by the next step, so
restoring is not moving that length. `Scheduler.commit` does the moving, for all requests of a step or for none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from power_lab.engine.request import Finish, Request
from power_lab.engine.scheduler import Outcome
from power_lab.engine.speculation.drafters import DraftAsk, Drafter

Terminal = Callable[[int], Finish | None]


def match(drafts: Sequence[int], targets: Sequence[int], terminal: Terminal) -> Outcome:
    """Walk a verified window: emit the target's token at each row while drafts match and nothing ends the request.

    Args:
        drafts: [K] proposed tokens.
        targets: [K + 1] the target's own draws, the last one being the bonus; negative where nothing could be drawn.
        terminal: called once for each emitted token, in order; why the request ends there, or None.
    """
    emitted: list[int] = []
    accepted = 0
    for row, token in enumerate(targets):
        if token < 0:
            return Outcome(tuple(emitted), accepted, Finish.ERROR)
        emitted.append(token)
        matched = row < len(drafts) and drafts[row] == token
        accepted += matched
        finish = terminal(token)
        if finish is not None or not matched:
            return Outcome(tuple(emitted), accepted, finish)
    raise AssertionError("a window has one target row more than drafts")


@dataclass(frozen=True, slots=True)
class Proposal:
    """What drafting came to for one request: why it has no drafts ("" if it has), and the time its drafter took in seconds."""

    note: str
    seconds: float


class Proposer:
    """Asks the drafters before a step and keeps them in step with commits.

    Args:
        drafters: name -> drafter; made lazily by the engine for the names its requests use.
        clock: monotonic seconds.
        vocab: of the target; a draft outside it would read past the embedding.
    """

    def __init__(self, make: Callable[[str], Drafter], clock: Callable[[], float], vocab: int) -> None:
        self._make = make
        self._vocab = vocab
        self._clock = clock
        self._drafters: dict[str, Drafter] = {}
        self._of: dict[int, Drafter] = {}
        self._broken: dict[int, str] = {}

    def begin(self, request: Request) -> None:
        name = request.params.speculate
        if name == "off":
            return
        if name not in self._drafters:
            self._drafters[name] = self._make(name)
        self._drafters[name].begin(request.id, request.tokens, request.namespace)
        self._of[request.id] = self._drafters[name]

    def propose(self, rooms: Mapping[int, int], requests: Sequence[Request]) -> dict[int, Proposal]:
        """Set `drafts` of each speculating request that has room. A drafter that raises costs its drafts, not the request."""
        asks: dict[Drafter, list[tuple[Request, DraftAsk]]] = {}
        proposals = {}
        for request in requests:
            request.drafts = ()
            drafter = self._of.get(request.id)
            if drafter is None:
                continue
            if request.id in self._broken:
                proposals[request.id] = Proposal(self._broken[request.id], 0.0)
                continue
            if rooms[request.id] < 1:
                proposals[request.id] = Proposal("no room: prompt or last token", 0.0)
                continue
            asks.setdefault(drafter, []).append((request, DraftAsk(request.id, request.tokens, rooms[request.id])))
        for drafter, asked in asks.items():
            proposals.update(self._ask(drafter, asked))
        return proposals

    def commit(self, request: Request, emitted: Sequence[int]) -> None:
        """Tell the drafter what was emitted; one that raises is out of step, so it drafts no more for this request."""
        if request.id not in self._of or request.id in self._broken:
            return
        try:
            self._of[request.id].commit(request.id, emitted)
        except Exception as error:  # noqa: BLE001  # a drafter is never worth a request
            self._broken[request.id] = f"{self._of[request.id].name} failed: {type(error).__name__}: {error}"

    def end(self, request: Request) -> None:
        drafter = self._of.pop(request.id, None)
        self._broken.pop(request.id, None)
        if drafter is not None:
            with suppress(Exception):  # a drafter is never worth a request
                drafter.end(request.id)

    def _ask(self, drafter: Drafter, asked: Sequence[tuple[Request, DraftAsk]]) -> dict[int, Proposal]:
        start = self._clock()
        try:
            drafts = drafter.propose([ask for _, ask in asked])
            if len(drafts) != len(asked):
                raise ValueError(f"{len(asked)} asks but {len(drafts)} answers")
            notes = [draft.note or "no earlier match" for draft in drafts]
            drafts = [tuple(draft.tokens[: ask.width]) for (_, ask), draft in zip(asked, drafts, strict=True)]
            if any(not 0 <= token < self._vocab for draft in drafts for token in draft):
                raise ValueError(f"a draft is outside the vocabulary of {self._vocab}")
        except Exception as error:  # noqa: BLE001  # a drafter is never worth a request
            drafts = [()] * len(asked)
            notes = [f"{drafter.name} failed: {type(error).__name__}: {error}"] * len(asked)
        seconds = (self._clock() - start) / len(asked)
        for (request, _), draft in zip(asked, drafts, strict=True):
            request.drafts = draft
        return {
            request.id: Proposal("" if request.drafts else note, seconds)
            for (request, _), note in zip(asked, notes, strict=True)
        }
