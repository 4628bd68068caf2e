"""What the engine keeps of its steps for whoever looks later: a ring of them and counters. The engine's thread appends; reports read.

Nothing here is computed for a reader that is not there: a step costs a tuple of what exists anyway.
"""

from __future__ import annotations

import statistics
from array import array
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from power_lab.engine.blocks import BlockPool
from power_lab.engine.prefix import BLOCK_TOKENS
from power_lab.engine.shapes import Shape
from power_lab.engine.trace import Step

if TYPE_CHECKING:
    from power_lab.engine.flight import Flight
    from power_lab.engine.request import Request
    from power_lab.engine.runner import Sampled
    from power_lab.engine.views import Totals

RING = 4096  # engine steps
PREFILLS = 64  # of which the median is taken


class Seen(NamedTuple):
    """A step in the ring: its trace event as one of its requests saw it, and the engine's totals behind it."""

    step: Step
    begin: float
    end: float
    shape: Shape
    busy_s: float | None
    tokens: int
    drafted: int
    accepted: int


class Known(NamedTuple):
    """What a sealed block holds: its cache namespace and its tokens, as packed int32."""

    namespace: str
    tokens: bytes


class Monitor:
    """Of one engine.

    Args:
        pool: its blocks, which bound what is kept of prefixes.
        asynchronous: whether the device works by itself, so that only what it timed is its work.

    Attributes:
        ring: the last steps.
        lookups, hits: requests that are over, and how many of them the prefix cache served; tokens, hit_tokens: of their prompts.
    """

    def __init__(self, pool: BlockPool, *, asynchronous: bool) -> None:
        self._pool = pool
        self._asynchronous = asynchronous
        self._known: dict[bytes, Known] = {}
        self.ring: deque[Seen] = deque(maxlen=RING + 1)  # one more, whose counts the next one went on from
        self.lookups = self.hits = self.tokens = self.hit_tokens = 0
        self._prefills: deque[float] = deque(maxlen=PREFILLS)  # seconds a token

    def add(self, flight: Flight, sampled: Sampled, step: Step | None, totals: Totals, end: float) -> None:
        """A step is committed and counted in `totals`. step: the event of one of its requests; None where nobody awaited any."""
        if step is None or flight.launched is None:
            return
        busy = sampled.forward_s + sampled.sample_s
        if self._asynchronous:
            fetched = flight.launched.fetched
            busy = (fetched.seconds or None) if fetched is not None else None
        counts = totals.tokens, totals.drafted, totals.accepted
        self.ring.append(Seen(step, flight.begun, end, flight.launched.shape, busy, *counts))
        if step.prefill_rows and not step.decode_rows and not step.verify_rows:
            self._prefills.append(step.wall_s / step.prefill_rows)

    def settle(self, request: Request) -> None:
        """A request is over: what it took from the prefix cache, and what its blocks hold."""
        self.lookups += 1
        self.tokens += request.prompt_len
        self.hits += request.cached > 0
        self.hit_tokens += request.cached
        self._known.update(self.contents(request))
        if len(self._known) > 2 * self._pool.total:
            self._known = {
                digest: held for digest, held in self._known.items() if self._pool.lookup(digest) is not None
            }

    def contents(self, request: Request) -> dict[bytes, Known]:
        """What a request's hashed blocks hold, where that is not known yet."""
        return {
            digest: Known(request.namespace, array("i", request.tokens[at : at + BLOCK_TOKENS]).tobytes())
            for at, digest in zip(range(0, len(request.tokens), BLOCK_TOKENS), request.hashes, strict=False)
            if digest not in self._known
        }

    def known(self, digest: bytes) -> Known | None:
        """What the block of that digest holds, of requests that are over."""
        return self._known.get(digest)

    @property
    def seconds_a_token(self) -> float | None:
        """Seconds of prefill a prompt token: the median of the last steps that did nothing else. None before the second of them: the first
        one finds cold caches."""
        measured = list(self._prefills)
        return statistics.median(measured[1:]) if len(measured) > 1 else None
