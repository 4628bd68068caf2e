"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864) and the write of keys and values into their pages.

Pages: keys [pages, KV heads, head_dim, BLOCK], so that attention reads 16 keys as one vector; values [pages, KV heads, BLOCK, head_dim].
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from power_lab.kernels.numba.team import ROPE, share
from power_lab.kernels.numba.vector import address, f32_pointer, i32_pointer, i64_pointer
from power_lab.kernels.ops import BLOCK

ROWS = 16  # a chunk's; fewer are not worth sharing
PLAN = "x0 * cos - x1 * sin, x0 * sin + x1 * cos, rounded operation by operation"


def rope_table(positions: int, rotary_dim: int, theta: float) -> np.ndarray:
    """f32 [positions, rotary_dim / 2, 2]: cosine and sine of position * theta^(-2i / rotary_dim), computed in f64."""
    frequency = theta ** (-np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)
    angle = np.arange(positions, dtype=np.float64)[:, None] * frequency
    return np.stack([np.cos(angle), np.sin(angle)], axis=-1).astype(np.float32)


@njit(nogil=True, inline="always")
def _rotate(row, start, turn, interleaved):
    """Rotate the head at row[start:] in place; `turn` f32 [rotary_dim / 2, 2]."""
    half = turn.shape[0]
    for i in range(half):
        a = start + (2 * i if interleaved else i)
        b = a + (1 if interleaved else half)
        x, y, cos, sin = row[a], row[b], turn[i, 0], turn[i, 1]
        row[a] = x * cos - y * sin
        row[b] = x * sin + y * cos


@njit(nogil=True)
def _rows(first, last, qkv, positions, slots, rope, keys, values, dim, q_heads, kv_heads, half, interleaved):
    """Rows first..last - 1; qkv to values are addresses."""
    width = (q_heads + 2 * kv_heads) * dim
    for r in range(first, last):
        row = carray(f32_pointer(qkv + r * width * 4), width)
        position, slot = carray(i32_pointer(positions), last)[r], carray(i64_pointer(slots), last)[r]
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
    first, last = index * ROWS, min(rows, (index + 1) * ROWS)
    _rows(first, last, qkv, positions, slots, rope, keys, values, dim, q_heads, kv_heads, half, interleaved)


@njit(nogil=True)
def rope_write(team, qkv, positions, slots, rope, interleaved, q_heads, keys, values):
    """Rotate queries and keys of qkv f32 [R, (q_heads + 2 kv_heads) * head_dim] in place; write keys and values to int64 `slots`."""
    rows = qkv.shape[0]
    arrays = (address(qkv), address(positions), address(slots), address(rope), address(keys), address(values))
    shape = (keys.shape[2], q_heads, keys.shape[1], rope.shape[1], int(interleaved))
    if rows <= ROWS:
        _rows(0, rows, *arrays, *shape)
    else:
        share(team, (ROPE, rows, *arrays, *shape), (rows + ROWS - 1) // ROWS)
