"""Counterfactual replay: what another drafter, width or controller would have done with a run that is over, without the target.

Verification is exact, so a run says the same under every setting of speculation, and a window's outcome is known as soon as its drafts
are: they are accepted while they equal what the run went on to say. So the engine's own scheduler, proposer and `match` go over the
recorded tokens, which stand where the target's draws would; only the model is left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from power_lab.engine.blocks import BlockPool
from power_lab.engine.config import EngineConfig
from power_lab.engine.request import Finish, Request, SamplingParams
from power_lab.engine.scheduler import Limits, Outcome, Scheduler, blocks_for
from power_lab.engine.speculation.drafters import make
from power_lab.engine.speculation.transaction import Proposal, Proposer, match
from power_lab.engine.trace import RunRecord
from power_lab.errors import ReplayRefused

FROM_TOKENS = ("off", "lookup", "ngram")
"""Drafters that need nothing but a request's own tokens, which every record has."""
_WHOLE = (Finish.STOP, Finish.LENGTH)


@dataclass(frozen=True, slots=True)
class ReplayedRound:
    """A round as it would have been.

    Attributes:
        start: absolute position of the first emitted token.
        drafted, accepted, emitted: as in `trace.Round`.
        rows: rows of the step.
        draft_s: seconds that drafting took in this replay; 0 where no drafter was asked.
        asked: whether a drafter was.
        why: why there are no drafts although speculation is on, or "".
    """

    start: int
    drafted: tuple[int, ...]
    accepted: int
    emitted: tuple[int, ...]
    rows: int
    draft_s: float = 0.0
    asked: bool = False
    why: str = ""


def replay(
    record: RunRecord, params: SamplingParams, clock: Callable[[], float] = time.perf_counter
) -> tuple[ReplayedRound, ...]:
    """The rounds of a recorded run under other settings of speculation.

    The request is alone, on an engine of the recorded settings that holds the recorded prefix and no more; drafters are fresh. What
    a batch does beside is not in it: it may cut windows for lack of rows, preempt the request, or cut its prompt otherwise.

    Args:
        record: a run that ended by itself or at its limit.
        params: of the run, but for its settings of speculation.
        clock: monotonic seconds, for the time of drafting.

    Raises:
        ReplayRefused where the record does not hold what the replay needs.
    """
    check(record, params)
    return tuple(_Replay(record, params, clock).rounds())


def check(record: RunRecord, params: SamplingParams) -> None:
    """Raise ReplayRefused, naming what is missing, unless the record can be replayed with that drafter."""
    speculate = params.speculate
    if speculate not in FROM_TOKENS:
        raise ReplayRefused(
            f"speculate: {speculate!r} drafts from more than the request's tokens, and a record holds nothing else",
            f"Use one of {', '.join(FROM_TOKENS)}, or run the request again with {speculate!r}.",
        )
    if record.finish not in _WHOLE:
        raise ReplayRefused(
            f"finish: the run was ended from outside ({record.finish}), so what it would have said next is not known",
            "Replay a run that ended by itself or at max_tokens.",
        )
    if not 0 < len(record.tokens) <= params.max_tokens or not record.prompt_tokens:
        raise ReplayRefused(
            f"tokens: {len(record.tokens)} after a prompt of {len(record.prompt_tokens)}, with max_tokens {params.max_tokens}",
            "Replay a record as the engine made it.",
        )


class _Replay:
    """One request in an engine without a model."""

    def __init__(self, record: RunRecord, params: SamplingParams, clock: Callable[[], float]) -> None:
        prompt = record.prompt_tokens
        self._known = (*prompt, *record.tokens)
        self._finish = Finish(record.finish)
        self._request = Request(
            id=record.id,
            prompt_len=len(prompt),
            params=params,
            tokens=list(prompt),
            limit=len(prompt) + params.max_tokens,
            end_tokens=frozenset(),  # the recorded tokens say where it ends
            namespace=record.namespace,
        )
        config = record.engine.config
        limits = Limits.of(EngineConfig.of({key: config[key] for key in ("step_tokens", "max_batch") if key in config}))
        pages = 2 + 2 * blocks_for(len(self._known) + params.width)  # the prefix's and its own
        self._scheduler = Scheduler(BlockPool(pages), limits, lambda namespace: b"")
        self._proposer = Proposer(make, clock, record.engine.vocab)
        self._cached = list(prompt[: record.cached])

    def rounds(self) -> list[ReplayedRound]:
        self._warm()
        request = self._request
        self._proposer.begin(request)
        self._scheduler.add(request)
        rounds = []
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
        rooms = {running.id: scheduler.draft_room(running) for running in scheduler.running}
        proposal = self._proposer.propose(rooms, scheduler.running).get(request.id)
        plan = scheduler.plan()
        assert plan is not None, "a lone request always has a next step"
        (span,) = plan.spans
        drafted = span.tokens[span.rows - span.drafts :]
        outcome = self._verified(start, drafted) if span.sampled else Outcome()
        scheduler.commit(plan, [outcome])
        self._proposer.commit(request, outcome.emitted)
        if not span.sampled:
            return None
        asked = proposal is not None and rooms[request.id] > 0
        return ReplayedRound(
            start=start,
            drafted=drafted,
            accepted=outcome.accepted,
            emitted=outcome.emitted,
            rows=span.rows,
            draft_s=proposal.seconds if proposal is not None else 0.0,
            asked=asked,
            why=_why(proposal, drafted),
        )

    def _verified(self, start: int, drafts: tuple[int, ...]) -> Outcome:
        """What the target would have said of a window: the known tokens, up to the known end."""
        said = iter(range(start + 1, len(self._known) + 1))

        def terminal(token: int) -> Finish | None:
            return self._finish if next(said) == len(self._known) else None

        return match(drafts, self._known[start : start + len(drafts) + 1], terminal)


def _why(proposal: Proposal | None, drafted: tuple[int, ...]) -> str:
    if proposal is None or drafted:
        return ""
    return proposal.note or "drafts dropped: no rows left in the step"
