"""Row lookups: embedding rows out of a stored table, alone or beside a state, and activation rows out of a step."""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from power_lab.kernels.numba.norm import norm_row
from power_lab.kernels.numba.program import Job, bits, f32, i32, i64, same
from power_lab.kernels.numba.rows import ROW, WORDS, call_unpack
from power_lab.kernels.numba.team import EMBED, GATHER, MERGE
from power_lab.kernels.numba.vector import f32_from_bits, f32_pointer, i32_pointer, i64_pointer

ROWS = 32  # a chunk's; fewer are not worth sharing


@njit(nogil=True)
def chunk(job, index, scratch):
    """Up to ROWS rows; `job` as made by `job`. A row of an id outside the table is NaN, which no later operation hides."""
    weights, ids, rows, out, scale, before, count_before = job[1:8]
    k = carray(i64_pointer(weights), 6)[3]
    for r in range(index * ROWS, min(rows, (index + 1) * ROWS)):
        _row(weights, carray(i32_pointer(ids), rows)[r], before, count_before, f32_from_bits(scale), out + r * k * 4, scratch)


@njit(nogil=True)
def _row(weights, id, before, count_before, factor, out, scratch):
    """One row of `out`, an address."""
    base, count, k, pitch = carray(i64_pointer(weights), 6)[1:5]
    unpack = carray(i64_pointer(carray(i64_pointer(weights), 6)[0]), WORDS)[ROW]
    row, unpacked = carray(f32_pointer(out), k), carray(f32_pointer(scratch), k)
    if id < 0 and -1 - id < count_before:
        id = carray(i32_pointer(before), count_before)[-1 - id]
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
def merge_chunk(job, index, scratch):
    """Up to ROWS rows; `job` as made by `merge_job`."""
    weights, ids, rows, scale, before, count_before, first, states, count, places, second, eps, out, d = job[1:15]
    for r in range(index * ROWS, min(rows, (index + 1) * ROWS)):
        left, right = out + r * d * 8, out + r * d * 8 + d * 4
        _row(weights, carray(i32_pointer(ids), rows)[r], before, count_before, f32_from_bits(scale), left, scratch)
        norm_row(left, 0, first, f32_from_bits(eps), left, d)
        place, to = carray(i64_pointer(places), rows)[r] if places else r, carray(f32_pointer(right), d)
        if place < 0:
            to[:] = 0.0
        elif place < count:
            norm_row(states + place * d * 4, 0, second, f32_from_bits(eps), right, d)
        else:
            to[:] = np.nan


def merge_job(
    plan: np.ndarray,
    ids: np.ndarray,
    scale: float,
    drawn: np.ndarray | None,
    first: np.ndarray,
    states: np.ndarray,
    index: np.ndarray | None,
    second: np.ndarray,
    eps: float,
    out: np.ndarray,
) -> Job:
    """Arguments as in `Ops.merge`, plan int64 [1, 6] as in `linear`; scratch K + 15 floats."""
    rows, d = len(ids), states.shape[1]
    for given, shape, what in ((out, (rows, 2 * d), "result"), (first, (d,), "first norm"), (second, (d,), "second norm")):
        same(given.shape, shape, f"shape of the {what}")
    if (len(states) < rows) if index is None else (len(index) != rows):
        raise ValueError(f"{rows} rows, and states of {len(states) if index is None else len(index)}")
    drew, places = (0, 0) if drawn is None else (i32(drawn), len(drawn)), 0 if index is None else i64(index)
    numbers = i64(plan), i32(ids), rows, bits(scale), *drew, f32(first), f32(states), len(states), places
    return -(-rows // ROWS), MERGE, *numbers, f32(second), bits(eps), f32(out), d


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
