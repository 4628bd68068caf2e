"""The prefix tree: every block that is named by its content, with what it holds and what it has saved."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from power_lab.engine.blocks import BlockPool
from power_lab.engine.inspection import PrefixNode, PrefixTree
from power_lab.engine.monitor import Known, Monitor
from power_lab.engine.prefix import BLOCK_TOKENS
from power_lab.engine.request import Request
from power_lab.engine.tokenizer import Tokenizer

NODES = 16_384  # in one report: about a kilobyte each
UNKNOWN = Known("", b"")


@dataclass(frozen=True, slots=True)
class Held:
    """A block as it was: see `PrefixNode`."""

    block: int
    digest: bytes
    parent: bytes
    depth: int
    hits: int
    sealed: float
    last_hit: float
    refs: int
    eviction: int
    known: Known

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(array("i", self.known.tokens))


@dataclass(frozen=True, slots=True)
class Cache:
    """The prefix cache at one moment.

    Attributes:
        held: its blocks by digest, parents first; free: blocks that are taken before any of them is evicted.
        lookups, hits, tokens, hit_tokens: as in `PrefixTree`.
        root: namespace -> root digest. page_bytes: of a block. reuse: whether there is a cache at all.
    """

    held: dict[bytes, Held]
    free: int
    evictions: int
    lookups: int
    hits: int
    tokens: int
    hit_tokens: int
    seconds_a_token: float | None
    root: Callable[[str], bytes]
    page_bytes: int
    reuse: bool

    @classmethod
    def of(
        cls,
        pool: BlockPool,
        monitor: Monitor,
        requests: Sequence[Request],
        *,
        root: Callable[[str], bytes],
        page_bytes: int,
        reuse: bool,
    ) -> Cache:
        """A copy, while nothing moves. requests: that are not over, or kept."""
        own: dict[bytes, Known] = {}
        for request in requests:
            own |= monitor.contents(request)
        begun = [request for request in requests if request.finish is None and (request.blocks or request.preemptions)]
        held = [_held(pool, block, order, monitor, own) for block, order in _hashed(pool)]
        return cls(
            held={one.digest: one for one in sorted(held, key=lambda one: one.depth)},
            free=pool.free,
            evictions=pool.evictions,
            lookups=monitor.lookups + len(begun),
            hits=monitor.hits + sum(request.cached > 0 for request in begun),
            tokens=monitor.tokens + sum(request.prompt_len for request in begun),
            hit_tokens=monitor.hit_tokens + sum(request.cached for request in begun),
            seconds_a_token=monitor.seconds_a_token,
            root=root,
            page_bytes=page_bytes,
            reuse=reuse,
        )

    def seconds(self, tokens: int) -> float | None:
        """What computing so many prompt tokens would have taken."""
        return None if self.seconds_a_token is None else tokens * self.seconds_a_token

    @property
    def namespaces(self) -> list[str]:
        return sorted({one.known.namespace for one in self.held.values() if one.known is not UNKNOWN})


def tree(cache: Cache, tokenizer: Tokenizer, now: float) -> PrefixTree:
    """At most `NODES` nodes, those nearest to the roots. now: by the engine's clock."""
    shown = list(cache.held.values())[:NODES]
    return PrefixTree(
        nodes=tuple(_node(cache, one, tokenizer, now) for one in shown),
        block_tokens=BLOCK_TOKENS,
        lookups=cache.lookups,
        hits=cache.hits,
        tokens=cache.tokens,
        hit_tokens=cache.hit_tokens,
        seconds_saved=cache.seconds(cache.hit_tokens),
        seconds_a_token=cache.seconds_a_token,
        evictions=cache.evictions,
        free_blocks=cache.free,
        nbytes=len(cache.held) * cache.page_bytes,
        left_out=len(cache.held) - len(shown),
    )


def _hashed(pool: BlockPool) -> list[tuple[int, int]]:
    """(block, its place in the order of eviction or -1) of all blocks with a digest."""
    idle = [block for block in pool.free_list() if pool[block].digest is not None]
    order = {block: place for place, block in enumerate(idle)}
    return [(block, order.get(block, -1)) for block in range(pool.total) if pool[block].digest is not None]


def _held(pool: BlockPool, block_id: int, order: int, monitor: Monitor, own: dict[bytes, Known]) -> Held:
    block = pool[block_id]
    assert block.digest is not None and block.parent is not None, "a hashed block has a digest and a parent"
    known = monitor.known(block.digest) or own.get(block.digest, UNKNOWN)
    return Held(
        block=block_id,
        digest=block.digest,
        parent=block.parent,
        depth=block.depth,
        hits=block.hits,
        sealed=block.sealed,
        last_hit=block.last_hit,
        refs=block.refs,
        eviction=order,
        known=known,
    )


def _node(cache: Cache, one: Held, tokenizer: Tokenizer, now: float) -> PrefixNode:
    tokens = one.tokens
    saved = one.hits * BLOCK_TOKENS
    return PrefixNode(
        block=one.block,
        hash=one.digest.hex(),
        parent=one.parent.hex() if one.depth else "",
        depth=one.depth,
        namespace=one.known.namespace,
        tokens=tokens,
        piece=b"".join(tokenizer.token_bytes(token) for token in tokens).decode("utf-8", "replace"),
        hits=one.hits,
        tokens_saved=saved,
        seconds_saved=cache.seconds(saved),
        age_s=now - one.sealed,
        last_hit_s=now - one.last_hit if one.hits else None,
        refs=one.refs,
        eviction=one.eviction,
        nbytes=cache.page_bytes,
    )
