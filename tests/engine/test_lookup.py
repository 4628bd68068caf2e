"""The prefix tree and lookups against what the scheduler really does."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from power_lab.engine import prefixes
from power_lab.engine.engine import Engine
from power_lab.engine.prefix import BLOCK_TOKENS
from power_lab.engine.request import SamplingParams
from power_lab.engine.vitals import PrefixTree
from power_lab.errors import CapacityError, ConfigError
from power_lab.kernels.ops import Ops
from tests import tiny

SHAPE = tiny.Shape(layers=1)
ONE = SamplingParams(max_tokens=1, ignore_eos=True, seed=1)


def prompt_of(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 250, length).tolist()


@pytest.fixture(scope="module")
def engine(numba_ops: Callable[[int], Ops]) -> Engine:
    return tiny.engine(SHAPE, numba_ops(1), kv_tokens=1024)


@pytest.fixture
def fresh(numba_ops: Callable[[int], Ops]) -> Engine:
    return tiny.engine(SHAPE, numba_ops(1), kv_tokens=1024)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2), st.integers(1, 320), st.integers(0, 320), st.integers(0, 3), st.sampled_from(["", "a", "b"]))
def test_a_lookup_says_what_a_request_is_then_served(
    engine: Engine, seed: int, length: int, turn: int, other: int, namespace: str
) -> None:
    prompt = (prompt_of(seed, 320)[:turn] + prompt_of(other, 640)[turn : turn + 320])[:length]
    found, tree = engine.lookup(prompt, cache_key=namespace), engine.prefixes()
    again = engine.lookup(prompt, cache_key=namespace)
    assert (again.served, again.blocks, again.reason) == (found.served, found.blocks, found.reason), (
        "asking changes nothing"
    )
    assert found.served + found.computed == len(prompt) == len(found.pieces) and found.stop == found.served
    nodes = {node.block: node for node in tree.nodes}
    assert [found.hashes[at] for at in range(len(found.blocks))] == [nodes[block].hash for block in found.blocks]
    if found.differs_at is not None:
        near = nodes[found.nearest]
        at = found.differs_at - near.depth * BLOCK_TOKENS
        assert (
            near.tokens[:at] == tuple(prompt[found.served : found.differs_at])
            and near.tokens[at] != prompt[found.differs_at]
        )
    if found.reason == "namespace":
        assert any(engine.lookup(prompt, cache_key=name).served > found.served for name in {"", "a", "b"} - {namespace})
    record = engine.generate(prompt, ONE, cache_key=namespace)
    assert record.cached == found.served
    after = engine.prefixes()
    assert (after.lookups, after.hit_tokens) == (tree.lookups + 1, tree.hit_tokens + found.served)
    well_formed(after, engine)


def well_formed(tree: PrefixTree, engine: Engine) -> None:
    """Parents come first, children are evicted before them, and each block is named by what it holds."""
    at = {node.hash: place for place, node in enumerate(tree.nodes)}
    assert len(at) == len(tree.nodes) and tree.left_out == 0
    for place, node in enumerate(tree.nodes):
        assert len(node.tokens) == BLOCK_TOKENS
        assert (node.parent == "") == (node.depth == 0)
        if node.parent:
            parent = tree.nodes[at[node.parent]]
            assert at[node.parent] < place and parent.depth == node.depth - 1 and parent.namespace == node.namespace
            assert parent.eviction == -1 or node.eviction < parent.eviction
        assert node.tokens_saved == node.hits * BLOCK_TOKENS and (node.last_hit_s is None) == (not node.hits)
        assert (node.eviction == -1) == (node.refs > 0)
    status = engine.status()
    assert sorted(node.eviction for node in tree.nodes if node.eviction >= 0) == list(range(status.cached_blocks))
    assert tree.free_blocks == status.free_blocks


def test_hits_count_what_was_saved(fresh: Engine) -> None:
    prompt = prompt_of(7, 200)
    for _ in range(3):
        fresh.generate(prompt, ONE)
    fresh.generate(prompt_of(8, 100), ONE)
    tree = fresh.prefixes()
    assert [
        node.hits for node in tree.nodes if list(node.tokens) == prompt[node.depth * 64 : node.depth * 64 + 64]
    ] == [2] * 3
    assert sum(node.tokens_saved for node in tree.nodes) == tree.hit_tokens == 2 * 192
    assert (tree.lookups, tree.hits, tree.tokens) == (4, 2, 700)
    assert tree.seconds_a_token is not None and tree.seconds_a_token > 0
    assert tree.seconds_saved == tree.hit_tokens * tree.seconds_a_token


def test_the_next_eviction_is_the_one_that_was_told(fresh: Engine) -> None:
    for seed in range(3):
        fresh.generate(prompt_of(seed, 200), ONE)
    tree = fresh.prefixes()
    order = [node.hash for node in sorted(tree.nodes, key=lambda node: node.eviction)]
    fresh.generate(prompt_of(9, 600), ONE)
    gone = set(order) - {node.hash for node in fresh.prefixes().nodes}
    assert gone and gone == set(order[: len(gone)])
    assert fresh.prefixes().evictions == len(gone)


def test_blocks_of_a_run_in_flight_are_told_with_their_tokens(fresh: Engine) -> None:
    prompt = prompt_of(4, 150)
    ticket = fresh.submit(prompt, SamplingParams(max_tokens=60, ignore_eos=True, seed=1), cache_key="mine")
    for _ in range(5):
        fresh.step()
    tree = fresh.prefixes()
    assert [list(node.tokens) for node in tree.nodes] == [prompt[:64], prompt[64:128]]
    assert {(node.refs, node.eviction, node.namespace) for node in tree.nodes} == {(1, -1, "mine")}
    ticket.result()
    assert len(fresh.prefixes().nodes) == 3


def test_what_is_known_of_blocks_is_bounded_by_the_pool(fresh: Engine) -> None:
    for seed in range(40):
        fresh.generate(prompt_of(seed, 600), ONE)
    assert len(fresh._stepper.monitor._known) <= 2 * fresh._scheduler.pool.total  # noqa: SLF001
    assert all(node.tokens for node in fresh.prefixes().nodes)


def test_a_report_is_bounded_and_keeps_whole_prefixes(fresh: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "NODES", 7)
    for seed in range(3):
        fresh.generate(prompt_of(seed, 200), ONE)
    tree = fresh.prefixes()
    hashes = {node.hash for node in tree.nodes}
    assert (len(tree.nodes), tree.left_out) == (7, 2)
    assert all(node.parent in hashes for node in tree.nodes if node.depth)


@pytest.mark.parametrize(
    ("tokens", "key", "served", "reason", "words"),
    [
        ([*prompt_of(5, 200), 1, 2], "", 192, "last-block", "last 10 tokens"),
        (prompt_of(5, 128), "", 64, "last-token", "always computed"),
        (prompt_of(5, 100) + [251] * 100, "", 64, "differs", "differs at token 100: 36 of its 64"),
        (prompt_of(5, 170), "other", 0, "namespace", "128 tokens of it are cached in the default namespace"),
        (prompt_of(5, 63), "", 0, "short", "has no block"),
        ([251] * 65, "", 0, "miss", "begins like this"),
        (prompt_of(5, 192) + [252] * 100, "", 192, "end", "nothing is cached behind its 192 tokens"),
    ],
)
def test_why_a_lookup_stops(engine: Engine, tokens: list[int], key: str, served: int, reason: str, words: str) -> None:
    engine.drop_prefixes()
    engine.generate(prompt_of(5, 200), ONE)
    found = engine.lookup(tokens, cache_key=key)
    assert (found.served, found.reason) == (served, reason) and words in found.why


def test_lookups_without_a_cache_and_of_bad_input(numba_ops: Callable[[int], Ops]) -> None:
    engine = tiny.engine(SHAPE, numba_ops(1), prefix_cache=False)
    engine.generate(prompt_of(1, 100), ONE)
    assert engine.lookup(prompt_of(1, 100)).reason == "off" and engine.prefixes().nodes == ()
    for bad, error in (([], ConfigError), ([99999], ConfigError), ([1] * 5000, CapacityError)):
        with pytest.raises(error):
            engine.lookup(bad)
    with pytest.raises(ConfigError, match="cache_key"):
        engine.lookup([1], cache_key=" x")
