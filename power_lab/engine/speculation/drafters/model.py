"""A second, smaller model as the drafter (Leviathan et al. 2023, Chen et al. 2023): it reads what a request says and goes on by itself.

It draws as the target will, with the same noise, which the seed, the position and the token decide (Gumbel-max): of two models that agree,
both draw the same token, at any temperature (Daliri et al., "Coupling without communication", 2024). Only penalties it leaves out, as
they look at tokens that are not drawn yet.

It runs on the target's operation table with a runner, a workspace and a KV pool of its own, between the target's steps and never beside
one. Per request it knows how far its keys and values agree with what was committed: that cursor goes back where drafts were rejected,
which is all that a rollback takes. The target's prefix cache and preemptions do not reach it.

The steps of a proposal follow each other on the device, each fed by the one before; the host waits for them once, at the end, and plans the
target's step only then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from msgspec import structs

from power_lab.engine.blocks import BlockPool
from power_lab.engine.models.decoder import Decoder
from power_lab.engine.plan import Span, StepPlan
from power_lab.engine.request import Request, SamplingParams
from power_lab.engine.runner import Launched, Runner, Sizes
from power_lab.engine.scheduler import Limits, blocks_for
from power_lab.engine.speculation.drafters import Draft, DraftAsk
from power_lab.engine.speculation.drafters.cursor import Cursor

CHUNK = 256  # rows of a proposal's first step, in which prompts are caught up with: so long may the target's step wait for one
GREEDY = SamplingParams(seed=0)

SHORT = "the draft model's KV pool is short"
SILENT = "the draft model's logits hold NaN"


@dataclass(slots=True, eq=False)
class Cache(Cursor):
    """A request's keys and values.

    Attributes:
        blocks: where they lie.
        asked: the last proposal in which the request asked for drafts.
    """

    blocks: list[int] = field(default_factory=list)
    asked: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """A request that has blocks for all its tokens and drafts: the ask, its cache, the first token that is not in it."""

    ask: DraftAsk
    cache: Cache
    start: int

    @property
    def missing(self) -> int:
        return len(self.ask.tokens) - self.start

    def known(self, rows: int) -> Span:
        """Rows for its next committed tokens; drawn after only where they are the last."""
        tokens = tuple(self.ask.tokens[self.start : self.start + rows])
        return Span(self.ask.request_id, self.start, tokens, 0, int(rows == self.missing), tuple(self.cache.blocks))

    def drawn(self, drafts: int, draw: int) -> Span:
        """The row of its draft number `drafts`, which is draw `draw` of the step before."""
        start = len(self.ask.tokens) + drafts - 1
        return Span(self.ask.request_id, start, (-draw - 1,), 0, 1, tuple(self.cache.blocks))


class ModelDrafter:
    """Drafts by another model.

    Args:
        model: it, on the target's operation table, with the target's vocabulary.
        limits: of the target's steps. context: longest request in tokens.
        clock: monotonic seconds.
        graph_bytes: budget of captured graphs. graphs: False runs every step operation by operation.

    Attributes:
        runner: its own; pool: its KV blocks, once `make_pool` was called.
        reads: most rows of a proposal's first step.
    """

    name = "draft-model"

    def __init__(
        self,
        model: Decoder,
        limits: Limits,
        context: int,
        *,
        clock: Callable[[], float],
        graph_bytes: int,
        graphs: bool = True,
    ) -> None:
        # After an accepted window two tokens are missing: all that run at once find room.
        self.reads = max(min(limits.step_tokens, CHUNK), 2 * limits.max_batch)
        sizes = Sizes(self.reads, limits.max_batch, limits.max_batch, context)
        self.runner = Runner(model, sizes, clock=clock, graph_bytes=graph_bytes, graphs=graphs)
        self._caches: dict[int, Cache] = {}
        self._controls: dict[int, Request] = {}
        self._turn = 0
        self._steps = 0

    def make_pool(self, pages: int) -> None:
        """Allocate the KV pool, the dummy page included, before the first request."""
        self.runner.make_pool(pages)
        self.pool = BlockPool(pages)

    def check(self) -> None:
        """Assert the block invariants (tests)."""
        self.pool.check([cache.blocks for cache in self._caches.values()])

    # --- the protocol -------------------------------------------------------------------------------------------------------------

    def begin(self, request_id: int, prompt: Sequence[int], namespace: str) -> None:
        """Nothing is computed before the first proposal; nothing is shared, so the namespace does not matter."""
        self._caches[request_id] = Cache()

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        """Drafts, with the draft model's probability of each; none, and why, while a request's tokens are not all in its cache."""
        self._turn += 1
        for ask in asks:
            self._caches[ask.request_id].asked = self._turn
            if ask.request_id not in self._controls:
                self._controls[ask.request_id] = _controls(ask)
        jobs = [self._job(ask) for ask in sorted(asks, key=lambda ask: ask.request_id) if self._hold(ask)]
        ready, later = self._share(jobs)
        answers = self._draw(ready, later)
        return [answers.get(ask.request_id, Draft(note=SHORT, later=True)) for ask in asks]

    def commit(self, request_id: int, emitted: Sequence[int]) -> None:
        """The next proposal compares for itself what was drafted with what was said."""

    def end(self, request_id: int) -> None:
        cache = self._caches.pop(request_id, None)
        self._controls.pop(request_id, None)
        if cache is not None:
            self._drop(cache)

    # --- blocks -------------------------------------------------------------------------------------------------------------------

    def _hold(self, ask: DraftAsk) -> bool:
        """Whether a request has blocks for all that this proposal computes, at the cost of others' caches if need be.

        Asked for in order of age. All or nothing: what is caught up with in part and then taken away would be computed for ever.
        """
        cache = self._caches[ask.request_id]
        lacking = max(0, blocks_for(len(ask.tokens) + ask.width - 1) - len(cache.blocks))
        victims = self._victims(ask.request_id)
        if lacking > self.pool.available + sum(len(victim.blocks) for victim in victims):
            return False
        while (fresh := self.pool.allocate(lacking)) is None:
            self._drop(victims.pop())
        cache.blocks += fresh
        return True

    def _victims(self, request_id: int) -> list[Cache]:
        """Whose blocks a request may take, the last one first: those that did not ask now, longest ago first, then younger ones."""
        idle = [cache for cache in self._caches.values() if cache.asked < self._turn and cache.blocks]
        asking = [id for id, cache in self._caches.items() if cache.asked == self._turn and cache.blocks]
        younger = [self._caches[id] for id in sorted(asking) if id > request_id]
        return younger + sorted(idle, key=lambda cache: cache.asked, reverse=True)

    def _drop(self, cache: Cache) -> None:
        self.pool.release(cache.blocks)
        cache.blocks, cache.length, cache.tail = [], 0, ()

    # --- steps --------------------------------------------------------------------------------------------------------------------

    def _job(self, ask: DraftAsk) -> Job:
        cache = self._caches[ask.request_id]
        return Job(ask, cache, cache.settle(ask.tokens))

    def _share(self, jobs: Sequence[Job]) -> tuple[list[Job], list[tuple[Job, int]]]:
        """Who draws now, most drafts first, and who only catches up, by so many rows: those that miss least come first."""
        ready, later, left = [], [], self.reads
        for job in sorted(jobs, key=lambda job: job.missing):
            rows = min(job.missing, left)
            left -= rows
            if rows == job.missing:
                ready.append(job)
            else:
                later.append((job, rows))
        return sorted(ready, key=lambda job: -job.ask.width), later

    def _draw(self, ready: Sequence[Job], later: Sequence[tuple[Job, int]]) -> dict[int, Draft]:
        """Compute what is missing, then one draft a step for all that still want one. Cursors move when all has come back."""
        chunks = [job.known(rows) for job, rows in later if rows]
        steps = [self._launch([*(job.known(job.missing) for job in ready), *chunks])] if ready or chunks else []
        for drafts in range(1, max((job.ask.width for job in ready), default=0)):
            # The most drafts come first, so a request's row stays where it is until it has all its drafts.
            steps.append(
                self._launch([job.drawn(drafts, row) for row, job in enumerate(ready) if job.ask.width > drafts])
            )
        sampled = [self.runner.collect(step, self._controls) for step in steps]
        answers = {}
        for row, job in enumerate(ready):
            of = [(step.tokens[row], step.logprobs[row].value) for step in sampled[: job.ask.width] if step.logprobs]
            answers[job.ask.request_id] = draft = _draft(of)
            job.cache.drew(job.ask, draft)
        for job, rows in later:
            answers[job.ask.request_id] = job.cache.read(job.ask, rows)
        return answers

    def _launch(self, spans: Sequence[Span]) -> Launched:
        self._steps += 1
        return self.runner.launch(StepPlan(self._steps - 1, tuple(spans)), self._controls)


def _controls(ask: DraftAsk) -> Request:
    """What the runner draws by for a request."""
    drawn = structs.replace(ask.params or GREEDY, repetition_penalty=1.0, presence_penalty=0.0, logprobs=0)
    return Request(ask.request_id, len(ask.tokens), drawn, [], 0, frozenset())


def _draft(drawn: Sequence[tuple[int, float]]) -> Draft:
    """Draws and their log-probabilities as a draft, up to the first that could not be drawn."""
    sound = next((at for at, (token, _) in enumerate(drawn) if token < 0), len(drawn))
    tokens = tuple(token for token, _ in drawn[:sound])
    return Draft(tokens, tuple(math.exp(min(0.0, logprob)) for _, logprob in drawn[:sound]), "" if sound else SILENT)
