"""Row lookups: embedding rows out of a stored table, and activation rows out of a step."""

from __future__ import annotations

from numba import njit

from power_lab.kernels.numba import tiles
from power_lab.kernels.numba.linear import BF16, F16, F32, Q4_1, Q8_0
from power_lab.kernels.numba.vector import address

f32_row, f16_row, q4_1_row, q8_0_row, bf16_row = (tiles.unpack(kind, 1) for kind in (F32, F16, Q4_1, Q8_0, BF16))


@njit(nogil=True)
def embed(weights, ids, out, scratch):
    """weights int64 [1, 6] as in `linear`, ids int32 [R], out f32 [R, K], scratch f32 [threads, >= K + 15]."""
    kind, base, k, pitch = weights[0, 0], weights[0, 1], weights[0, 3], weights[0, 4]
    to = address(scratch)
    for r in range(ids.shape[0]):
        if not 0 <= ids[r] < weights[0, 2]:
            raise IndexError("token id outside the embedding table")
        at = base + ids[r] * pitch
        if kind == Q4_1:
            q4_1_row(at, pitch, 1, k, to)
        elif kind == Q8_0:
            q8_0_row(at, pitch, 1, k, to)
        elif kind == F16:
            f16_row(at, pitch, 1, k, to)
        elif kind == BF16:
            bf16_row(at, pitch, 1, k, to)
        else:
            f32_row(at, pitch, 1, k, to)
        for i in range(k):
            out[r, i] = scratch[0, i]


@njit(nogil=True)
def gather(x, rows, out):
    """out[i] = x[rows[i]]; x f32 [R, D], rows int32 [Q], out f32 [Q, D]."""
    for i in range(rows.shape[0]):
        if not 0 <= rows[i] < x.shape[0]:
            raise IndexError("row outside the step")
        for d in range(x.shape[1]):
            out[i, d] = x[rows[i], d]
