"""Rotary embedding and paged attention against the reference; one row's bits in any company and any chunking."""

from __future__ import annotations

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
) -> np.ndarray:
    """Rotate, write and attend, as a layer does."""
    rows = data.batch(positions, tables)
    qkv = qkv.copy()
    out = data.poison(len(positions) + 1, heads * cache.head_dim)
    ops.rope_write(qkv, rows, ops.rope_tables(TOKENS, cache.head_dim, 1e4), interleaved, heads, cache)
    ops.attention(qkv, rows, heads, cache.head_dim**-0.5, cache, out[:-1])
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
    rotated = reference.rope(parts[:, : q_heads + kv_heads], reference.rope_tables(TOKENS, dim, 1e4), interleaved)
    for row in (0, 1, BLOCK - 1, BLOCK, 255, 256, 511, 512, TOKENS - 1):
        keys, values = rotated[: row + 1, q_heads:], parts[: row + 1, q_heads + kv_heads :]
        want = reference.attention(rotated[row, :q_heads], keys, values, dim**-0.5).numpy().reshape(-1)
        np.testing.assert_allclose(out[row], want, rtol=1e-4, atol=2e-6)


def test_rope_tables_and_partial_rotation(ops: NumbaOps) -> None:
    table = ops.rope_tables(8192, 64, 1e5)
    np.testing.assert_allclose(table, reference.rope_tables(8192, 64, 1e5).numpy(), atol=6e-8)
    rope, rows = ops.rope_tables(50, 8, 1e4), data.batch(np.arange(40, 43), sequence(4))
    qkv = data.normal(3, 3 * 24)
    want = reference.rope(torch.from_numpy(qkv).view(3, 3, 24)[:, :2], torch.from_numpy(rope)[40:43].double(), False)
    ops.rope_write(qkv, rows, rope, False, 1, data.poisoned_cache(ops, 4, 1, 24))
    np.testing.assert_allclose(qkv.reshape(3, 3, 24)[:, :2], want.numpy(), rtol=1e-5, atol=1e-6)


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(HEADS[:4]), st.lists(st.integers(1, TOKENS - 1), max_size=8), st.booleans())
def test_chunking_does_not_change_bits(heads: tuple[int, int, int], cuts: list[int], interleaved: bool) -> None:
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
    )
    ops, tables = data.one_thread(), sequence(12, seed=5)
    cache = data.poisoned_cache(ops, 12, kv_heads, dim)
    edges = sorted({0, TOKENS, *cuts})
    for first, last in pairwise(edges):
        part = run(ops, qkv[first:last], np.arange(first, last), tables, q_heads, cache, interleaved)
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
    ops.rope_write(mixed, rows, ops.rope_tables(TOKENS, 16, 1e4), True, 4, cache)
    ops.attention(mixed, rows, 4, 0.25, cache, out)
    assert out.tobytes() == np.concatenate(alone)[order].tobytes()
