"""What panels and inspectors ask of one engine. Everything here only reads, on the asker's thread."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from itertools import islice
from typing import TypeVar

from power_lab.engine import views
from power_lab.engine.assembly import Parts
from power_lab.engine.config import EngineConfig
from power_lab.engine.inspection import LookupReport, PrefixTree, ShapesReport, StepRecord
from power_lab.engine.live import Live
from power_lab.engine.loader import Loaded
from power_lab.engine.lookup import look_up
from power_lab.engine.monitor import RING, Seen
from power_lab.engine.prefix import model_root
from power_lab.engine.prefixes import Cache, tree
from power_lab.engine.report import MemoryPlan
from power_lab.engine.shapes import Ran
from power_lab.engine.shapes_report import report
from power_lab.engine.stepping import Stepper
from power_lab.engine.vitals import EngineVitals, RunVitals

RUNS = 64  # in one sample
MEMORY_S = 1.0  # how old the memory plan of a sample may be

T = TypeVar("T")


class Looking:
    """The reading side of an engine.

    Args:
        config, loaded, parts, stepper, clock: of the engine. lock: keeps its state from moving.
        memory: its memory plan.
    """

    def __init__(
        self,
        config: EngineConfig,
        loaded: Loaded,
        parts: Parts,
        stepper: Stepper,
        clock: Callable[[], float],
        lock: AbstractContextManager[object],
        memory: Callable[[], MemoryPlan],
    ) -> None:
        self._config, self._loaded, self._stepper = config, loaded, stepper
        self._scheduler, self._graphs, self._costs = parts.scheduler, parts.runner.graphs, parts.costs
        self._clock, self._lock, self._memory_now = clock, lock, memory
        self._page_bytes = parts.pool.nbytes // parts.pool.pages
        self._memory: tuple[float, MemoryPlan] | None = None
        self._drafter = views.drafters(loaded, parts.companion)[-1] if loaded.draft or loaded.trained else ""

    def vitals(self) -> EngineVitals:
        """The engine now, its counters since it began; rates are the reader's to add (`vitals.rated`).

        Nothing waits for the engine and the engine waits for nothing, so that counters may be half a step apart.
        """
        totals, monitor, pool = self._stepper.totals, self._stepper.monitor, self._scheduler.pool
        live, now = list(self._stepper.live.values()), self._clock()
        running = [one.request for one in live if one.request.blocks or one.request.preemptions]
        registry, plan = self._graphs.registry, self._planned()
        facts = self._loaded.facts
        return EngineVitals(
            engine="",
            model=facts.model,
            device=facts.device,
            mode=facts.mode,
            state="ready",
            stage="",
            clients=(),
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            rows=_rows(monitor.ring),
            steps=totals.steps,
            requests=totals.requests,
            tokens=totals.tokens,
            prompt_tokens=monitor.tokens + sum(request.prompt_len for request in running),
            cached_tokens=monitor.hit_tokens + sum(request.cached for request in running),
            drafted=totals.drafted,
            accepted=totals.accepted,
            passes=totals.passes,
            preempted=totals.preempted,
            free_blocks=pool.free,
            cached_blocks=pool.cached,
            used_blocks=pool.used,
            weights_bytes=plan.weights,
            pool_bytes=plan.pool,
            graph_bytes=plan.graphs,
            workspace_bytes=plan.workspace,
            captures=registry.captures,
            replays=registry.replays,
            eager=registry.steps - registry.captures - registry.replays,
            graph_hit_rate=registry.hit_rate,
            drafter=self._drafter,
            last_step_s=-1.0 if totals.last_step is None else now - totals.last_step,
            runs=tuple(_run(one, now) for one in live[:RUNS]),
        )

    def steps(self) -> tuple[StepRecord, ...]:
        """The last steps, oldest first."""
        with self._lock:
            seen = tuple(self._stepper.monitor.ring)
        return _records(seen, _still(self._graphs.registry.ran))

    def shapes(self) -> ShapesReport:
        """What became of graph shapes, and better buckets for what was asked for."""
        return report(self._graphs, self._costs, self._config.graph_mb << 20, self.steps())

    def prefixes(self) -> PrefixTree:
        """Every prefix that is held."""
        return tree(self._cache(), self._loaded.tokenizer, self._clock())

    def lookup(self, tokens: Sequence[int], namespace: str) -> LookupReport:
        """Where a prompt would hit now."""
        return look_up(self._cache(), self._loaded.tokenizer, tokens, namespace)

    def _cache(self) -> Cache:
        with self._lock:
            monitor, scheduler = self._stepper.monitor, self._scheduler
            return Cache.of(
                scheduler.pool,
                monitor,
                [*scheduler, *scheduler.kept],
                root=lambda namespace: model_root(self._loaded.facts, namespace),
                page_bytes=self._page_bytes,
                reuse=self._config.prefix_cache,
            )

    def _planned(self) -> MemoryPlan:
        now = time.monotonic()
        if self._memory is None or now - self._memory[0] >= MEMORY_S:
            with suppress(RuntimeError):  # a graph was captured meanwhile: the next sample has it
                self._memory = now, self._memory_now()
        if self._memory is None:
            return MemoryPlan(
                weights=0, pool=0, pages=0, page_bytes=0, states=0, graphs=0, workspace=0, resident=0, reason=""
            )
        return self._memory[1]


def _rows(ring: deque[Seen]) -> int:
    try:
        step = ring[-1].step
    except IndexError:
        return 0
    return step.prefill_rows + step.decode_rows + step.verify_rows


def _run(live: Live, now: float) -> RunVitals:
    request = live.request
    return RunVitals(
        run=request.id,
        client="",
        state="running" if request.blocks else "waiting",
        tokens=request.emitted,
        prompt_tokens=request.prompt_len,
        cached_tokens=request.cached,
        drafted=live._drafted,  # noqa: SLF001  # counted there for its deltas; a sum over its rounds would grow with every token
        accepted=live._accepted,  # noqa: SLF001
        drafter=request.params.speculate,
        age_s=live.since(now),
    )


def _still(moving: deque[T]) -> tuple[T, ...]:
    """A copy of what another thread appends to."""
    while True:
        try:
            return tuple(moving)
        except RuntimeError:  # it moved meanwhile
            continue


def _records(seen: Sequence[Seen], ran: Sequence[Ran]) -> tuple[StepRecord, ...]:
    """Steps with how they ran. A ring that is full has one step more than it tells of: the counts that the next one went on from."""
    hows = _matched(seen, ran)
    first = 1 if len(seen) > RING else 0
    before = (seen[0].tokens, seen[0].drafted, seen[0].accepted) if first else (0, 0, 0)
    records = []
    for one, how in islice(zip(seen, hows, strict=True), first, None):
        step, counts = one.step, (one.tokens, one.drafted, one.accepted)
        tokens, drafted, accepted = (now - then for now, then in zip(counts, before, strict=True))
        before = counts
        shape = one.shape
        records.append(
            StepRecord(
                number=step.step,
                begin=one.begin,
                end=one.end,
                prefill_rows=step.prefill_rows,
                decode_rows=step.decode_rows,
                verify_rows=step.verify_rows,
                running=step.running,
                waiting=step.waiting,
                preempted=step.preempted,
                shape=(shape.rows, shape.sampled),
                how=how.how if how is not None else "",
                why=how.why if how is not None else "",
                padded_rows=max(0, shape.rows - step.prefill_rows - step.decode_rows - step.verify_rows),
                busy_s=one.busy_s,
                free_blocks=step.free_blocks,
                cached_blocks=step.cached_blocks,
                used_blocks=step.used_blocks,
                tokens=tokens,
                drafted=drafted,
                accepted=accepted,
            )
        )
    return tuple(records)


def _matched(seen: Sequence[Seen], ran: Sequence[Ran]) -> list[Ran | None]:
    """How each step ran. Both are in order, and a step that was given up is in the second alone, so they are walked from their ends."""
    hows: list[Ran | None] = [None] * len(seen)
    at = len(ran) - 1
    for index in range(len(seen) - 1, -1, -1):
        back = at
        while back >= 0 and ran[back].shape is not seen[index].shape:
            back -= 1
        if back >= 0:
            hows[index] = ran[back]
            at = back - 1
    return hows
