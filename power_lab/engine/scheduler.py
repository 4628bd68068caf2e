"""The iteration-level scheduler: one token budget a step, immutable plans, one writer. No torch.

There are no phases: each step gives every running request rows so that its computed tokens catch up with its known tokens and its
drafts; chunked prefill, prefix hits, verification and resumption after preemption all follow from that one rule.

`plan` may admit and preempt (each of which is complete in itself) and attaches fresh blocks; `abort` gives those back; `commit` alone
moves lengths, seals blocks and ends requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from power_lab.engine.blocks import BlockPool
from power_lab.engine.plan import Span, StepPlan
from power_lab.engine.prefix import BLOCK_TOKENS, chain
from power_lab.engine.request import Finish, Request
from power_lab.errors import DeadlineExceeded, QueueFull, RequestCancelled


@dataclass(frozen=True, slots=True)
class Outcome:
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


def blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


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
        self.preemptions = 0
        self._root = root
        self._reuse = reuse
        self._steps = 0

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
        ended = []
        for request in list(self):
            if request.cancelled:
                self.end(request, Finish.CANCELLED, RequestCancelled(f"Request {request.id} was cancelled."))
            elif request.deadline is not None and now >= request.deadline:
                error = DeadlineExceeded(f"Request {request.id} passed its deadline after {request.emitted} tokens.")
                self.end(request, Finish.DEADLINE, error)
            if request.finish is not None:
                ended.append(request)
        return ended

    def end(self, request: Request, finish: Finish, error: Exception | None = None) -> None:
        """Take a request out and give its blocks back."""
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self._drop_blocks(request)
        request.finish, request.error = finish, error

    def draft_room(self, request: Request) -> int:
        """How many drafts the next step can verify for a request: 0 unless exactly one known token is not computed yet."""
        if len(request.tokens) - request.computed != 1:
            return 0
        return min(request.params.width, request.limit - len(request.tokens) - 1)

    def plan(self) -> StepPlan | None:
        """Choose the next step's rows; None when nothing can run."""
        spans: list[Span] = []
        preempted: list[int] = []
        rows, logits = self.limits.step_tokens, self.limits.sampled_rows
        # Each request behind the one at hand, and the first that could be admitted, keeps a row, and each behind it the blocks of
        # its known tokens: so drafts never starve a neighbour and never preempt one.
        behind = len(self.running) + (bool(self.waiting) and len(self.running) < self.limits.max_batch)
        owed = sum(_lacking(request) for request in self.running)
        for request in list(self.running):
            behind -= 1
            owed -= _lacking(request)
            if request.id in preempted:
                continue
            span = self._grow(request, rows, min(rows, logits) - behind - 1, owed, preempted)
            if span is not None:
                spans.append(span)
                rows -= span.rows
                logits -= max(span.sampled, 1)
        if not preempted:
            self._admit(spans, rows, logits)
        if not spans:
            return None
        self._steps += 1
        return StepPlan(self._steps - 1, tuple(spans), tuple(preempted))

    def abort(self, plan: StepPlan) -> None:
        """Give back what a plan attached; no length has moved."""
        for request, span in self._owners(plan):
            if span.fresh:
                self.pool.release(request.blocks[-span.fresh :])
                del request.blocks[-span.fresh :]
            request.drafts = ()

    def commit(self, plan: StepPlan, outcomes: Sequence[Outcome]) -> list[Request]:
        """Apply a whole step: lengths, sealed blocks, emitted tokens, ends. Returns the requests that ended.

        Everything is checked before anything changes; a plan that does not fit the state raises AssertionError.
        """
        pairs = self._owners(plan)
        if len(pairs) != len(plan.spans) or len(outcomes) != len(plan.spans):
            raise AssertionError("a plan is committed whole: requests or outcomes are missing")
        for (request, span), outcome in zip(pairs, outcomes, strict=True):
            _check(request, span, outcome)
        ended = []
        for (request, span), outcome in zip(pairs, outcomes, strict=True):
            request.drafts = ()
            request.tokens.extend(outcome.emitted)
            request.computed = span.start + span.rows - span.drafts + outcome.accepted
            if outcome.finish is not Finish.ERROR:  # blocks of a failed request are never offered to others
                self._settle(request, span.start // BLOCK_TOKENS)
            if outcome.finish is not None:
                self.end(request, outcome.finish)
                ended.append(request)
        return ended

    def check(self) -> None:
        """Assert the block invariants and that each table covers exactly its computed tokens (between steps)."""
        self.pool.check([request.blocks for request in self])
        for request in self:
            assert len(request.blocks) == blocks_for(request.computed), (
                f"request {request.id}: table and length disagree"
            )
            assert request.computed < len(request.tokens), f"request {request.id}: nothing left to compute"

    def _owners(self, plan: StepPlan) -> list[tuple[Request, Span]]:
        by_id = {request.id: request for request in self.running}
        return [(by_id[span.request_id], span) for span in plan.spans if span.request_id in by_id]

    def _grow(self, request: Request, rows: int, draft_rows: int, owed: int, preempted: list[int]) -> Span | None:
        """Rows for a running request, preempting later ones if the pool is short. `owed` blocks are not for its drafts."""
        end = _chunk_end(request, rows)
        if end <= request.computed:
            return None
        drafts = request.drafts[: max(0, draft_rows)] if end == request.computed + 1 == len(request.tokens) else ()
        room = (len(request.blocks) + self.pool.available - owed) * BLOCK_TOKENS
        drafts = drafts[: max(0, room - end)]
        while (fresh := self.pool.allocate(max(0, blocks_for(end + len(drafts)) - len(request.blocks)))) is None:
            victim = self.running[-1]
            self.preempt(victim)
            preempted.append(victim.id)
            if victim is request:
                return None
        return self._span(request, end, drafts, fresh)

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
            end = _chunk_end(request, rows)
            fresh = self.pool.allocate(blocks_for(end) - len(hits))
            assert fresh is not None, "room was checked before blocks were taken"
            self.waiting.popleft()
            self.running.append(request)
            span = self._span(request, end, (), fresh)
            spans.append(span)
            rows -= span.rows
            logits -= span.sampled

    def _hits(self, request: Request) -> list[int]:
        """Longest run of cached blocks; at least one token is always left to compute."""
        if not self._reuse:
            return []
        full = (len(request.tokens) - 1) // BLOCK_TOKENS
        hits: list[int] = []
        for digest in chain(self._root(request.namespace), request.tokens, full, request.hashes)[:full]:
            block = self.pool.lookup(digest)
            if block is None:
                break
            hits.append(block)
        return hits

    def _span(self, request: Request, end: int, drafts: tuple[int, ...], fresh: list[int]) -> Span:
        request.blocks.extend(fresh)
        whole = end == len(request.tokens)
        tokens = (*request.tokens[request.computed : end], *drafts)
        sampled = len(drafts) + 1 if whole else 0
        return Span(request.id, request.computed, tokens, len(drafts), sampled, tuple(request.blocks), len(fresh))

    def preempt(self, request: Request) -> None:
        """Back to the front of the queue; its sealed blocks stay cached, so resuming recomputes only what was evicted."""
        self.running.remove(request)
        self._drop_blocks(request)
        request.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(request)

    def _drop_blocks(self, request: Request) -> None:
        self.pool.release(request.blocks)
        request.blocks = []
        request.computed = 0
        request.drafts = ()

    def _settle(self, request: Request, first: int) -> None:
        """Seal blocks from the `first` on that became full and give back those that only held rejected drafts."""
        keep = blocks_for(request.computed)
        self.pool.release(request.blocks[keep:])
        del request.blocks[keep:]
        full = request.computed // BLOCK_TOKENS
        if not self._reuse or first >= full:
            return
        start = self._root(request.namespace)
        chain(start, request.tokens, full, request.hashes)
        for index in range(first, full):
            parent = request.hashes[index - 1] if index else start
            request.blocks[index] = self.pool.seal(request.blocks[index], request.hashes[index], parent, index)


def _lacking(request: Request) -> int:
    """Blocks that a running request still needs for its known tokens."""
    return blocks_for(len(request.tokens)) - len(request.blocks)


def _chunk_end(request: Request, rows: int) -> int:
    """Where this step's known tokens end: at all of them if they fit, else on a block boundary if one is within reach."""
    known = len(request.tokens)
    end = min(known, request.computed + rows)
    if end < known and end // BLOCK_TOKENS * BLOCK_TOKENS > request.computed:
        end = end // BLOCK_TOKENS * BLOCK_TOKENS
    return end


def _check(request: Request, span: Span, outcome: Outcome) -> None:
    assert request.computed == span.start and tuple(request.blocks) == span.blocks, (
        f"request {request.id} moved since the plan"
    )
    assert 0 <= outcome.accepted <= min(span.drafts, len(outcome.emitted)), "more accepted than drafted or emitted"
    assert len(outcome.emitted) <= span.sampled, "more emitted than sampled"
    failed = outcome.finish is Finish.ERROR
    assert bool(outcome.emitted) == bool(span.sampled) or failed, "a sampled span emits at least one token"
    assert len(request.tokens) + len(outcome.emitted) <= request.limit, "a request outgrew its limit"
    ends = outcome.finish is not None or not span.sampled
    assert ends or len(outcome.emitted) == outcome.accepted + 1, (
        "a round emits the accepted drafts and one token of the target"
    )
