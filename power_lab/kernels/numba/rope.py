"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864) and the write of keys and values into their pages.

Pages: keys [pages, KV heads, head_dim, BLOCK], so that attention reads 16 keys as one vector; values [pages, KV heads, BLOCK, head_dim].
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from power_lab.kernels.ops import BLOCK

PLAN = "x0 * cos - x1 * sin, x0 * sin + x1 * cos, rounded operation by operation"


def rope_table(positions: int, rotary_dim: int, theta: float) -> np.ndarray:
    """f32 [positions, rotary_dim / 2, 2]: cosine and sine of position * theta^(-2i / rotary_dim), computed in f64."""
    frequency = theta ** (-np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)
    angle = np.arange(positions, dtype=np.float64)[:, None] * frequency
    return np.stack([np.cos(angle), np.sin(angle)], axis=-1).astype(np.float32)


@njit(nogil=True)
def _rotate(head, turn, interleaved):
    """Rotate one head [head_dim] in place; `turn` f32 [rotary_dim / 2, 2]."""
    half = turn.shape[0]
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        x, y, cos, sin = head[a], head[b], turn[i, 0], turn[i, 1]
        head[a] = x * cos - y * sin
        head[b] = x * sin + y * cos


@njit(nogil=True)
def _rows(qkv, positions, slots, rope, interleaved, q_heads, keys, values, first, step):
    kv_heads, dim = keys.shape[1], keys.shape[2]
    for r in range(first, qkv.shape[0], step):
        turn, page, offset = rope[positions[r]], slots[r] // BLOCK, slots[r] % BLOCK
        for h in range(q_heads + kv_heads):
            _rotate(qkv[r, h * dim : (h + 1) * dim], turn, interleaved)
        for h in range(kv_heads):
            k, value = (q_heads + h) * dim, (q_heads + kv_heads + h) * dim
            for d in range(dim):
                keys[page, h, d, offset] = qkv[r, k + d]
                values[page, h, offset, d] = qkv[r, value + d]


@njit(nogil=True)
def rope_write_serial(qkv, positions, slots, rope, interleaved, q_heads, keys, values):
    """Rotate queries and keys of qkv f32 [R, (q_heads + 2 kv_heads) * head_dim] in place; write keys and values to int64 `slots`."""
    _rows(qkv, positions, slots, rope, interleaved, q_heads, keys, values, 0, 1)


@njit(parallel=True, nogil=True)
def rope_write_parallel(qkv, positions, slots, rope, interleaved, q_heads, keys, values, parts):
    """The same, rows shared among `parts` threads."""
    for part in prange(parts):
        _rows(qkv, positions, slots, rope, interleaved, q_heads, keys, values, part, parts)
