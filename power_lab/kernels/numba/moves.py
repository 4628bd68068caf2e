"""Rows and columns on their way: hidden states into a table, rows out of it, and logits of some tokens among those of all."""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from power_lab.kernels.numba.norm import norm_row
from power_lab.kernels.numba.program import Job, bits, f32, i32, i64, same
from power_lab.kernels.numba.team import SCATTER, TAKE, TAP
from power_lab.kernels.numba.vector import f32_from_bits, f32_pointer, i32_pointer, i64_pointer

ROWS = 16  # a chunk's; fewer are not worth sharing
FEW = 2  # rows of a chunk that has a vocabulary's columns


@njit(nogil=True)
def tap_chunk(job, index, scratch):
    """Up to ROWS rows; `job` as made by `tap_job`."""
    x, delta, post, eps, out, column, slots, d, rows, width, count = job[1:12]
    normed = carray(f32_pointer(scratch), d)
    for r in range(index * ROWS, min(rows, (index + 1) * ROWS)):
        slot = carray(i64_pointer(slots), rows)[r] if slots else r
        if 0 <= slot < count:
            row, to = carray(f32_pointer(x + r * d * 4), d), carray(f32_pointer(out + (slot * width + column) * 4), d)
            if delta:
                added = carray(f32_pointer(delta + r * d * 4), d)
                if post:
                    norm_row(delta + r * d * 4, 0, post, f32_from_bits(eps), scratch, d)
                    added = normed
                for i in range(d):
                    to[i] = row[i] + added[i]
            else:
                to[:] = row


def tap_job(
    x: np.ndarray,
    delta: np.ndarray | None,
    post: np.ndarray | None,
    eps: float,
    out: np.ndarray,
    column: int,
    slots: np.ndarray | None,
) -> Job:
    """Arguments as in `Ops.tap`; scratch D floats."""
    (rows, d), (count, width) = x.shape, out.shape
    if not 0 <= column <= width - d:
        raise ValueError(f"{d} columns from {column} on are not in {width}")
    if slots is None and count < rows:
        raise ValueError(f"{rows} rows have no place in {count}")
    for given, shape, what in (
        (delta, (rows, d), "is added"),
        (post, (d,), "norms it"),
        (slots, (rows,), "places rows"),
    ):
        if given is not None:
            same(given.shape, shape, f"shape of what {what}")
    added = (0 if part is None else f32(part) for part in (delta, post))
    places = 0 if slots is None else i64(slots)
    return -(-rows // ROWS), TAP, f32(x), *added, bits(eps), f32(out), column, places, d, rows, width, count


@njit(nogil=True)
def take_chunk(job, index, scratch):
    """Up to ROWS rows; `job` as made by `take_job`."""
    table, count, index_of, rows, width, out = job[1:7]
    wanted = carray(i64_pointer(index_of), rows)
    for r in range(index * ROWS, min(rows, (index + 1) * ROWS)):
        to = carray(f32_pointer(out + r * width * 4), width)
        if wanted[r] < 0:
            to[:] = 0.0
        elif wanted[r] < count:
            to[:] = carray(f32_pointer(table + wanted[r] * width * 4), width)
        else:
            to[:] = np.nan


def take_job(table: np.ndarray, index: np.ndarray, out: np.ndarray) -> Job:
    """Arguments as in `Ops.take`."""
    rows, width = out.shape
    same((*index.shape, table.shape[1]), (rows, width), "shape of what is taken")
    return -(-rows // ROWS), TAKE, f32(table), len(table), i64(index), rows, width, f32(out)


@njit(nogil=True)
def scatter_chunk(job, index, scratch):
    """Up to FEW rows; `job` as made by `scatter_job`. A column that does not exist is nowhere."""
    values, ids, out, rows, n, vocabulary = job[1:7]
    columns = carray(i32_pointer(ids), n)
    for r in range(index * FEW, min(rows, (index + 1) * FEW)):
        row, to = carray(f32_pointer(values + r * n * 4), n), carray(f32_pointer(out + r * vocabulary * 4), vocabulary)
        to[:] = -np.inf
        for i in range(n):
            if 0 <= columns[i] < vocabulary:
                to[columns[i]] = row[i]


def scatter_job(values: np.ndarray, ids: np.ndarray, out: np.ndarray) -> Job:
    """Arguments as in `Ops.scatter_columns`."""
    (rows, n), vocabulary = values.shape, out.shape[1]
    same((len(out), *ids.shape), (rows, n), "rows and columns of the result")
    return -(-rows // FEW), SCATTER, f32(values), i32(ids), f32(out), rows, n, vocabulary
