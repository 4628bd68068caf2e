"""Counterfactual replay: what another drafter, width or controller would have done with a run that is over, without the target.

Verification is exact, so a run says the same under every setting of speculation, and a window's outcome is known as soon as its drafts
are: they are accepted while they equal what the run went on to say. So the engine's own scheduler, proposer and `match` go over the
recorded tokens, which stand where the target's draws would; only the model is left out. A drafter that reads more than tokens is replayed
from a table of what it says behind each of them: fewer drafts are the beginning of more.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from power_lab.engine.blocks import BlockPool
from power_lab.engine.config import EngineConfig
from power_lab.engine.plan import Span
from power_lab.engine.request import Finish, Request, SamplingParams
from power_lab.engine.scheduler import Limits, Outcome, Scheduler, blocks_for
from power_lab.engine.speculation.drafters import Draft, DraftAsk, Drafter, make, suffix
from power_lab.engine.speculation.drafters.cursor import Cursor
from power_lab.engine.speculation.recorded import RecordedCosts
from power_lab.engine.speculation.transaction import Proposer, match
from power_lab.engine.trace import DraftTable, RunRecord
from power_lab.errors import ReplayRefused

FROM_TOKENS = ("off", "lookup", "ngram")
"""Drafters that need nothing but tokens; of others a record has to hold what they say (`record="replay"`)."""
FROM_COUNTS = ("fixed", "adaptive")
"""Controllers whose choices follow from accepted drafts alone; the others weigh measured seconds."""
NAN = float("nan")


@dataclass(frozen=True, slots=True)
class ReplayedRound:
    """A round as it would have been.

    Attributes:
        start: absolute position of the first emitted token.
        drafted, accepted, emitted: as in `trace.Round`.
        rows: rows of the step.
        asked: whether a drafter was asked.
        draft_s: seconds of drafting: as the costs say, else as this replay took, or NaN where it looked drafts up in the record; 0 where no
            drafter was asked.
        step_s: seconds of the step as the costs say, NaN where they do not. The first round is the prompt's and costs what it did.
        note, width, why: as in `trace.Round`.
    """

    start: int
    drafted: tuple[int, ...]
    accepted: int
    emitted: tuple[int, ...]
    rows: int
    asked: bool
    draft_s: float
    step_s: float
    note: str = ""
    width: int = -1
    why: str = ""


def replay(
    record: RunRecord, params: SamplingParams, costs: RecordedCosts, clock: Callable[[], float] = time.perf_counter
) -> tuple[ReplayedRound, ...]:
    """The rounds of a recorded run under other settings of speculation.

    The request is alone, on an engine of the recorded settings that holds the recorded prefix and no more; drafters and controllers are
    fresh. What a batch does beside is not in it: it may cut windows for lack of rows, preempt the request, or cut its prompt otherwise.

    Args:
        record: a run that ended by itself or at its limit.
        params: of the run, but for its settings of speculation.
        costs: seconds of steps and drafts. Controllers outside `FROM_COUNTS` decide by them, so rounds are then predictions.
        clock: monotonic seconds, for drafts that the costs do not know.

    Raises:
        ReplayRefused where the record does not hold what the replay needs.
    """
    check(record, params)
    return tuple(_Replay(record, params, costs, clock).rounds())


def check(record: RunRecord, params: SamplingParams) -> None:
    """Raise ReplayRefused, naming what is missing, unless the record can be replayed with that drafter."""
    drafter = params.speculate
    if drafter not in FROM_TOKENS:
        _check_table(record, params)
    if record.finish not in (Finish.STOP, Finish.LENGTH):
        raise ReplayRefused(
            f"finish: the run was ended from outside ({record.finish}), so what it would have said next is not known",
            "Replay a run that ended by itself or at max_tokens.",
        )
    if not 0 < len(record.tokens) <= params.max_tokens or not record.prompt_tokens:
        raise ReplayRefused(
            f"tokens: {len(record.tokens)} after a prompt of {len(record.prompt_tokens)}, with max_tokens {params.max_tokens}",
            "Replay a record as the engine made it.",
        )
    if drafter == "ngram" and (at := _foreign_round(record)) is not None:
        raise ReplayRefused(
            f"rounds[{at}]: 'ngram' drafted here from what earlier requests of the namespace had said, which no record holds",
            "Run the request again with a cache_key of its own, or replay it with 'lookup'.",
        )


def _check_table(record: RunRecord, params: SamplingParams) -> None:
    drafter, table = params.speculate, record.drafts.get(params.speculate)
    if drafter == "auto":
        raise ReplayRefused("speculate: 'auto' is another drafter on another engine", "Name the drafter.")
    if table is None:
        raise ReplayRefused(
            f"speculate: {drafter!r} drafts from more than the request's tokens, and this record does not hold what it drafts",
            f'Use one of {", ".join([*FROM_TOKENS, *record.drafts])}, or run the request again with record="replay" on an engine '
            f"that has {drafter!r}.",
        )
    if table.cut:
        raise ReplayRefused(f"drafts[{drafter!r}]: {table.cut}", 'Run the request again with record="replay".')
    if params.width > table.width and any(len(drafts) == table.width for drafts in table.drafts):
        raise ReplayRefused(
            f"width: {params.width}, but no more than {table.width} drafts were recorded behind a token",
            f'Run the request again with record="replay" and width={params.width}, or use at most {table.width}.',
        )


def _foreign_round(record: RunRecord) -> int | None:
    """The first round whose n-gram drafts the request's own tokens do not explain. A narrower draft is the beginning of a wider one."""
    if record.params.get("speculate") != "ngram":
        return None
    drafter, known = make("ngram"), list(record.prompt_tokens)
    drafter.begin(record.id, known, record.namespace)
    for _ in range(0, len(known), suffix.OWN_PIECE):  # a long prompt is indexed in pieces
        drafter.propose([DraftAsk(record.id, known, 1)])
    for index, entry in enumerate(record.rounds):
        if entry.drafted:
            (draft,) = drafter.propose([DraftAsk(record.id, known, len(entry.drafted))])
            if draft.tokens != entry.drafted:
                return index
        known.extend(entry.emitted)
        drafter.commit(record.id, entry.emitted)
    return None


class _Recorded:
    """A drafter that read more than tokens, as a table of what it says. See `drafters.Drafter`.

    Attributes:
        drawn: how many tokens its latest draft has.
    """

    def __init__(self, name: str, table: DraftTable) -> None:
        self.name, self._table, self._cursor, self.drawn = name, table, Cursor(), 0

    def begin(self, request_id: int, prompt: Sequence[int], namespace: str) -> None:
        """It has read nothing."""

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        return [self._draft(ask) for ask in asks]

    def commit(self, request_id: int, emitted: Sequence[int]) -> None:
        """The next proposal reads these."""

    def end(self, request_id: int) -> None:
        """It serves one request."""

    def _draft(self, ask: DraftAsk) -> Draft:
        table, known = self._table, len(ask.tokens)
        start = self._cursor.settle(ask.tokens)
        self.drawn = 0
        if table.reads and known - start > table.reads:
            return self._cursor.read(ask, table.reads)
        at = known - table.first
        draft = Draft(table.drafts[at][: ask.width], table.confidence[at][: ask.width], table.notes[at])
        self._cursor.drew(ask, draft)
        self.drawn = len(draft.tokens)
        return draft


class _Replay:
    """One request in an engine without a model."""

    def __init__(
        self, record: RunRecord, params: SamplingParams, costs: RecordedCosts, clock: Callable[[], float]
    ) -> None:
        prompt, first = record.prompt_tokens, record.rounds[0]
        self._known = (*prompt, *record.tokens)
        self._finish, self._tables = Finish(record.finish), record.drafts
        self._request = Request(
            id=record.id,
            prompt_len=len(prompt),
            params=params,
            tokens=list(prompt),
            limit=len(prompt) + params.max_tokens,
            end_tokens=frozenset(),  # the recorded tokens say where it ends
            namespace=record.namespace,
        )
        self._cached = list(prompt[: record.cached])
        self._costs = costs
        self._first_s = first.forward_s + first.sample_s + first.commit_s
        config = record.engine.config
        limits = Limits.of(EngineConfig.of({key: config[key] for key in ("step_tokens", "max_batch") if key in config}))
        pages = 2 + 2 * blocks_for(len(self._known) + params.width)  # the prefix's and its own
        self._scheduler = Scheduler(BlockPool(pages), limits, lambda namespace: b"")
        self._asked = 0.0, False  # seconds of the drafter in this round, whether it was asked
        self._looked: _Recorded | None = None
        self._proposer = Proposer(
            self._drafter,
            clock,
            record.engine.vocab,
            step_rows=limits.step_tokens,
            costs=costs,
            on_draft=self._on_draft,
        )

    def _drafter(self, name: str) -> Drafter:
        if name in FROM_TOKENS:
            return make(name)
        self._looked = _Recorded(name, self._tables[name])
        return self._looked

    def rounds(self) -> list[ReplayedRound]:
        self._warm()
        request, rounds = self._request, []
        self._proposer.begin(request)
        self._scheduler.add(request)
        while request.finish is None:
            round_ = self._step(request)
            if round_ is not None:
                rounds.append(round_)
        self._proposer.end(request)
        return rounds

    def _warm(self) -> None:
        """The prefix that the run found in the cache, as an earlier request leaves it: how a prompt is cut depends on it."""
        if not self._cached:
            return
        length = len(self._cached)
        earlier = Request(self._request.id, length, SamplingParams(), self._cached, length + 1, frozenset())
        self._scheduler.add(earlier)
        while earlier.finish is None:
            plan = self._scheduler.plan()
            assert plan is not None, "a lone request always has a next step"
            said = Outcome((0,), 0, Finish.LENGTH) if plan.spans[0].sampled else Outcome()
            self._scheduler.commit(plan, [said])

    def _step(self, request: Request) -> ReplayedRound | None:
        """One step as the engine makes it; None inside the prompt."""
        scheduler, start = self._scheduler, len(request.tokens)
        self._asked = 0.0, False
        rooms = {running.id: scheduler.draft_room(running) for running in scheduler.running}
        proposal = self._proposer.propose(rooms, scheduler.running).get(request.id)
        plan = scheduler.plan()
        assert plan is not None, "a lone request always has a next step"
        (span,) = plan.spans
        drafted = span.tokens[span.rows - span.drafts :]
        outcome = self._verified(start, drafted) if span.sampled else Outcome()
        draft_s, step_s = self._draft_s(), self._step_s(span.rows, first=start == request.prompt_len)
        scheduler.commit(plan, [outcome])
        self._proposer.commit(request, outcome.emitted)
        if not span.sampled:
            return None
        if proposal is not None and proposal.width >= 0:
            self._observe(request, span, outcome.accepted, draft_s, step_s)
        return ReplayedRound(
            start=start,
            drafted=drafted,
            accepted=outcome.accepted,
            emitted=outcome.emitted,
            rows=span.rows,
            asked=self._asked[1],
            draft_s=draft_s,
            step_s=step_s,
            note=proposal.told(drafted) if proposal is not None else "",
            width=proposal.width if proposal is not None else -1,
            why=proposal.why if proposal is not None else "",
        )

    def _verified(self, start: int, drafts: tuple[int, ...]) -> Outcome:
        """What the target would have said of a window: the known tokens, up to the known end."""
        said, end = count(start + 1), len(self._known)
        return match(
            drafts,
            self._known[start : start + len(drafts) + 1],
            lambda token: self._finish if next(said) == end else None,
        )

    def _observe(self, request: Request, span: Span, accepted: int, draft_s: float, step_s: float) -> None:
        controller = request.params.controller
        if controller == "governor" and math.isnan(draft_s + step_s):
            what = f"step of {span.rows} rows" if math.isnan(step_s) else f"draft of {request.params.speculate!r}"
            raise ReplayRefused(
                f"controller: {controller!r} weighs the seconds of each round, and no {what} was measured",
                "Pass runs that had such steps and drafts as costs_from.",
            )
        self._proposer.observe(request, span.drafts, accepted, draft_s + step_s)

    def _on_draft(self, drafter: str, requests: int, width: int, seconds: float) -> None:
        self._asked = seconds, True

    def _draft_s(self) -> float:
        (seconds, asked), drafter = self._asked, self._request.params.speculate
        if not asked:
            return 0.0
        if self._looked is not None:
            known = self._costs.draft(drafter, 1, self._looked.drawn)
            return NAN if known is None else known
        known = self._costs.draft(drafter, 1)
        return seconds if known is None else known

    def _step_s(self, rows: int, *, first: bool) -> float:
        known = self._first_s if first else self._costs.step(rows)
        return NAN if known is None else known
