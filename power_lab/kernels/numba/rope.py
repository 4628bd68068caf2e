"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864) and the write of keys and values into their pages.

Pages: keys [pages, KV heads, head_dim, BLOCK], so that attention reads 16 keys as one vector; values [pages, KV heads, BLOCK, head_dim].
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numba import carray, njit

from power_lab.kernels.numba.norm import norm_row
from power_lab.kernels.numba.team import ROPE, share
from power_lab.kernels.numba.vector import (
    address,
    f32_bits,
    f32_from_bits,
    f32_pointer,
    i32_pointer,
    i64_pointer,
)
from power_lab.kernels.ops import BLOCK

ROWS = 16  # a chunk's; fewer are not worth sharing
PLAN = "x0 * cos - x1 * sin, x0 * sin + x1 * cos, rounded operation by operation"


def rope_table(positions: int, frequencies: Sequence[float], magnitude: float) -> np.ndarray:
    """f32 [positions, pairs, 2]: magnitude times cosine and sine of position * frequency, computed in f64."""
    angle = np.arange(positions, dtype=np.float64)[:, None] * np.asarray(frequencies, np.float64)
    return (magnitude * np.stack([np.cos(angle), np.sin(angle)], axis=-1)).astype(np.float32)


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
    """Up to ROWS rows; `job` int64 words as written by `rope_write`."""
    rows, qkv, positions, slots, rope, keys, values = job[1:8]
    dim, q_heads, kv_heads, half, interleaved = job[8:13]
    norms = (job[13], job[14], job[15], job[16], job[17])
    first, last = index * ROWS, min(rows, (index + 1) * ROWS)
    _rows(first, last, qkv, positions, slots, rope, keys, values, dim, q_heads, kv_heads, half, interleaved, norms)


@njit(nogil=True)
def rope_write(team, qkv, positions, slots, rope, interleaved, q_heads, keys, values, q_norm, k_norm, eps):
    """Treat queries and keys of qkv f32 [R, (q_heads + 2 kv_heads) * head_dim] in place; write keys and values to int64 `slots`.

    rope f32 [positions, pairs, 2]; q_norm and k_norm f32 [head_dim] or of all heads. What is empty is left out.
    """
    rows = qkv.shape[0]
    arrays = (address(qkv), address(positions), address(slots), address(rope), address(keys), address(values))
    shape = (keys.shape[2], q_heads, keys.shape[1], rope.shape[1], int(interleaved))
    norms = (address(q_norm), q_norm.shape[0], address(k_norm), k_norm.shape[0], f32_bits(np.float32(eps)))
    if rows <= ROWS:
        _rows(0, rows, *arrays, *shape, norms)
    else:
        share(team, (ROPE, rows, *arrays, *shape, *norms), (rows + ROWS - 1) // ROWS)
