"""Matrix products with stored weights, and the gated activation that follows two of them.

Up to `DIRECT_ROWS` activation rows, tiles read the stored blocks and unpack them in registers. Beyond, a panel of weight rows is unpacked
once into scratch and reused by all row tiles. Both run `tiles.PLAN`, so the bits agree.

A weight is described by one int64 row: kind, address, N, K, bytes per row, first output column.
"""

from __future__ import annotations

from numba import carray, njit, types

from power_lab.kernels.numba import tiles
from power_lab.kernels.numba import vector as v
from power_lab.kernels.numba.formats import PANEL
from power_lab.kernels.numba.team import LINEAR, THREADS, share
from power_lab.kernels.numba.vector import LANES, Builder, Span, Value, address, i64_pointer
from power_lab.kernels.quants import QuantType

DIRECT_ROWS = 8
STRIP = 32  # weight rows, so output columns, that are worked on at a time
TILE_COLS = 4

F32, F16, Q4_1, Q8_0, BF16 = (int(QuantType[name]) for name in ("F32", "F16", "Q4_1", "Q8_0", "BF16"))

f32_1, f16_1, bf16_1, q4_1_1, q8_0_1 = (tiles.tile(kind, 1, 4) for kind in (F32, F16, BF16, Q4_1, Q8_0))
f32_4, f16_4, bf16_4, q4_1_4, q8_0_4 = (tiles.tile(kind, 4, 4) for kind in (F32, F16, BF16, Q4_1, Q8_0))
q4_1_2, q8_0_2 = (tiles.tile(kind, 2, 4) for kind in (Q4_1, Q8_0))
q4_1_8, q8_0_8 = (tiles.tile(kind, 8, 2) for kind in (Q4_1, Q8_0))
panel_tile = tiles.tile(PANEL, 4, TILE_COLS)
f32_unpack, f16_unpack, q4_1_unpack, q8_0_unpack, bf16_unpack = (
    tiles.unpack(kind, TILE_COLS) for kind in (F32, F16, Q4_1, Q8_0, BF16)
)


def scratch_floats(cols: int, rows: int) -> int:
    """Scratch of one thread for weights of `cols` values a row and `rows` activation rows: a panel, and a strip of results."""
    return STRIP * (cols + LANES) + STRIP * rows


def _emit_silu_mul(b: Builder, gate: Value, up: Value, out: Value, count: Value) -> None:
    def body(span: Span) -> None:
        g, one = span.load(gate), v.const(v.vec(v.F32), 1.0)
        span.store(b.fmul(b.fdiv(g, b.fadd(one, v.exp(b, b.fneg(g)))), span.load(up)), out)

    v.sweep(b, count, body)


silu_mul = v.routine("silu_mul", types.void, [types.int64] * 4, _emit_silu_mul)


@njit(nogil=True, inline="always")
def _unpack(kind, w, pitch, n, k, panel):
    """Unpack n weight rows into consecutive tile panels."""
    if kind == Q4_1:
        q4_1_unpack(w, pitch, n, k, panel)
    elif kind == Q8_0:
        q8_0_unpack(w, pitch, n, k, panel)
    elif kind == F16:
        f16_unpack(w, pitch, n, k, panel)
    elif kind == BF16:
        bf16_unpack(w, pitch, n, k, panel)
    else:
        f32_unpack(w, pitch, n, k, panel)


@njit(nogil=True, inline="always")
def _panel(x, rows, panel, n, k, out, pitch):
    """out[:rows, :n] from unpacked panels; four rows of x stay in the nearest cache while the panels pass by."""
    size = (k + LANES - 1) // LANES * LANES * TILE_COLS * 4
    for r in range(0, rows, 4):
        panel_tile(x + r * k * 4, k * 4, min(4, rows - r), panel, size, n, k, out + r * pitch, pitch)


@njit(nogil=True, inline="always")
def _direct(kind, x, rows, w, w_pitch, n, k, out, pitch):
    """out[:rows, :n] for few rows, straight from the stored values."""
    xs = k * 4
    if kind == Q4_1:
        if rows == 1:
            q4_1_1(x, xs, rows, w, w_pitch, n, k, out, pitch)
        elif rows == 2:
            q4_1_2(x, xs, rows, w, w_pitch, n, k, out, pitch)
        elif rows <= 4:
            q4_1_4(x, xs, rows, w, w_pitch, n, k, out, pitch)
        else:
            q4_1_8(x, xs, rows, w, w_pitch, n, k, out, pitch)
    elif kind == Q8_0:
        if rows == 1:
            q8_0_1(x, xs, rows, w, w_pitch, n, k, out, pitch)
        elif rows == 2:
            q8_0_2(x, xs, rows, w, w_pitch, n, k, out, pitch)
        elif rows <= 4:
            q8_0_4(x, xs, rows, w, w_pitch, n, k, out, pitch)
        else:
            q8_0_8(x, xs, rows, w, w_pitch, n, k, out, pitch)
    elif kind == F16:
        if rows == 1:
            f16_1(x, xs, rows, w, w_pitch, n, k, out, pitch)
        else:
            f16_4(x, xs, rows, w, w_pitch, n, k, out, pitch)
    elif kind == BF16:
        if rows == 1:
            bf16_1(x, xs, rows, w, w_pitch, n, k, out, pitch)
        else:
            bf16_4(x, xs, rows, w, w_pitch, n, k, out, pitch)
    else:
        if rows == 1:
            f32_1(x, xs, rows, w, w_pitch, n, k, out, pitch)
        else:
            f32_4(x, xs, rows, w, w_pitch, n, k, out, pitch)


@njit(nogil=True, inline="always")
def _is_direct(kind, rows):
    """Plain values cost little to unpack, so they have no tile of 8 rows."""
    return rows <= 4 or (rows <= DIRECT_ROWS and kind in (Q4_1, Q8_0))


@njit(nogil=True, inline="always")
def _strip(x, rows, plan, i, first, n, out, pitch, panel):
    """out[:rows, :n] for rows first..first + n - 1 of weight i, unpacked into `panel` if there are many activation rows."""
    kind, k, w_pitch = plan[i, 0], plan[i, 3], plan[i, 4]
    w = plan[i, 1] + first * w_pitch
    if _is_direct(kind, rows):
        _direct(kind, x, rows, w, w_pitch, n, k, out, pitch)
    else:
        _unpack(kind, w, w_pitch, n, k, panel)
        _panel(x, rows, panel, n, k, out, pitch)


@njit(nogil=True, inline="always")
def _columns(n, rows, threads):
    """Output columns of a chunk: a panel's strip where there are many rows, else a few microseconds of reading."""
    return STRIP if rows > DIRECT_ROWS else min(512, max(64, n // (8 * threads) // STRIP * STRIP))


@njit(nogil=True)
def chunk(job, index, scratch):
    """Work of one chunk: some columns of one weight, for all rows. `job` int64 words as written by `linear`."""
    x, rows, k, weights, count, out, pitch, gated, threads = job[1:10]
    plan = carray(i64_pointer(weights), (count, 6))
    i, columns = 0, _columns(plan[0, 2], rows, threads)
    while index * columns >= plan[i, 2]:
        index -= (plan[i, 2] + columns - 1) // columns
        i += 1
        columns = _columns(plan[i, 2], rows, threads)
    low = index * columns
    high = min(plan[i, 2], low + columns)
    beside = scratch + STRIP * (k + LANES) * 4  # up, while gate waits in out
    for first in range(low, high, STRIP):
        n, to = min(STRIP, high - first), out + (plan[i, 5] + first) * 4
        for j in range(1 + gated):
            at, at_pitch = (beside, STRIP * 4) if j else (to, pitch)
            _strip(x, rows, plan, i + j, first, n, at, at_pitch, scratch)
        for r in range(rows * gated):
            silu_mul(to + r * pitch, beside + r * STRIP * 4, to + r * pitch, n)


@njit(nogil=True)
def linear(team, x, weights, out, gated):
    """x f32 [R, K], weights int64 [W, 6], out f32 [R, sum N].

    gated 0: out = the products side by side. gated 1, with two weights: out = silu(x W0^T) * (x W1^T).
    """
    rows, threads, chunks = x.shape[0], team[THREADS], 0
    for i in range(weights.shape[0] - gated):
        columns = _columns(weights[i, 2], rows, threads)
        chunks += (weights[i, 2] + columns - 1) // columns
    sizes, results = (rows, x.shape[1]), (address(out), out.shape[1] * 4)
    share(team, (LINEAR, address(x), *sizes, address(weights), weights.shape[0], *results, gated, threads), chunks)
