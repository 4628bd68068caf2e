"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864) and the write of keys and values into their pages.

Pages: keys [pages, KV heads, head_dim, BLOCK], so that attention reads 16 keys as one vector; values [pages, KV heads, BLOCK, head_dim].
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from power_lab.kernels.numba.team import JOB, ROPE, share
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
def chunk(job, index, scratch):
    """Up to ROWS rows; `job` int64 words as written by `rope_write`."""
    rows, dim, q_heads, kv_heads, half, interleaved = job[8], job[9], job[10], job[11], job[12], job[13]
    width = (q_heads + 2 * kv_heads) * dim
    positions, slots = carray(i32_pointer(job[2]), rows), carray(i64_pointer(job[3]), rows)
    for r in range(index * ROWS, min(rows, (index + 1) * ROWS)):
        row = carray(f32_pointer(job[1] + r * width * 4), width)
        turn = carray(f32_pointer(job[4] + positions[r] * half * 8), (half, 2))
        page, offset = slots[r] // BLOCK * kv_heads * dim * BLOCK, slots[r] % BLOCK
        for h in range(q_heads + kv_heads):
            _rotate(row, h * dim, turn, interleaved)
        for h in range(kv_heads):
            to, k, v = (page + h * dim * BLOCK) * 4, (q_heads + h) * dim, (q_heads + kv_heads + h) * dim
            keys, values = carray(f32_pointer(job[5] + to), (dim, BLOCK)), carray(f32_pointer(job[6] + to), (BLOCK, dim))
            for d in range(dim):
                keys[d, offset] = row[k + d]
                values[offset, d] = row[v + d]


@njit(nogil=True)
def rope_write(team, qkv, positions, slots, rope, interleaved, q_heads, keys, values):
    """Rotate queries and keys of qkv f32 [R, (q_heads + 2 kv_heads) * head_dim] in place; write keys and values to int64 `slots`."""
    rows, job = qkv.shape[0], team[JOB:]
    job[0], job[1], job[2], job[3], job[4] = ROPE, address(qkv), address(positions), address(slots), address(rope)
    job[5], job[6], job[8], job[9], job[10] = address(keys), address(values), rows, keys.shape[2], q_heads
    job[11], job[12], job[13] = keys.shape[1], rope.shape[1], interleaved
    if rows <= ROWS:
        chunk(job, 0, 0)
    else:
        share(team, (rows + ROWS - 1) // ROWS)
