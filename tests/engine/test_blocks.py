"""The block pool: invariants under random use, leaf-first eviction, merging of duplicates."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from power_lab.engine.blocks import DUMMY, BlockPool


def digest(path: tuple[int, ...]) -> bytes:
    return repr(path).encode()


class PoolMachine(RuleBasedStateMachine):
    """Tables are paths in a prefix tree; a block's digest is its path, so equal paths must end up sharing blocks."""

    @initialize(total=st.integers(2, 20))
    def make(self, total: int) -> None:
        self.pool = BlockPool(total)
        self.tables: list[tuple[list[int], tuple[int, ...]]] = []

    @rule(path=st.lists(st.integers(0, 2), min_size=1, max_size=5), hit=st.booleans())
    def start(self, path: list[int], hit: bool) -> None:
        """A request: take its hits (or, as when two compute the same at once, none), allocate and seal the rest."""
        hits: list[int] = []
        while (
            hit
            and len(hits) < len(path)
            and (known := self.pool.lookup(digest(tuple(path[: len(hits) + 1])))) is not None
        ):
            hits.append(known)
        before = self.pool.free_list()
        for block in hits:
            self.pool.take(block)
        fresh = self.pool.allocate(len(path) - len(hits))
        if fresh is None:
            self.pool.release(hits)
            assert sorted(self.pool.free_list()) == sorted(before)
            return
        table = hits + fresh
        for depth in range(len(hits), len(path)):
            table[depth] = self.pool.seal(
                table[depth], digest(tuple(path[: depth + 1])), digest(tuple(path[:depth])), depth
            )
        assert len(set(table)) == len(table)
        self.tables.append((table, tuple(path)))

    @rule(pick=st.integers(0, 100))
    def end(self, pick: int) -> None:
        if self.tables:
            table, _ = self.tables.pop(pick % len(self.tables))
            self.pool.release(table)

    @rule()
    def drop(self) -> None:
        self.pool.drop_cached()
        assert self.pool.cached == 0

    @invariant()
    def sound(self) -> None:
        self.pool.check([table for table, _ in self.tables])

    @invariant()
    def equal_paths_share_blocks(self) -> None:
        seen: dict[tuple[int, ...], int] = {}
        for table, path in self.tables:
            for depth, block in enumerate(table):
                assert seen.setdefault(path[: depth + 1], block) == block

    @invariant()
    def children_are_evicted_before_parents(self) -> None:
        order = {block: at for at, block in enumerate(self.pool.free_list())}
        for block, at in order.items():
            parent = self.pool[block].parent
            above = self.pool.lookup(parent) if parent is not None else None
            if above is not None and above in order:
                assert at < order[above]


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(st.integers(2, 50), st.integers(0, 60))
def test_allocation_is_whole_or_not_at_all(total: int, count: int) -> None:
    pool = BlockPool(total)
    got = pool.allocate(count)
    assert (got is None) == (count > total - 1)
    assert pool.available == total - 1 - len(got or ())
    assert DUMMY not in (got or ())


def test_release_more_often_than_taken_is_caught() -> None:
    pool = BlockPool(3)
    table = pool.allocate(1)
    assert table is not None
    pool.release(table)
    with pytest.raises(AssertionError, match="more often"):
        pool.release(table)


def test_cached_blocks_are_used_last_and_oldest_first() -> None:
    pool = BlockPool(5)
    table = pool.allocate(2)
    assert table is not None
    pool.seal(table[0], b"a", b"", 0)
    pool.seal(table[1], b"ab", b"a", 1)
    pool.release(table)
    assert (pool.free, pool.cached) == (2, 2)
    pool.allocate(3)
    assert pool.lookup(b"ab") is None and pool.lookup(b"a") == table[0]
    assert pool.evictions == 1
