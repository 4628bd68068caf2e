"""Row lookups: embedding rows out of a stored table, and activation rows out of a step."""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from power_lab.kernels.numba.rows import ROW, WORDS, call_unpack
from power_lab.kernels.numba.vector import address, i64_pointer


@njit(nogil=True)
def embed(weights, ids, out, scale, scratch):
    """out[r] = row ids[r] * f32(scale). weights int64 [1, 6] as in `linear`, ids int32 [R], out f32 [R, K].

    scratch f32 [threads, >= K + 15].
    """
    base, k, pitch = weights[0, 1], weights[0, 3], weights[0, 4]
    unpack = carray(i64_pointer(weights[0, 0]), WORDS)[ROW]
    to, factor = address(scratch), np.float32(scale)
    for r in range(ids.shape[0]):
        if not 0 <= ids[r] < weights[0, 2]:
            raise IndexError("token id outside the embedding table")
        call_unpack(unpack, base + ids[r] * pitch, pitch, 1, k, to)
        for i in range(k):
            out[r, i] = scratch[0, i] * factor


@njit(nogil=True)
def gather(x, rows, out):
    """out[i] = x[rows[i]]; x f32 [R, D], rows int32 [Q], out f32 [Q, D]."""
    for i in range(rows.shape[0]):
        if not 0 <= rows[i] < x.shape[0]:
            raise IndexError("row outside the step")
        for d in range(x.shape[1]):
            out[i, d] = x[rows[i], d]
