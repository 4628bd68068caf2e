"""Counterfactual replay: what another drafter, width or controller would have done with a run that is over, without the target.

Verification is exact, so a run says the same under every setting of speculation, and a window's outcome is known as soon as its drafts
are: they are accepted while they equal what the run went on to say. So the engine's own scheduler, proposer and `match` go over the
recorded tokens, which stand where the target's draws would; only the model is left out. A drafter that reads more than tokens is replayed
from a table of what it says behind each of them: fewer drafts are the beginning of more.

Where drafting stayed on the device, each step was planned behind one that was not over. So it is here: controllers choose before they
learn what the round ahead came to, and widths are those of rounds that go from drafter to target.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from power_lab.engine.blocks import BlockPool
from power_lab.engine.config import EngineConfig
from power_lab.engine.plan import Span, StepPlan
from power_lab.engine.request import Finish, Request, SamplingParams
from power_lab.engine.scheduler import Limits, Outcome, Scheduler, blocks_for
from power_lab.engine.speculation.drafters import DraftAsk, Drafter, make, suffix
from power_lab.engine.speculation.drafters.corpus import Corpus
from power_lab.engine.speculation.drafters.tabled import Tabled, TabledHybrid, TabledOnDevice
from power_lab.engine.speculation.recorded import RecordedCosts, RecordedRounds
from power_lab.engine.speculation.transaction import Proposal, Proposer, match
from power_lab.engine.trace import RunRecord
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
            drafter was asked, or it drafts as a part of the step.
        step_s: seconds of the step as the costs say, NaN where they do not. The first round is the prompt's and costs what it did.
        note, width, why, resumed, light, drafter: as in `trace.Round`.
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
    resumed: bool = False
    light: bool = False
    drafter: str = ""


def replay(
    record: RunRecord, params: SamplingParams, costs: RecordedCosts, clock: Callable[[], float] = time.perf_counter
) -> tuple[ReplayedRound, ...]:
    """The rounds of a recorded run under other settings of speculation.

    The request is alone, on an engine of the recorded settings that holds the recorded prefix and no more; drafters and controllers are
    fresh, but for what n-grams find in earlier requests, where the record has these. What a batch does beside is not in it: it may cut
    windows for lack of rows, preempt the request, or cut its prompt otherwise.

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
    if drafter == "ngram" and record.corpus is None and (at := _foreign_round(record)) is not None:
        raise ReplayRefused(
            f"rounds[{at}]: 'ngram' drafted here from what earlier requests of the namespace had said, which this record does not hold",
            "Run the request again with record=\"replay\", which keeps it, or with a cache_key of its own; or replay it with 'lookup'.",
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


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step between its plan and its commit.

    Attributes:
        proposal: how its drafts came about. light: whether the device makes them without a network.
        draft_s, asked: see `ReplayedRound`; what the device drafts is not in them.
    """

    plan: StepPlan
    proposal: Proposal | None
    light: bool
    draft_s: float
    asked: bool


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
        self._corpus = record.corpus
        self._costs = costs
        self._first_s = first.forward_s + first.sample_s + first.commit_s
        config = record.engine.config
        limits = Limits.of(EngineConfig.of({key: config[key] for key in ("step_tokens", "max_batch") if key in config}))
        pages = 2 + 2 * blocks_for(len(self._known) + params.width)  # the prefix's and its own
        self._scheduler = Scheduler(BlockPool(pages), limits, lambda namespace: b"")
        self._asked = 0.0, False  # seconds of the drafter in the latest round, whether it was asked
        self._looked: Tabled | None = None
        self._flights: deque[_Flight] = deque()
        self._proposer = Proposer(
            self._drafter,
            clock,
            record.engine.vocab,
            step_rows=limits.step_tokens,
            costs=costs,
            rounds=RecordedRounds(costs, params.speculate),
            on_draft=self._on_draft,
        )

    def _drafter(self, name: str) -> Drafter:
        if name == "ngram" and self._corpus is not None:
            return suffix.NgramDrafter(Corpus.of(self._request.namespace, self._corpus))
        if name in FROM_TOKENS:
            return make(name)
        table = self._tables[name]
        kind = Tabled if not table.most else TabledHybrid if name == "hybrid" else TabledOnDevice
        self._looked = kind(name, table)
        return self._looked

    def rounds(self) -> list[ReplayedRound]:
        self._warm()
        request, rounds = self._request, []
        self._proposer.begin(request)
        self._scheduler.add(request)
        while request.finish is None:
            if not self._flights:
                self._launch(request)
            if self._behind is not None and len(self._flights) == 1:
                self._launch(request)
            round_ = self._land(request, self._flights[0])
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

    @property
    def _behind(self) -> TabledOnDevice | None:
        """What drafts on the device, where it can: then a step is planned while the one before it runs."""
        return self._looked if isinstance(self._looked, TabledOnDevice) and self._request.resumable else None

    def _launch(self, request: Request) -> None:
        """Plan a step as the engine does, behind the one in flight if there is one; that may have to be waited for."""
        scheduler, self._asked, proposal = self._scheduler, (0.0, False), None
        ahead = self._flights[0].plan.spans[0] if self._flights else None
        light = self._behind is not None and self._behind.light(request.id)
        resumed = ahead is not None and ahead.sampled > 0 and not (request.foreseeable and not ahead.drafts)
        if ahead is None:
            rooms = {running.id: scheduler.draft_room(running) for running in scheduler.running}
            made = self._proposer.propose(rooms, scheduler.running, ahead=self._behind is not None)
            proposal = made.get(request.id)
        elif resumed:
            resumption = self._proposer.resume(scheduler.resumed_rooms(), scheduler.running)
            assert resumption is not None, "a lone request has one drafter"
            proposal = resumption.proposals.get(request.id)
        plan = scheduler.plan(resume=resumed)
        if plan is None:
            assert ahead is not None, "a lone request always has a next step"
            return
        if ahead is not None and not resumed:
            proposal = self._proposer.rest([request]).get(request.id)
        self._flights.append(_Flight(plan, proposal, light, self._draft_s(), self._asked[1]))

    def _land(self, request: Request, flight: _Flight) -> ReplayedRound | None:
        """Commit a step as the engine does; None inside the prompt."""
        scheduler, start, proposal = self._scheduler, len(request.tokens), flight.proposal
        plan = scheduler.resolve(flight.plan, [self._onward(span, flight.light) for span in flight.plan.spans])
        (span,) = plan.spans
        drafted = span.tokens[span.rows - span.drafts :]
        outcome = self._verified(start, drafted) if span.sampled else Outcome()
        resumed = proposal is not None and proposal.resumed and bool(drafted)
        step_s = self._step_s(span.rows, flight.light, first=start == request.prompt_len, resumed=resumed)
        scheduler.commit(plan, [outcome])
        self._flights.popleft()
        self._proposer.commit(request, outcome.emitted)
        if not span.sampled:
            return None
        if proposal is not None and proposal.width >= 0:
            self._observe(request, span, outcome.accepted, flight.draft_s, step_s)
        return ReplayedRound(
            start=start,
            drafted=drafted,
            accepted=outcome.accepted,
            emitted=outcome.emitted,
            rows=span.rows,
            asked=flight.asked or resumed,
            draft_s=flight.draft_s,
            step_s=step_s,
            note=proposal.told(drafted) if proposal is not None else "",
            width=proposal.width if proposal is not None else -1,
            why=proposal.why if proposal is not None else "",
            resumed=resumed,
            light=resumed and flight.light,
            drafter=proposal.drafter if proposal is not None and drafted else "",
        )

    def _onward(self, span: Span, light: bool) -> tuple[int, ...]:
        """What the device has drafted in this span, if it has."""
        if span.resumes < 0 or not span.drafts:
            return ()
        assert self._behind is not None, "drafts are planned that nobody makes"
        return self._behind.onward(self._request.tokens, span.drafts, light)

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

    def _step_s(self, rows: int, light: bool, *, first: bool, resumed: bool) -> float:
        costs, drafter = self._costs, self._request.params.speculate
        known = self._first_s if first else costs.resumed(drafter, rows, light) if resumed else costs.step(rows)
        return NAN if known is None else known
