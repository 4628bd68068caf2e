"""The iteration-level scheduler: one token budget a step, immutable plans, one writer. No torch.

There are no phases: each step gives every running request rows so that its computed tokens catch up with its known tokens and its
drafts; chunked prefill, prefix hits, verification and resumption after preemption all follow from that one rule.

`plan` may admit and preempt (each of which is complete in itself) and attaches fresh blocks; `abort` gives those back; `commit` alone
moves lengths, seals blocks and ends requests. One that is `recorded` keeps its blocks behind its end, until `release`.

A step may be planned while the one before it is still running: each of its requests is then taken as it will be after it, its next token as
known though its value is not. Such a plan preempts nobody. When a request turns out to have ended, its rows of the later step compute
for nothing, in blocks that are given back to whoever comes after it on the device.

Where drafts are verified in the step that runs, not even the number of tokens is known that a request will have. The plan behind it then
`resume`s: its spans are as far on as they can be, with blocks for that, the device puts their rows where they belong, and `resolve` says
which that was, once the step before is committed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from power_lab.engine.blocks import BlockPool
from power_lab.engine.config import EngineConfig
from power_lab.engine.plan import UNKNOWN, Span, StepPlan
from power_lab.engine.prefix import BLOCK_TOKENS, chain
from power_lab.engine.request import Finish, Request
from power_lab.errors import DeadlineExceeded, QueueFull, RequestCancelled


class Outcome(msgspec.Struct, frozen=True, gc=False):
    """What one span's rows came to: tokens to emit, how many of them are accepted drafts, and whether the request ends."""

    emitted: tuple[int, ...] = ()
    accepted: int = 0
    finish: Finish | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a step and of the queue.

    Attributes:
        step_tokens: rows of one step.
        sampled_rows: logit rows of one step; at least max_batch.
        max_batch: running requests.
        queue: waiting requests.
    """

    step_tokens: int
    sampled_rows: int
    max_batch: int
    queue: int

    @classmethod
    def of(cls, config: EngineConfig) -> Limits:
        return cls(
            step_tokens=config.step_tokens,
            sampled_rows=max(config.max_batch, min(config.step_tokens, 256)),
            max_batch=config.max_batch,
            queue=config.queue_limit,
        )


def blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


class _Then(msgspec.Struct, frozen=True, gc=False):
    """A request as it will be after the step in flight, or is where that has nothing of it.

    Attributes:
        computed, known: its tokens, at most.
        span: of the plan in flight, -1: none. draw: which draw of that step its last token is, -1: it is known already.
    """

    computed: int
    known: int
    span: int = -1
    draw: int = -1


class _Short(Exception):
    """A step that is planned ahead would have to preempt."""


class Scheduler:
    """Decides which tokens are computed next and owns all request and block state.

    Args:
        pool: the KV blocks.
        limits: bounds.
        root: namespace -> root digest of its prefix chain.
        reuse: whether full blocks are published for later requests.
    """

    def __init__(self, pool: BlockPool, limits: Limits, root: Callable[[str], bytes], *, reuse: bool = True) -> None:
        self.pool = pool
        self.limits = limits
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.kept: list[Request] = []  # over, and not yet released
        self.preemptions = 0
        self._root = root
        self._reuse = reuse
        self._steps = 0
        self._flying: list[StepPlan] = []  # planned, neither committed nor aborted; at most two
        # (step, request) in flight whose request ended or lost its blocks meanwhile.
        self._lost: set[tuple[int, int]] = set()

    def __iter__(self) -> Iterator[Request]:
        yield from self.running
        yield from self.waiting

    @property
    def idle(self) -> bool:
        return not self.running and not self.waiting

    def add(self, request: Request) -> None:
        """Queue a request. Raises QueueFull, changing nothing, when the bounded queue is full."""
        if len(self.waiting) >= self.limits.queue:
            raise QueueFull(
                f"queue_limit: {self.limits.queue} requests are already waiting.", "Wait for some to end, or raise it."
            )
        self.waiting.append(request)

    def expire(self, now: float) -> list[Request]:
        """End cancelled requests and those past their deadline; cancellation wins a tie. Returns the ended ones."""
        ended = [
            request
            for request in (*self.running, *self.waiting)
            if request.cancelled or (request.deadline is not None and now >= request.deadline)
        ]
        for request in ended:
            if request.cancelled:
                self.end(request, Finish.CANCELLED, RequestCancelled(f"Request {request.id} was cancelled."))
            else:
                error = DeadlineExceeded(f"Request {request.id} passed its deadline after {request.emitted} tokens.")
                self.end(request, Finish.DEADLINE, error)
        return ended

    def end(self, request: Request, finish: Finish, error: Exception | None = None) -> None:
        """Take a request out and give its blocks back."""
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self._drop_blocks(request)
        self._lose(request)
        request.finish, request.error = finish, error

    def release(self, request: Request) -> None:
        """Give the blocks of a request back that was kept when it ended; of others they are given back already."""
        if request in self.kept:
            self.kept.remove(request)
            self._drop_blocks(request)

    def draft_room(self, request: Request) -> int:
        """How many drafts the next step can verify for a request: 0 unless exactly one known token is not computed yet."""
        if len(request.tokens) - request.computed != 1:
            return 0
        return min(request.params.width, request.limit - len(request.tokens) - 1)

    def resumed_rooms(self) -> dict[int, int]:
        """How many drafts each request of the step in flight can have verified by the step behind it, whatever comes of this one. Those
        that may have come to their limit by then are left out."""
        rooms = {}
        for request, then in zip(self.running, self._afterwards(), strict=True):
            if then.draw >= 0:
                room = request.limit - then.known - 1
                if room >= 0:
                    rooms[request.id] = min(request.params.width, room)
        return rooms

    def plan(self, resume: bool = False) -> StepPlan | None:
        """Choose the next step's rows; None when nothing can run, or not before the step in flight is committed.

        resume: whether spans go on from those of the step in flight; drafts are then `UNKNOWN` tokens.
        """
        if len(self._flying) > 1 or not (resume or self._foreseen()):
            return None
        spans: list[Span] = []
        preempted: list[int] = []
        rows, logits = self.limits.step_tokens, self.limits.sampled_rows
        running, afterwards = list(self.running), self._afterwards()
        # Each request behind the one at hand, and the first that could be admitted, keeps a row, and each behind it the blocks of
        # its known tokens: so drafts never starve a neighbour and never preempt one.
        behind = len(running) + (bool(self.waiting) and len(running) < self.limits.max_batch)
        lacking = [
            blocks_for(then.known) - len(request.blocks) for request, then in zip(running, afterwards, strict=True)
        ]
        owed = sum(lacking)
        for request, then, lacks in zip(running, afterwards, lacking, strict=True):
            behind -= 1
            owed -= lacks
            if request.id in preempted:
                continue
            try:
                span = self._grow(request, then, rows, min(rows, logits) - behind - 1, owed, preempted, resume)
            except _Short:
                self._give_back(spans)
                return self._nothing()
            if span is not None:
                spans.append(span)
                rows -= len(span.tokens)
                logits -= span.sampled or 1
        if not preempted:
            self._admit(spans, rows, logits)
        if not spans:
            return self._nothing()
        self._steps += 1
        plan = StepPlan(self._steps - 1, tuple(spans), tuple(preempted))
        self._flying.append(plan)
        return plan

    def abort(self, plan: StepPlan) -> None:
        """Give back what a plan attached; no length has moved. Of two plans in flight the later one goes first."""
        assert plan is self._flying[-1], "an earlier step is aborted after the later one"
        spans = self._awaited(plan)
        self._land(plan)
        self._give_back(spans)

    def resolve(self, plan: StepPlan, drafts: Sequence[Sequence[int]]) -> StepPlan:
        """The oldest plan in flight as it turned out to be, which takes its place: where its spans went on from, with which tokens.

        drafts: of each span, as they were made on the device. Those that nobody awaits stay as they are.
        """
        assert plan is self._flying[0], "the step before is not committed yet"
        if all(span.resumes < 0 for span in plan.spans):
            return plan
        by_id = {request.id: request for request in self.running}
        spans = []
        for span, awaited, own in zip(plan.spans, self.awaited(plan), drafts, strict=True):
            if awaited and span.resumes >= 0:
                request = by_id[span.request_id]
                assert request.computed == len(request.tokens) - 1 <= span.start, f"request {request.id} is elsewhere"
                assert len(own) == span.drafts, "other drafts than were planned"
                tokens = (request.tokens[-1], *own)
                spans.append(msgspec.structs.replace(span, start=request.computed, tokens=tokens, resumes=-1))
            else:
                spans.append(span)
        self._flying[0] = StepPlan(plan.step, tuple(spans), plan.preempted)
        return self._flying[0]

    def abort_all(self) -> None:
        """Give back what all steps in flight attached; one whose commit has begun is none of them."""
        while self._flying:
            self.abort(self._flying[-1])

    def awaited(self, plan: StepPlan) -> tuple[bool, ...]:
        """For each span of a step in flight whether its request still waits for it: it has neither ended nor been preempted since."""
        if not self._lost:
            return (True,) * len(plan.spans)
        return tuple((plan.step, span.request_id) not in self._lost for span in plan.spans)

    def commit(self, plan: StepPlan, outcomes: Sequence[Outcome | None]) -> list[Request]:
        """Apply a whole step: lengths, sealed blocks, emitted tokens, ends. Returns the requests that ended.

        `outcomes` has None for exactly those spans that nobody awaits. Everything is checked before anything changes; a plan that does not
        fit the state raises AssertionError.
        """
        awaited = self.awaited(plan)
        if not self._flying or plan is not self._flying[0] or [o is not None for o in outcomes] != list(awaited):
            raise AssertionError("steps are committed whole and in order")
        by_id = {request.id: request for request in self.running}
        settled = [
            (by_id[span.request_id], span, outcome)
            for span, outcome in zip(plan.spans, outcomes, strict=True)
            if outcome is not None
        ]
        for request, span, outcome in settled:
            _check(request, span, outcome)
        self._land(plan)
        ended = []
        for request, span, outcome in settled:
            request.drafts = ()
            request.tokens.extend(outcome.emitted)
            request.computed = span.start + len(span.tokens) - span.drafts + outcome.accepted
            if outcome.finish is not Finish.ERROR:  # blocks of a failed request are never offered to others
                self._settle(request, span)
            if outcome.finish is not None:
                if request.recorded and outcome.finish is not Finish.ERROR:
                    self._keep(request, outcome.finish)
                else:
                    self.end(request, outcome.finish)
                ended.append(request)
        return ended

    def check(self) -> None:
        """Assert the block invariants and that each table covers exactly its computed tokens and those in flight (between steps)."""
        self.pool.check([request.blocks for request in (*self, *self.kept)])
        for request in self:
            assert len(request.blocks) == blocks_for(max(request.computed, *self._ends(request), 0)), (
                f"request {request.id}: table and length disagree"
            )
            assert request.computed < len(request.tokens), f"request {request.id}: nothing left to compute"

    def _keep(self, request: Request, finish: Finish) -> None:
        """Take a request out whose blocks are still read, until `release`."""
        self.running.remove(request)
        self._lose(request)
        request.finish = finish
        self.kept.append(request)

    def _awaited(self, plan: StepPlan) -> list[Span]:
        return [span for span, awaited in zip(plan.spans, self.awaited(plan), strict=True) if awaited]

    def _lose(self, request: Request) -> None:
        self._lost |= {(plan.step, request.id) for plan in self._flying}

    def _land(self, plan: StepPlan) -> None:
        """A step is in flight no longer."""
        self._flying.remove(plan)
        if self._lost:
            self._lost = {(step, request) for step, request in self._lost if step != plan.step}

    def _foreseen(self) -> bool:
        """Whether each request of the step in flight, if there is one, will have one token more after it, whatever it is."""
        if not self._flying:
            return True
        by_id = {request.id: request for request in self.running}
        spans = [span for plan in self._flying for span in self._awaited(plan)]
        return all(not span.drafts and by_id[span.request_id].foreseeable for span in spans)

    def _afterwards(self) -> list[_Then]:
        """Each running request as it will be after the step in flight."""
        flying: dict[int, tuple[Span, int, int]] = {}
        for plan in self._flying:
            draw = 0
            for at, (span, awaited) in enumerate(zip(plan.spans, self.awaited(plan), strict=True)):
                if awaited:
                    flying[span.request_id] = span, at, draw
                draw += span.sampled
        return [_then(request, flying.get(request.id)) for request in self.running]

    def _nothing(self) -> None:
        """No plan: drafts of this step are not those of the next one."""
        for request in self.running:
            request.drafts = ()

    def _give_back(self, spans: Sequence[Span]) -> None:
        by_id = {request.id: request for request in self.running}
        for span in spans:
            request = by_id[span.request_id]
            request.drafts = ()
            if len(request.blocks) > blocks_for(request.computed):
                self._trim(request)

    def _trim(self, request: Request) -> None:
        """Give the blocks back that neither its computed tokens nor a step in flight need."""
        keep = blocks_for(max(request.computed, *self._ends(request), 0))
        self.pool.release(request.blocks[keep:])
        del request.blocks[keep:]

    def _ends(self, request: Request) -> list[int]:
        """Positions behind what steps in flight compute of it, at most."""
        spans = (span for plan in self._flying for span in self._awaited(plan))
        return [span.start + span.rows for span in spans if span.request_id == request.id]

    def _grow(
        self,
        request: Request,
        then: _Then,
        rows: int,
        draft_rows: int,
        owed: int,
        preempted: list[int],
        resume: bool = False,
    ) -> Span | None:
        """Rows for a running request, preempting later ones if the pool is short. `owed` blocks are not for its drafts."""
        end = then.known if then.known - then.computed <= rows else _chunk_end(then.computed, then.known, rows)
        if end <= then.computed or (then.span >= 0 and then.known >= request.limit):  # its last token is on its way
            return None
        drafts = request.drafts
        if drafts:
            drafts = drafts[: max(0, draft_rows)] if end == then.computed + 1 == then.known else ()
            room = (len(request.blocks) + self.pool.available - owed) * BLOCK_TOKENS
            drafts = drafts[: max(0, room - end)]
        short = blocks_for(end + len(drafts)) - len(request.blocks)
        while short > 0:
            fresh = self.pool.allocate(short)
            if fresh is not None:
                request.blocks.extend(fresh)
                break
            if self._flying:
                raise _Short
            victim = self.running[-1]
            self.preempt(victim)
            preempted.append(victim.id)
            if victim is request:
                return None
        return self._span(request, then, end, drafts, resume)

    def _admit(self, spans: list[Span], rows: int, logits: int) -> None:
        """Start waiting requests, first come first served, while rows, logit rows, batch and blocks last."""
        while self.waiting and min(rows, logits) > 0 and len(self.running) < self.limits.max_batch:
            request = self.waiting[0]
            hits = self._hits(request)
            spare = len(self.running)  # each running request may need a block soon: do not admit into a preemption
            idle_hits = sum(self.pool[block].refs == 0 for block in hits)
            if blocks_for(len(request.tokens)) - len(hits) + idle_hits + spare > self.pool.available:
                return
            for block in hits:
                self.pool.take(block)
            request.blocks, request.computed = list(hits), len(hits) * BLOCK_TOKENS
            if not request.preemptions:
                request.cached = request.computed
            end = _chunk_end(request.computed, len(request.tokens), rows)
            fresh = self.pool.allocate(blocks_for(end) - len(hits))
            assert fresh is not None, "room was checked before blocks were taken"
            request.blocks.extend(fresh)
            self.waiting.popleft()
            self.running.append(request)
            span = self._span(request, _Then(request.computed, len(request.tokens)), end)
            spans.append(span)
            rows -= span.rows
            logits -= span.sampled

    def _hits(self, request: Request) -> list[int]:
        """Longest run of cached blocks; at least one token is always left to compute."""
        if not self._reuse:
            return []
        full = min(len(request.tokens) - 1, request.shareable) // BLOCK_TOKENS
        hits: list[int] = []
        for digest in chain(self._root(request.namespace), request.tokens, full, request.hashes)[:full]:
            block = self.pool.lookup(digest)
            if block is None:
                break
            hits.append(block)
        return hits

    def _span(
        self, request: Request, then: _Then, end: int, drafts: tuple[int, ...] = (), resume: bool = False
    ) -> Span:
        """Rows from `then` on, in blocks that the request has."""
        start, drawn = then.computed, then.draw >= 0
        if resume and drawn:
            count, blocks = 1 + len(drafts), self._table(request, start + 1 + len(drafts))
            return Span(request.id, start, (UNKNOWN,) * count, len(drafts), count, blocks, then.span)
        known = (-then.draw - 1,) if drawn else ()  # the token at the end is the one that is being drawn
        tokens = (*request.tokens[start:end], *known, *drafts)
        sampled = len(drafts) + 1 if drawn or end == len(request.tokens) else 0
        return Span(request.id, start, tokens, len(drafts), sampled, self._table(request, start + len(tokens)))

    def _table(self, request: Request, end: int) -> tuple[int, ...]:
        """The blocks that cover positions up to `end`. Any behind these were for a step in flight, and are given back with it."""
        return tuple(request.blocks[: blocks_for(end)])

    def preempt(self, request: Request) -> None:
        """Back to the front of the queue; its sealed blocks stay cached, so resuming recomputes only what was evicted."""
        self.running.remove(request)
        self._drop_blocks(request)
        self._lose(request)
        request.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(request)

    def _drop_blocks(self, request: Request) -> None:
        self.pool.release(request.blocks)
        request.blocks = []
        request.computed = 0
        request.drafts = ()

    def _settle(self, request: Request, span: Span) -> None:
        """Seal blocks that became full and give back those that only held rejected drafts."""
        if len(request.blocks) > blocks_for(request.computed):
            self._trim(request)
        first = span.start // BLOCK_TOKENS
        if not self._reuse or first >= request.computed // BLOCK_TOKENS:
            return
        full = min(request.computed, request.shareable) // BLOCK_TOKENS
        if first >= full:
            return
        start = self._root(request.namespace)
        chain(start, request.tokens, full, request.hashes)
        for index in range(first, full):
            parent = request.hashes[index - 1] if index else start
            request.blocks[index] = self.pool.seal(request.blocks[index], request.hashes[index], parent, index)


def _then(request: Request, flying: tuple[Span, int, int] | None) -> _Then:
    """flying: its span of the step in flight, where that is in the plan, and its first draw."""
    known = len(request.tokens)
    if flying is None:
        return _Then(request.computed, known)
    span, at, draw = flying  # the step before this one is committed: the request says where the span begins
    computed = request.computed + len(span.tokens)
    return _Then(computed, known + 1 + span.drafts, at, draw) if span.sampled else _Then(computed, known, at)


def _chunk_end(computed: int, known: int, rows: int) -> int:
    """Where this step's known tokens end: at all of them if they fit, else on a block boundary if one is within reach."""
    end = min(known, computed + rows)
    if end < known and end // BLOCK_TOKENS * BLOCK_TOKENS > computed:
        end = end // BLOCK_TOKENS * BLOCK_TOKENS
    return end


def _check(request: Request, span: Span, outcome: Outcome) -> None:
    emitted, accepted, finish = len(outcome.emitted), outcome.accepted, outcome.finish
    assert request.computed == span.start and len(request.blocks) >= len(span.blocks), (
        f"request {request.id} moved since the plan"
    )
    assert 0 <= accepted <= span.drafts and accepted <= emitted, "more accepted than drafted or emitted"
    assert emitted <= span.sampled, "more emitted than sampled"
    assert emitted or not span.sampled or finish is Finish.ERROR, "a sampled span emits at least one token"
    assert len(request.tokens) + emitted <= request.limit, "a request outgrew its limit"
    assert emitted == accepted + 1 or finish is not None or not span.sampled, (
        "a round emits the accepted drafts and one token of the target"
    )
