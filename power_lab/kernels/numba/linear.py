"""Matrix products with stored weights, and the gated activation that follows two of them.

Up to `DIRECT_ROWS` activation rows, tiles read the stored blocks and unpack them in registers. Beyond, a panel of weight rows is unpacked
once into scratch and reused by all row tiles. Both run `tiles.PLAN`, so the bits agree.

A weight is described by one int64 row: kind, address, N, K, bytes per row, first output column.
"""

from __future__ import annotations

from numba import njit, prange, types

from power_lab.kernels.numba import tiles
from power_lab.kernels.numba import vector as v
from power_lab.kernels.numba.formats import PANEL
from power_lab.kernels.numba.vector import Builder, Span, Value, address
from power_lab.kernels.quants import QuantType

DIRECT_ROWS = 8
PANEL_COLS = 32  # weight rows unpacked at a time
TILE_COLS = 4
CHUNK = 16  # threads split N at multiples of this

F32, F16, Q4_1, Q8_0, BF16 = (int(t) for t in QuantType)

f32_1, f32_2, f32_4, f32_8 = (tiles.tile(F32, *shape) for shape in ((1, 4), (2, 4), (4, 4), (8, 2)))
f16_1, f16_2, f16_4, f16_8 = (tiles.tile(F16, *shape) for shape in ((1, 4), (2, 4), (4, 4), (8, 2)))
bf16_1, bf16_2, bf16_4, bf16_8 = (tiles.tile(BF16, *shape) for shape in ((1, 4), (2, 4), (4, 4), (8, 2)))
q4_1_1, q4_1_2, q4_1_4, q4_1_8 = (tiles.tile(Q4_1, *shape) for shape in ((1, 4), (2, 4), (4, 4), (8, 2)))
q8_0_1, q8_0_2, q8_0_4, q8_0_8 = (tiles.tile(Q8_0, *shape) for shape in ((1, 4), (2, 4), (4, 4), (8, 2)))
panel_tile = tiles.tile(PANEL, 4, TILE_COLS)
f32_unpack, f16_unpack, q4_1_unpack, q8_0_unpack, bf16_unpack = (tiles.unpack(kind, TILE_COLS) for kind in (F32, F16, Q4_1, Q8_0, BF16))


def scratch_floats(cols: int) -> int:
    """Scratch of one thread for weights of up to `cols` values a row: two panels, and gate and up of one row tile."""
    return 2 * PANEL_COLS * (cols + v.LANES) + 2 * DIRECT_ROWS * PANEL_COLS


def _emit_silu_mul(b: Builder, gate: Value, up: Value, out: Value, count: Value) -> None:
    def body(span: Span) -> None:
        g, one = span.load(gate), v.const(v.vec(v.F32), 1.0)
        span.store(b.fmul(b.fdiv(g, b.fadd(one, v.exp(b, b.fneg(g)))), span.load(up)), out)

    v.sweep(b, count, body)


silu_mul = v.routine("silu_mul", types.void, [types.int64] * 4, _emit_silu_mul)


@njit(nogil=True)
def _unpack(kind, w, pitch, cols, k, panel):
    """Unpack `cols` weight rows into consecutive tile panels."""
    size = (k + 15) // 16 * 16 * TILE_COLS * 4
    for c in range(0, cols, TILE_COLS):
        at, valid, to = w + c * pitch, min(TILE_COLS, cols - c), panel + c // TILE_COLS * size
        if kind == Q4_1:
            q4_1_unpack(at, pitch, valid, k, to)
        elif kind == Q8_0:
            q8_0_unpack(at, pitch, valid, k, to)
        elif kind == F16:
            f16_unpack(at, pitch, valid, k, to)
        elif kind == BF16:
            bf16_unpack(at, pitch, valid, k, to)
        else:
            f32_unpack(at, pitch, valid, k, to)


@njit(nogil=True)
def _panel(x, rows, panel, cols, k, out, pitch):
    """out[:rows, :cols] from an unpacked panel; x stays in the nearest cache while the panel passes by."""
    size = (k + 15) // 16 * 16 * TILE_COLS * 4
    for r in range(0, rows, 4):
        for c in range(0, cols, TILE_COLS):
            at = out + r * pitch + c * 4
            panel_tile(x + r * k * 4, k * 4, min(4, rows - r), panel + c // TILE_COLS * size, 0, min(TILE_COLS, cols - c), k, at, pitch)


@njit(nogil=True)
def _direct(kind, x, rows, w, w_pitch, cols, k, out, pitch):
    """out[:rows, :cols] for 1..8 rows, straight from the stored blocks."""
    xs = k * 4
    step = 4 if rows <= 4 else 2
    for c in range(0, cols, step):
        at, valid, to = w + c * w_pitch, min(step, cols - c), out + c * 4
        if kind == Q4_1:
            if rows == 1:
                q4_1_1(x, xs, rows, at, w_pitch, valid, k, to, pitch)
            elif rows == 2:
                q4_1_2(x, xs, rows, at, w_pitch, valid, k, to, pitch)
            elif rows <= 4:
                q4_1_4(x, xs, rows, at, w_pitch, valid, k, to, pitch)
            else:
                q4_1_8(x, xs, rows, at, w_pitch, valid, k, to, pitch)
        elif kind == Q8_0:
            if rows == 1:
                q8_0_1(x, xs, rows, at, w_pitch, valid, k, to, pitch)
            elif rows == 2:
                q8_0_2(x, xs, rows, at, w_pitch, valid, k, to, pitch)
            elif rows <= 4:
                q8_0_4(x, xs, rows, at, w_pitch, valid, k, to, pitch)
            else:
                q8_0_8(x, xs, rows, at, w_pitch, valid, k, to, pitch)
        elif kind == F16:
            if rows == 1:
                f16_1(x, xs, rows, at, w_pitch, valid, k, to, pitch)
            elif rows == 2:
                f16_2(x, xs, rows, at, w_pitch, valid, k, to, pitch)
            elif rows <= 4:
                f16_4(x, xs, rows, at, w_pitch, valid, k, to, pitch)
            else:
                f16_8(x, xs, rows, at, w_pitch, valid, k, to, pitch)
        elif kind == BF16:
            if rows == 1:
                bf16_1(x, xs, rows, at, w_pitch, valid, k, to, pitch)
            elif rows == 2:
                bf16_2(x, xs, rows, at, w_pitch, valid, k, to, pitch)
            elif rows <= 4:
                bf16_4(x, xs, rows, at, w_pitch, valid, k, to, pitch)
            else:
                bf16_8(x, xs, rows, at, w_pitch, valid, k, to, pitch)
        else:
            if rows == 1:
                f32_1(x, xs, rows, at, w_pitch, valid, k, to, pitch)
            elif rows == 2:
                f32_2(x, xs, rows, at, w_pitch, valid, k, to, pitch)
            elif rows <= 4:
                f32_4(x, xs, rows, at, w_pitch, valid, k, to, pitch)
            else:
                f32_8(x, xs, rows, at, w_pitch, valid, k, to, pitch)


@njit(nogil=True)
def _share(n, part, parts):
    """Bounds of one thread's columns."""
    chunks = (n + CHUNK - 1) // CHUNK
    return chunks * part // parts * CHUNK, min(n, chunks * (part + 1) // parts * CHUNK)


@njit(nogil=True)
def _product(x, rows, weight, out, pitch, part, parts, panel):
    kind, base, n, k, w_pitch = weight[0], weight[1], weight[2], weight[3], weight[4]
    low, high = _share(n, part, parts)
    out += weight[5] * 4
    if rows <= DIRECT_ROWS:
        _direct(kind, x, rows, base + low * w_pitch, w_pitch, high - low, k, out + low * 4, pitch)
        return
    for c in range(low, high, PANEL_COLS):
        cols = min(PANEL_COLS, high - c)
        _unpack(kind, base + c * w_pitch, w_pitch, cols, k, panel)
        _panel(x, rows, panel, cols, k, out + c * 4, pitch)


@njit(nogil=True)
def _gated(x, rows, gate, up, out, pitch, part, parts, scratch):
    n, k, g_pitch, u_pitch = gate[2], gate[3], gate[4], up[4]
    low, high = _share(n, part, parts)
    size = (k + 15) // 16 * 16 * PANEL_COLS * 4
    g_panel, u_panel, g_out = scratch, scratch + size, scratch + 2 * size
    row = PANEL_COLS * 4
    u_out = g_out + DIRECT_ROWS * row
    for c in range(low, high, PANEL_COLS):
        cols, g_at, u_at = min(PANEL_COLS, high - c), gate[1] + c * g_pitch, up[1] + c * u_pitch
        if rows > DIRECT_ROWS:
            _unpack(gate[0], g_at, g_pitch, cols, k, g_panel)
            _unpack(up[0], u_at, u_pitch, cols, k, u_panel)
        for r in range(0, rows, DIRECT_ROWS):
            some, at = min(DIRECT_ROWS, rows - r), x + r * k * 4
            if rows > DIRECT_ROWS:
                _panel(at, some, g_panel, cols, k, g_out, row)
                _panel(at, some, u_panel, cols, k, u_out, row)
            else:
                _direct(gate[0], at, some, g_at, g_pitch, cols, k, g_out, row)
                _direct(up[0], at, some, u_at, u_pitch, cols, k, u_out, row)
            for i in range(some):
                silu_mul(g_out + i * row, u_out + i * row, out + (r + i) * pitch + c * 4, cols)


@njit(parallel=True, nogil=True)
def linear(x, weights, out, scratch, gated):
    """x f32 [R, K], weights int64 [W, 6], out f32 [R, sum N], scratch f32 [threads, S]. `gated`: out = silu(x W0^T) * (x W1^T)."""
    parts, rows, pitch = scratch.shape[0], x.shape[0], out.shape[1] * 4
    x_at, out_at = address(x), address(out)
    for part in prange(parts):
        mine = address(scratch) + part * scratch.shape[1] * 4
        if gated:
            _gated(x_at, rows, weights[0], weights[1], out_at, pitch, part, parts, mine)
        else:
            for i in range(weights.shape[0]):
                _product(x_at, rows, weights[i], out_at, pitch, part, parts, mine)
