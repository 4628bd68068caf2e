"""What a replay needs of drafters that read more than tokens: what each says behind every token of a request that is over.

They are asked between the engine's steps, behind one token of each such request a time, so that others are not held up for long. The last
token comes first: what a drafter keeps of its own drafts goes to the slots behind the tokens that are known, over what it had of the
output's next ones, and only those before are still to be asked behind. For this the request has kept its blocks, and shares none of these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from power_lab.engine.request import Request
from power_lab.engine.scheduler import blocks_for
from power_lab.engine.speculation.drafters import Draft, DraftAsk, Drafter
from power_lab.engine.speculation.drafters.neural import Resuming
from power_lab.engine.trace import DraftTable

CUT = "the request was cancelled or ran out of time, or the engine was closed, before all was recorded"
STUCK = "the drafter did not get to read the request's tokens, as others took its memory"
PATIENCE = 4096  # calls beyond one for each token in which a drafter may go on reading


@dataclass(slots=True, eq=False)
class _Part:
    """One drafter's share of a recording: answers from the last token back, and how often it has asked for patience.

    Attributes:
        most: as in `DraftTable`.
    """

    drafter: Drafter
    most: int = 0
    answers: list[Draft] = field(default_factory=list)
    calls: list[tuple[int, float]] = field(default_factory=list)
    waits: int = 0
    cut: str = ""

    def table(self, last: int, width: int, cut: str) -> DraftTable:
        answers = self.answers[::-1]
        return DraftTable(
            first=last + 1 - len(answers),
            width=width,
            drafts=tuple(answer.tokens for answer in answers),
            confidence=tuple(answer.confidence for answer in answers),
            notes=tuple(answer.note for answer in answers),
            reads=getattr(self.drafter, "reads", 0),  # most read with the target
            calls=tuple(self.calls),
            most=self.most,
            cut=self.cut or cut,
        )


class _Recording:
    """Of one request.

    Attributes:
        known: how many tokens the drafts at hand are behind.
    """

    def __init__(self, request: Request, drafters: Mapping[str, Drafter], resumes: bool) -> None:
        self.request = request
        self.parts = {
            name: _Part(drafter, drafter.most if resumes and isinstance(drafter, Resuming) else 0)
            for name, drafter in drafters.items()
        }
        self._last = min(len(request.tokens) - 1, request.limit - 2)  # behind more tokens there is no room for a draft
        self.known = self._last

    @property
    def whole(self) -> bool:
        return self.known < self.request.prompt_len

    @property
    def done(self) -> bool:
        return self.whole or all(part.cut for part in self.parts.values())

    def missing(self) -> list[tuple[str, _Part]]:
        """Drafters that have not answered behind the tokens at hand."""
        answered = self._last - self.known
        return [(name, part) for name, part in self.parts.items() if not part.cut and len(part.answers) == answered]

    def ask(self) -> DraftAsk:
        request, known = self.request, self.known
        room = min(request.params.width, request.limit - known - 1)
        blocks = request.blocks[: blocks_for(known - 1)]
        return DraftAsk(request.id, request.tokens[:known], room, request.params, blocks, known - 1)

    def take(self, part: _Part, draft: Draft) -> None:
        """An answer behind the tokens at hand."""
        if not draft.later:
            part.answers.append(draft)
            return
        part.waits += 1
        if part.waits > PATIENCE + len(self.request.tokens):
            part.cut = STUCK

    def advance(self) -> None:
        """Go to the token before, if all drafters have answered."""
        if not self.missing():
            self.known -= 1

    def tables(self) -> dict[str, DraftTable]:
        cut, width = "" if self.whole else CUT, self.request.params.width
        return {name: part.table(self._last, width, cut) for name, part in self.parts.items()}


class Recorder:
    """Asks drafters behind the tokens of requests that are over and have kept their blocks.

    Args:
        drafters: that read more than tokens, by name; all of them are asked, whatever the request itself used.
        batch: most requests of one call. clock: monotonic seconds.
        resumes: whether the engine's steps go on from one another on the device, drafts included.
    """

    def __init__(
        self, drafters: Mapping[str, Drafter], batch: int, clock: Callable[[], float], *, resumes: bool
    ) -> None:
        self._drafters = dict(drafters)
        self._batch = batch
        self._clock = clock
        self._resumes = resumes
        self._recordings: dict[int, _Recording] = {}

    @property
    def able(self) -> bool:
        """Whether there is anybody to ask."""
        return bool(self._drafters)

    @property
    def pending(self) -> bool:
        return bool(self._recordings)

    def __contains__(self, request: Request) -> bool:
        return request.id in self._recordings

    def add(self, request: Request) -> None:
        """A request is over. No drafter knows it any more."""
        recording = self._recordings[request.id] = _Recording(request, self._drafters, self._resumes)
        for part in recording.parts.values():
            try:
                part.drafter.begin(request.id, request.tokens, request.namespace)
            except Exception as error:  # noqa: BLE001  # a drafter is never worth a request
                part.cut = _told(part.drafter, error)

    def advance(self) -> list[Request]:
        """Ask behind one token of each request, and return those that are done. They are to be ended."""
        over = [one.request for one in self._recordings.values() if self._over(one)]
        going = [one for one in self._recordings.values() if one.request not in over][: self._batch]
        for name in self._drafters:
            self._ask([(one, part) for one in going for wanted, part in one.missing() if wanted == name])
        for one in going:
            one.advance()
        return [*over, *(one.request for one in going if one.done)]

    def end(self, request: Request) -> dict[str, DraftTable]:
        """Forget a request. What was recorded of it; nothing of others."""
        recording = self._recordings.pop(request.id, None)
        if recording is None:
            return {}
        for part in recording.parts.values():
            with suppress(Exception):
                part.drafter.end(request.id)
        return recording.tables()

    def _over(self, one: _Recording) -> bool:
        request = one.request
        late = request.deadline is not None and self._clock() >= request.deadline
        return one.done or request.cancelled or late

    def _ask(self, wanted: Sequence[tuple[_Recording, _Part]]) -> None:
        """One call of one drafter. Where it fails, its part of these recordings ends."""
        if not wanted:
            return
        drafter, asks = wanted[0][1].drafter, [one.ask() for one, _ in wanted]
        start = self._clock()
        try:
            drafts = drafter.propose(asks)
            if len(drafts) != len(asks):
                raise ValueError(f"{len(asks)} asks but {len(drafts)} answers")
        except Exception as error:  # noqa: BLE001
            for _, part in wanted:
                part.cut = _told(drafter, error)
            return
        seconds = self._clock() - start
        for (one, part), draft in zip(wanted, drafts, strict=True):
            one.take(part, draft)
        if len(asks) == 1:
            wanted[0][1].calls.append((len(drafts[0].tokens), seconds))


def _told(drafter: Drafter, error: Exception) -> str:
    return f"{drafter.name} failed: {type(error).__name__}: {error}"
