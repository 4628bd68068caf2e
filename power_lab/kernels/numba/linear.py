"""Matrix products with stored weights, and the gated activation that follows two of them.

For few activation rows, tiles read the stored blocks and unpack them in registers. Beyond, a panel of weight rows is unpacked
once into scratch and reused by all row tiles. Both run `tiles.PLAN`, so the bits agree.

A weight is described by one int64 row: address of its type's `rows` table, address of its values, N, K, bytes per row, first output
column.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit, types

from power_lab.kernels.numba import machine
from power_lab.kernels.numba import vector as v
from power_lab.kernels.numba.formats.plain import Panel
from power_lab.kernels.numba.program import Job, f32, i64
from power_lab.kernels.numba.rows import DIRECT_ROWS, PANEL_ROWS, PANELS, WORDS, call_tile, call_unpack
from power_lab.kernels.numba.team import LINEAR
from power_lab.kernels.numba.tiles import AHEAD, LINE, Tile
from power_lab.kernels.numba.vector import LANES, Builder, Span, Value, i64_pointer

STRIP = 32  # weight rows, so output columns, that are worked on at a time
# Activation rows up to which weights are unpacked in registers, twice if need be, and not into panels.
TWICE = 2 * DIRECT_ROWS
TILE_ROWS = 4  # activation rows of a tile that reads panels
NONE, SILU, GELU_TANH = range(3)
ACTIVATIONS = {"silu": SILU, "gelu_tanh": GELU_TANH}
PLAN = "silu(g) = g / (1 + e^-g); gelu_tanh(g) = g / (1 + e^-2u), u = sqrt(2 / pi) (g + 0.044715 g^3) as g * fma(g^2, b, a)"
DESCRIPTION = 6  # words of a weight


def scratch_floats(cols: int, rows: int) -> int:
    """Scratch of one thread for weights of `cols` values a row and `rows` activation rows: a panel, and a strip of results."""
    return STRIP * (cols + LANES) + STRIP * rows


def _emit_panel_tile(b: Builder, *args: Value) -> None:
    Tile(Panel(machine.host(), PANEL_ROWS), TILE_ROWS, PANEL_ROWS).emit(b, *args)


def _emit_silu_mul(b: Builder, gate: Value, up: Value, out: Value, count: Value) -> None:
    def body(span: Span) -> None:
        g = span.load(gate)
        span.store(b.fmul(_divided(b, g, b.fneg(g)), span.load(up)), out)

    v.sweep(b, count, body)


def _emit_gelu_mul(b: Builder, gate: Value, up: Value, out: Value, count: Value) -> None:
    """The tanh form of GELU (Hendrycks and Gimpel 2016, arXiv:1606.08415): g (1 + tanh u) / 2 = g / (1 + e^-2u)."""

    def body(span: Span) -> None:
        g = span.load(gate)
        twice = 2 * (2 / 3.141592653589793) ** 0.5
        slope = v.fma(b, b.fmul(g, g), _floats(-0.044715 * twice), _floats(-twice))
        span.store(b.fmul(_divided(b, g, b.fmul(g, slope)), span.load(up)), out)

    v.sweep(b, count, body)


def _divided(b: Builder, g: Value, exponent: Value) -> Value:
    """g / (1 + e^exponent)."""
    return b.fdiv(g, b.fadd(_floats(1.0), v.exp(b, exponent)))


def _floats(value: float) -> Value:
    return v.const(v.vec(v.F32), value)


def _emit_add(b: Builder, x: Value, y: Value, count: Value) -> None:
    """x += y."""
    v.sweep(b, count, lambda span: span.store(b.fadd(span.load(x), span.load(y)), x))


def _emit_fetch(b: Builder, start: Value, size: Value) -> None:
    """Ask for `size` bytes from `start`."""
    with v.loop(b, b.udiv(b.add(size, v.i64(LINE - 1)), v.i64(LINE))) as i:
        v.prefetch(b, v.at(b, start, b.mul(i, v.i64(LINE))))


fetch = v.routine("fetch", types.void, [types.int64] * 2, _emit_fetch)
panel_tile = v.routine("panel_tile", types.void, [types.int64] * Tile.arguments, _emit_panel_tile)
silu_mul = v.routine("silu_mul", types.void, [types.int64] * 4, _emit_silu_mul)
gelu_mul = v.routine("gelu_mul", types.void, [types.int64] * 4, _emit_gelu_mul)
add_row = v.routine("add_row", types.void, [types.int64] * 3, _emit_add)


@njit(nogil=True, inline="always")
def _panel(x, rows, panel, n, k, out, pitch):
    """out[:rows, :n] from unpacked panels; four rows of x stay in the nearest cache while the panels pass by."""
    size = (k + LANES - 1) // LANES * LANES * PANEL_ROWS * 4
    for r in range(0, rows, TILE_ROWS):
        panel_tile(x + r * k * 4, k * 4, min(TILE_ROWS, rows - r), panel, size, n, k, out + r * pitch, pitch)


@njit(nogil=True, inline="always")
def _strip(x, rows, plan, i, first, n, out, pitch, panel):
    """out[:rows, :n] for rows first..first + n - 1 of weight i, unpacked into `panel` if there are many activation rows."""
    k, w_pitch = plan[i, 3], plan[i, 4]
    w, table = plan[i, 1] + first * w_pitch, carray(i64_pointer(plan[i, 0]), WORDS)
    if rows <= TWICE:
        for r in range(0, rows, DIRECT_ROWS):
            here = min(DIRECT_ROWS, rows - r)
            call_tile(table[here], x + r * k * 4, k * 4, here, w, w_pitch, n, k, out + r * pitch, pitch)
    else:
        call_unpack(table[PANELS], w, w_pitch, n, k, panel)
        _panel(x, rows, panel, n, k, out, pitch)


def columns(n: int, rows: int, threads: int) -> int:
    """Output columns of a chunk: a panel's strip where there are many rows, else a few microseconds of reading, as many for each thread."""
    if rows > TWICE:
        return STRIP
    chunks = threads * max(1, n // (threads * (128 if n < 8192 else 512)))
    return (n + 4 * chunks - 1) // (4 * chunks) * 4


_columns = njit(nogil=True, inline="always")(columns)


@njit(nogil=True, inline="always")
def _gate(activation, gate, up, n):
    """gate = activation(gate) * up."""
    if activation == SILU:
        silu_mul(gate, up, gate, n)
    else:
        gelu_mul(gate, up, gate, n)


@njit(nogil=True)
def chunk(job, index, scratch):
    """Work of one chunk: some columns of one weight, for all rows. `job` as made by `job`."""
    x, rows, k, weights, count, out, pitch, bias, activation, threads = job[1:11]
    plan = carray(i64_pointer(weights), (count, DESCRIPTION))
    i, width = 0, _columns(plan[0, 2], rows, threads)
    while index * width >= plan[i, 2]:
        index -= (plan[i, 2] + width - 1) // width
        i += 1
        width = _columns(plan[i, 2], rows, threads)
    low = index * width
    high = min(plan[i, 2], low + width)
    for j in range(i, i + 1 + int(activation != NONE)):
        fetch(plan[j, 1] + low * plan[j, 4], min(AHEAD, high - low) * plan[j, 4])
    beside = scratch + STRIP * (k + LANES) * 4  # up, while gate waits in out
    for first in range(low, high, STRIP):
        n, at = min(STRIP, high - first), (plan[i, 5] + first) * 4
        _strip(x, rows, plan, i, first, n, out + at, pitch, scratch)
        if activation != NONE:
            _strip(x, rows, plan, i + 1, first, n, beside, STRIP * 4, scratch)
            for r in range(rows):
                _gate(activation, out + at + r * pitch, beside + r * STRIP * 4, n)
        if bias != 0:
            for r in range(rows):
                add_row(out + at + r * pitch, bias + at, n)


def job(
    x: np.ndarray, plan: np.ndarray, out: np.ndarray, bias: np.ndarray | None, activation: int, threads: int
) -> Job:
    """x f32 [R, K], plan int64 [W, DESCRIPTION], out f32 [R, sum N], bias f32 [sum N].

    activation NONE: out = the products side by side, plus bias. Else, with two weights: out = activation(x W0^T) * (x W1^T).
    """
    rows, gated = x.shape[0], int(activation != NONE)
    sizes = plan[: len(plan) - gated, 2].tolist()
    chunks = sum(-(-n // columns(n, rows, threads)) for n in sizes)
    products = (f32(x), rows, x.shape[1], i64(plan), len(plan), f32(out), out.strides[0])
    return chunks, LINEAR, *products, 0 if bias is None else f32(bias), activation, threads
