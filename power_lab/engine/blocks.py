"""The KV block pool: fixed blocks, reference counts, a hash map of reusable blocks and an intrusive free list. No torch.

Every block is in exactly one state: free (in the free list, no hash), cached (in the free list, hashed, reusable until evicted),
or referenced (named by `refs` tables). Block 0 is the dummy: padding rows point at it and it is never handed out.

The free list holds free blocks first, then cached ones in order of release. A table is released tail first, and a hit on a block
always also takes its whole prefix, so a child is released no later than its parent and eviction from the head is leaf first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

DUMMY = 0
_UNLINKED = -1


@dataclass(slots=True, eq=False)
class Block:
    """One block. `prev`/`next` link it into the free list; both are -1 while it is referenced.

    sealed, last_hit: when it was published and last taken again, by the pool's clock; hits: how often.
    """

    id: int
    refs: int = 0
    digest: bytes | None = None
    parent: bytes | None = None
    depth: int = 0
    hits: int = 0
    sealed: float = 0.0
    last_hit: float = 0.0
    prev: int = _UNLINKED
    next: int = _UNLINKED


class BlockPool:
    """All KV blocks of one engine.

    Args:
        total: number of blocks, the dummy included.
        clock: seconds, for the age of blocks.
    """

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        if total < 2:
            raise ValueError(f"a pool needs the dummy and at least one block, not {total}")
        self.total = total
        self._clock = clock
        self.evictions = 0
        self._blocks = [Block(i) for i in range(total + 1)]  # the last one is the list's sentinel
        self._ends = self._blocks[total]
        self._ends.prev = self._ends.next = total
        self._by_digest: dict[bytes, int] = {}
        self._unreferenced = 0
        self._cached = 0
        for i in range(total - 1, DUMMY, -1):
            self._link(self._blocks[i], head=True)

    def __getitem__(self, block_id: int) -> Block:
        return self._blocks[block_id]

    @property
    def available(self) -> int:
        """Blocks that can be allocated now: free and cached ones."""
        return self._unreferenced

    @property
    def cached(self) -> int:
        return self._cached

    @property
    def free(self) -> int:
        return self._unreferenced - self._cached

    @property
    def used(self) -> int:
        return self.total - 1 - self._unreferenced

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` blocks with one reference each, evicting cached leaves if need be; None, and no change, if too few."""
        if count > self._unreferenced:
            return None
        return [self._pop() for _ in range(count)]

    def lookup(self, digest: bytes) -> int | None:
        return self._by_digest.get(digest)

    def take(self, block_id: int) -> None:
        """Add a reference; a cached block leaves the free list. For one that is published this is a hit."""
        block = self._blocks[block_id]
        if block.digest is not None:
            block.hits += 1
            block.last_hit = self._clock()
        if block.refs == 0:
            self._unlink(block)
        block.refs += 1

    def release(self, table: Sequence[int]) -> None:
        """Drop one reference from each block of a table, tail first."""
        for block_id in reversed(table):
            block = self._blocks[block_id]
            if block.refs < 1:
                raise AssertionError(f"block {block_id} is released more often than it was taken")
            block.refs -= 1
            if block.refs == 0:
                self._link(block, head=block.digest is None)

    def seal(self, block_id: int, digest: bytes, parent: bytes, depth: int) -> int:
        """Publish a full, verified block under its digest and return the block that now stands for it.

        When another block already holds that digest, its contents are bit-equal, so the caller's reference moves to it and the
        duplicate is freed.
        """
        known = self._by_digest.get(digest)
        if known is not None and known != block_id:
            hits, last = self._blocks[known].hits, self._blocks[known].last_hit
            self.take(known)
            self._blocks[known].hits, self._blocks[known].last_hit = (
                hits,
                last,
            )  # it was computed again, so it saved nothing
            self.release([block_id])
            return known
        block = self._blocks[block_id]
        block.digest, block.parent, block.depth = digest, parent, depth
        if known is None:
            block.hits, block.sealed = 0, self._clock()
        self._by_digest[digest] = block_id
        return block_id

    def drop_cached(self) -> int:
        """Forget every cached block (a cold cache for measurements); referenced blocks stay. Returns how many were dropped."""
        dropped = [block for block in self._blocks[1 : self.total] if block.refs == 0 and block.digest is not None]
        for block in dropped:
            self._unlink(block)
            self._forget(block)
            self._link(block, head=True)
        return len(dropped)

    def free_list(self) -> list[int]:
        """Block ids in order of allocation (next eviction first)."""
        order, at = [], self._ends.next
        while at != self.total:
            order.append(at)
            at = self._blocks[at].next
        return order

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert the invariants against all live block tables: every block is counted once, refs equal the tables naming it."""
        named = [0] * self.total
        for table in tables:
            for block_id in table:
                named[block_id] += 1
        order = self.free_list()
        linked = set(order)
        assert len(linked) == len(order) == self._unreferenced, "free list and its count disagree"
        assert DUMMY not in linked and named[DUMMY] == 0, "the dummy block was handed out"
        for block in self._blocks[1 : self.total]:
            assert block.refs == named[block.id], f"block {block.id}: {block.refs} refs, {named[block.id]} tables"
            assert (block.refs == 0) == (block.id in linked), f"block {block.id}: free list and refs disagree"
            assert block.digest is None or self._by_digest.get(block.digest) == block.id, (
                f"block {block.id}: stale digest"
            )
        hashed = sum(self._blocks[i].digest is not None for i in order)
        assert hashed == self._cached, "cached count is wrong"
        assert all(self._blocks[i].digest == digest for digest, i in self._by_digest.items()), (
            "hash map names a wrong block"
        )
        assert self.free + self.cached + self.used == self.total - 1, "blocks were lost"

    def _pop(self) -> int:
        block = self._blocks[self._ends.next]
        self._unlink(block)
        if block.digest is not None:
            self._forget(block)
            self.evictions += 1
        block.refs = 1
        return block.id

    def _forget(self, block: Block) -> None:
        del self._by_digest[block.digest]  # type: ignore[arg-type]  # callers checked it
        block.digest = block.parent = None
        block.depth = 0

    def _link(self, block: Block, *, head: bool) -> None:
        before = self._ends if head else self._blocks[self._ends.prev]
        after = self._blocks[before.next]
        block.prev, block.next = before.id, after.id
        before.next = after.prev = block.id
        self._unreferenced += 1
        self._cached += block.digest is not None

    def _unlink(self, block: Block) -> None:
        self._blocks[block.prev].next = block.next
        self._blocks[block.next].prev = block.prev
        block.prev = block.next = _UNLINKED
        self._unreferenced -= 1
        self._cached -= block.digest is not None
