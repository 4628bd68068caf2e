"""Rotary embedding and paged attention against the reference; one row's bits in any company and any chunking."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from power_lab.kernels import reference
from power_lab.kernels.numba.ops import NumbaOps
from power_lab.kernels.ops import BLOCK, KVCache
from tests.kernels import data

HEADS = [(9, 3, 64), (4, 2, 16), (5, 1, 8), (1, 1, 24), (2, 2, 128), (8, 1, 72)]
TOKENS = 2 * 256 + BLOCK + 5


@dataclass(frozen=True)
class Rules:
    """What a layer may do beyond plain attention."""

    window: int = 0
    softcap: float = 0.0
    norm: str = ""
    temperature: bool = False
    sinks: bool = False
    rope: bool = True


NO_RULES = Rules()
RULES = [
    Rules(window=1),
    Rules(window=BLOCK),
    Rules(window=100, softcap=2.0),
    Rules(window=300, norm="head"),
    Rules(window=511, norm="width", temperature=True),
    Rules(softcap=0.5, norm="head", rope=False),
    Rules(sinks=True),
    Rules(window=300, sinks=True),
]


def frequencies(dim: int) -> list[float]:
    return reference.frequencies(dim, 1e4)


def temperatures() -> np.ndarray:
    return (1 + np.arange(TOKENS) % 7 / 10).astype(np.float32)


def sink_logits(heads: int) -> np.ndarray:
    return np.linspace(-3, 6, heads, dtype=np.float32)


def norm_weights(kind: str, heads: int, cache: KVCache) -> tuple[np.ndarray, np.ndarray] | None:
    sizes = {"": None, "head": (1, 1), "width": (heads, cache.heads)}[kind]
    if sizes is None:
        return None
    q, k = (1 + 0.3 * data.normal(count * cache.head_dim, seed=count + 11) for count in sizes)
    return q.astype(np.float32), k.astype(np.float32)


def sequence(pages: int, seed: int = 0) -> np.ndarray:
    """A block table of shuffled pages, followed by entries that must not be read."""
    table = np.random.default_rng(seed).permutation(pages - 1)[: pages - 2].astype(np.int32) + 1
    return np.concatenate([table, np.zeros(3, np.int32)])[None]


def run(
    ops: NumbaOps,
    qkv: np.ndarray,
    positions: np.ndarray,
    tables: np.ndarray,
    heads: int,
    cache: KVCache,
    interleaved: bool,
    rules: Rules = NO_RULES,
) -> np.ndarray:
    """Normalise, rotate, write and attend, as a layer does."""
    rows = data.batch(positions, tables)
    qkv = qkv.copy()
    out = data.poison(len(positions) + 1, heads * cache.head_dim)
    norms = norm_weights(rules.norm, heads, cache)
    table = ops.rope_tables(TOKENS, frequencies(cache.head_dim), 1.0) if rules.rope else None
    ops.rope_write(qkv, rows, table, interleaved, heads, cache, norms, 1e-6)
    heat = temperatures() if rules.temperature else None
    sinks = sink_logits(heads) if rules.sinks else None
    ops.attention(qkv, rows, heads, cache.head_dim**-0.5, cache, out[:-1], rules.window, rules.softcap, heat, sinks)
    assert np.isnan(out[-1]).all()
    return out[:-1]


@pytest.mark.parametrize(("q_heads", "kv_heads", "dim"), HEADS)
@pytest.mark.parametrize("interleaved", [False, True])
def test_matches_reference_and_reads_nothing_else(
    ops: NumbaOps, q_heads: int, kv_heads: int, dim: int, interleaved: bool
) -> None:
    tables, positions = sequence(12), np.arange(TOKENS)
    qkv = data.normal(TOKENS, (q_heads + 2 * kv_heads) * dim)
    cache = data.poisoned_cache(ops, 12, kv_heads, dim)  # NaN in unused pages, unused slots and the dummy page
    out = run(ops, qkv, positions, tables, q_heads, cache, interleaved)
    parts = torch.from_numpy(qkv).view(TOKENS, -1, dim)
    rotated = reference.rope(
        parts[:, : q_heads + kv_heads], reference.rope_tables(TOKENS, frequencies(dim)), interleaved
    )
    for row in (0, 1, BLOCK - 1, BLOCK, 255, 256, 511, 512, TOKENS - 1):
        keys, values = rotated[: row + 1, q_heads:], parts[: row + 1, q_heads + kv_heads :]
        want = reference.attention(rotated[row, :q_heads], keys, values, dim**-0.5).numpy().reshape(-1)
        np.testing.assert_allclose(out[row], want, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("rules", RULES, ids=repr)
@pytest.mark.parametrize(("q_heads", "kv_heads", "dim"), [(4, 1, 64), (6, 2, 24)])
def test_windows_caps_norms_and_temperatures(
    ops: NumbaOps, rules: Rules, q_heads: int, kv_heads: int, dim: int
) -> None:
    tables, positions, heads = sequence(12), np.arange(TOKENS), q_heads + kv_heads
    qkv = data.normal(TOKENS, (q_heads + 2 * kv_heads) * dim, seed=8)
    cache = data.poisoned_cache(ops, 12, kv_heads, dim)
    out = run(ops, qkv, positions, tables, q_heads, cache, False, rules)
    parts = torch.from_numpy(qkv).view(TOKENS, -1, dim)
    turned = parts[:, :heads].double()
    norms = norm_weights(rules.norm, q_heads, cache)
    if norms is not None:
        q, k = (
            reference.rms_norm(x if rules.norm == "head" else x.flatten(1), torch.from_numpy(w), 1e-6).view(x.shape)
            for x, w in zip((turned[:, :q_heads], turned[:, q_heads:]), norms, strict=True)
        )
        turned = torch.cat([q, k], dim=1)
    if rules.rope:
        turned = reference.rope(turned, reference.rope_tables(TOKENS, frequencies(dim)), False)
    for row in (0, 1, BLOCK - 1, BLOCK, 99, 100, 255, 256, 300, 512, TOKENS - 1):
        keys, values = turned[: row + 1, q_heads:], parts[: row + 1, heads:]
        scale = dim**-0.5 * (float(temperatures()[row]) if rules.temperature else 1.0)
        sinks = torch.from_numpy(sink_logits(q_heads)) if rules.sinks else None
        want = reference.attention(turned[row, :q_heads], keys, values, scale, rules.window, rules.softcap, sinks)
        np.testing.assert_allclose(out[row], want.numpy().reshape(-1), rtol=1e-4, atol=4e-6)


def test_softcap(ops: NumbaOps) -> None:
    x = data.normal(5, 37) * np.float32(40)
    want = reference.softcap(torch.from_numpy(x), 30.0).numpy()
    ops.softcap(x, 30.0)
    np.testing.assert_allclose(x, want, rtol=2e-6, atol=4e-6)


def test_rope_tables_and_partial_rotation(ops: NumbaOps) -> None:
    turns = reference.frequencies(64, 1e5)
    table = ops.rope_tables(8192, turns, 1.25)
    np.testing.assert_allclose(table, reference.rope_tables(8192, turns, 1.25).numpy(), atol=8e-8)
    rope, rows = ops.rope_tables(50, frequencies(8), 1.0), data.batch(np.arange(40, 43), sequence(4))
    qkv = data.normal(3, 3 * 24)
    want = reference.rope(torch.from_numpy(qkv).view(3, 3, 24)[:, :2], torch.from_numpy(rope)[40:43].double(), False)
    ops.rope_write(qkv, rows, rope, False, 1, data.poisoned_cache(ops, 4, 1, 24))
    np.testing.assert_allclose(qkv.reshape(3, 3, 24)[:, :2], want.numpy(), rtol=1e-5, atol=1e-6)


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(HEADS[:4]),
    st.lists(st.integers(1, TOKENS - 1), max_size=8),
    st.booleans(),
    st.sampled_from([NO_RULES, *RULES]),
)
def test_chunking_does_not_change_bits(
    heads: tuple[int, int, int], cuts: list[int], interleaved: bool, rules: Rules
) -> None:
    q_heads, kv_heads, dim = heads
    qkv = data.normal(TOKENS, (q_heads + 2 * kv_heads) * dim, seed=3)
    whole = run(
        data.two_threads(),
        qkv,
        np.arange(TOKENS),
        sequence(12),
        q_heads,
        data.poisoned_cache(data.two_threads(), 12, kv_heads, dim),
        interleaved,
        rules,
    )
    ops, tables = data.one_thread(), sequence(12, seed=5)
    cache = data.poisoned_cache(ops, 12, kv_heads, dim)
    edges = sorted({0, TOKENS, *cuts})
    for first, last in pairwise(edges):
        part = run(ops, qkv[first:last], np.arange(first, last), tables, q_heads, cache, interleaved, rules)
        assert part.tobytes() == whole[first:last].tobytes()


def test_sequences_in_one_step_do_not_mix(ops: NumbaOps) -> None:
    qkv = data.normal(200, (4 + 4) * 16, seed=4)
    tables = np.array([[1, 2, 0], [3, 4, 0]], np.int32)
    alone = [
        run(ops, half, np.arange(100), tables[:1], 4, data.poisoned_cache(ops, 5, 2, 16), True)
        for half in (qkv[:100], qkv[100:])
    ]
    order = np.random.default_rng(0).permutation(200)
    positions, table_of = np.tile(np.arange(100), 2)[order], np.repeat([0, 1], 100)[order]
    rows, mixed, out = data.batch(positions, tables, table_of), qkv[order], data.poison(200, 64)
    cache = data.poisoned_cache(ops, 5, 2, 16)
    ops.rope_write(mixed, rows, ops.rope_tables(TOKENS, frequencies(16), 1.0), True, 4, cache)
    ops.attention(mixed, rows, 4, 0.25, cache, out)
    assert out.tobytes() == np.concatenate(alone)[order].tobytes()
