"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864) and the write of keys and values into their pages.

Pages: keys [pages, KV heads, head_dim, BLOCK], so that attention reads 16 keys as one vector; values [pages, KV heads, BLOCK, head_dim].
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from power_lab.kernels.numba.norm import norm_row
from power_lab.kernels.numba.program import Job, bits, f32, i32, i64
from power_lab.kernels.numba.team import ROPE
from power_lab.kernels.numba.vector import f32_from_bits, f32_pointer, i32_pointer, i64_pointer
from power_lab.kernels.ops import BLOCK, Batch, KVCache

ROWS = 4  # a chunk's; fewer are not worth sharing
PLAN = "x0 * cos - x1 * sin, x0 * sin + x1 * cos, rounded operation by operation"


@njit(nogil=True, inline="always")
def _rotate(row, start, turn, interleaved):
    """Rotate the head at row[start:] in place; `turn` f32 [pairs, 2]."""
    half = turn.shape[0]
    for i in range(half):
        a = start + (2 * i if interleaved else i)
        b = a + (1 if interleaved else half)
        x, y, cos, sin = row[a], row[b], turn[i, 0], turn[i, 1]
        row[a] = x * cos - y * sin
        row[b] = x * sin + y * cos


@njit(nogil=True, inline="always")
def _normalise(at, weight, size, heads, dim, eps):
    """RMS norm in place of `heads` heads at address `at`: each by itself where the weight has a head's size, else all as one row."""
    if size == dim:
        for h in range(heads):
            norm_row(at + h * dim * 4, 0, weight, eps, at + h * dim * 4, dim)
    else:
        norm_row(at, 0, weight, eps, at, size)


@njit(nogil=True)
def _rows(first, last, qkv, positions, slots, rope, keys, values, dim, q_heads, kv_heads, half, interleaved, norms):
    """Rows first..last - 1; qkv to values are addresses, norms (weight, size) of queries and of keys, then epsilon."""
    width = (q_heads + 2 * kv_heads) * dim
    q_norm, q_size, k_norm, k_size, eps = norms
    for r in range(first, last):
        here = qkv + r * width * 4
        row = carray(f32_pointer(here), width)
        position, slot = carray(i32_pointer(positions), last)[r], carray(i64_pointer(slots), last)[r]
        if q_size:
            _normalise(here, q_norm, q_size, q_heads, dim, f32_from_bits(eps))
        if k_size:
            _normalise(here + q_heads * dim * 4, k_norm, k_size, kv_heads, dim, f32_from_bits(eps))
        if half:
            turn = carray(f32_pointer(rope + position * half * 8), (half, 2))
            for h in range(q_heads + kv_heads):
                _rotate(row, h * dim, turn, interleaved)
        for h in range(kv_heads):
            page = (slot // BLOCK * kv_heads + h) * dim * BLOCK * 4
            k, v = (q_heads + h) * dim, (q_heads + kv_heads + h) * dim
            _place(row[k : k + dim], row[v : v + dim], slot % BLOCK, keys + page, values + page)


@njit(nogil=True, inline="always")
def _place(key, value, offset, keys, values):
    """Write one head's key and value to its page."""
    dim = key.shape[0]
    to_keys, to_values = carray(f32_pointer(keys), (dim, BLOCK)), carray(f32_pointer(values), (BLOCK, dim))
    for d in range(dim):
        to_keys[d, offset] = key[d]
        to_values[offset, d] = value[d]


@njit(nogil=True)
def chunk(job, index, scratch):
    """Up to ROWS rows; `job` as made by `job`."""
    rows, qkv, positions, slots, rope, keys, values = job[1:8]
    dim, q_heads, kv_heads, half, interleaved = job[8:13]
    norms = (job[13], job[14], job[15], job[16], job[17])
    first, last = index * ROWS, min(rows, (index + 1) * ROWS)
    _rows(first, last, qkv, positions, slots, rope, keys, values, dim, q_heads, kv_heads, half, interleaved, norms)


def job(
    qkv: np.ndarray,
    batch: Batch,
    rope: np.ndarray | None,
    interleaved: bool,
    q_heads: int,
    cache: KVCache,
    norms: tuple[np.ndarray, np.ndarray] | None,
    eps: float,
) -> Job:
    """Arguments as in `Ops.rope_write`."""
    arrays = (
        i32(batch.positions),
        i64(batch.slots),
        0 if rope is None else f32(rope),
        f32(cache.keys),
        f32(cache.values),
    )
    kv_heads = 0 if qkv.shape[1] == q_heads * cache.head_dim else cache.heads
    shape = (cache.head_dim, q_heads, kv_heads, 0 if rope is None else rope.shape[1], int(interleaved))
    weights = [0, 0, 0, 0]
    if norms is not None:
        for part, (heads, norm) in enumerate(zip((q_heads, kv_heads), norms, strict=True)):
            if heads:
                weights[2 * part : 2 * part + 2] = f32(norm), norm.shape[0]
    rows = qkv.shape[0]
    return -(-rows // ROWS), ROPE, rows, f32(qkv), *arrays, *shape, *weights, bits(eps)
