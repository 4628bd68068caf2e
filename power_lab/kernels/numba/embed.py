"""Row lookups: embedding rows out of a stored table, and activation rows out of a step."""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from power_lab.kernels.numba.program import Job, bits, f32, i32, i64
from power_lab.kernels.numba.rows import ROW, WORDS, call_unpack
from power_lab.kernels.numba.team import EMBED, GATHER
from power_lab.kernels.numba.vector import f32_from_bits, f32_pointer, i32_pointer, i64_pointer

ROWS = 32  # a chunk's; fewer are not worth sharing


@njit(nogil=True)
def chunk(job, index, scratch):
    """Up to ROWS rows; `job` as made by `job`. A row of an id outside the table is NaN, which no later operation hides."""
    weights, ids, rows, out, scale, before, count_before = job[1:8]
    base, count, k, pitch = carray(i64_pointer(weights), 6)[1:5]
    unpack = carray(i64_pointer(carray(i64_pointer(weights), 6)[0]), WORDS)[ROW]
    wanted, unpacked, factor = carray(i32_pointer(ids), rows), carray(f32_pointer(scratch), k), f32_from_bits(scale)
    drawn = carray(i32_pointer(before), count_before)
    for r in range(index * ROWS, min(rows, (index + 1) * ROWS)):
        row = carray(f32_pointer(out + r * k * 4), k)
        id = wanted[r]
        if id < 0 and -1 - id < count_before:
            id = drawn[-1 - id]
        if 0 <= id < count:
            call_unpack(unpack, base + id * pitch, pitch, 1, k, scratch)
            for i in range(k):
                row[i] = unpacked[i] * factor
        else:
            row[:] = np.nan


def job(plan: np.ndarray, ids: np.ndarray, out: np.ndarray, scale: float, drawn: np.ndarray | None = None) -> Job:
    """out[r] = row ids[r] * f32(scale), where an id i below 0 stands for drawn[-i - 1].

    plan int64 [1, 6] as in `linear`, ids and drawn int32 [R] and [any], out f32 [R, K]; scratch K + 15 floats.
    """
    rows, before = ids.shape[0], (0, 0) if drawn is None else (i32(drawn), len(drawn))
    return -(-rows // ROWS), EMBED, i64(plan), i32(ids), rows, f32(out), bits(scale), *before


@njit(nogil=True)
def gather_chunk(job, index, scratch):
    """Up to ROWS rows; `job` as made by `gather_job`. A row outside the step is NaN."""
    x, count, rows, wanted, d, out = job[1:7]
    numbers = carray(i32_pointer(rows), wanted)
    for r in range(index * ROWS, min(wanted, (index + 1) * ROWS)):
        to = carray(f32_pointer(out + r * d * 4), d)
        if 0 <= numbers[r] < count:
            to[:] = carray(f32_pointer(x + numbers[r] * d * 4), d)
        else:
            to[:] = np.nan


def gather_job(x: np.ndarray, rows: np.ndarray, out: np.ndarray) -> Job:
    """out[i] = x[rows[i]]; x f32 [R, D], rows int32 [Q], out f32 [Q, D]."""
    wanted = rows.shape[0]
    return -(-wanted // ROWS), GATHER, f32(x), x.shape[0], i32(rows), wanted, x.shape[1], f32(out)
