"""Register tiles of the linear kernels: ROWS activation rows times COLS weight rows, one 16-lane accumulator for each pair.

The reduction is one plan for every tile and every row count: lane l of the accumulator takes k = l, l + 16, l + 32, ... in order by
fused multiply-add, and the 16 lanes are added by `vector.tree_sums`. Tiles only choose how many accumulators are alive at once.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from numba import types

from power_lab.kernels.numba import formats
from power_lab.kernels.numba import vector as v
from power_lab.kernels.numba.vector import F32, Builder, Value

PLAN = "lanes=16 fma over k, tree 8-4-2-1"
AHEAD = 8  # weight rows that are asked for before they are read: rows are too short for the processor's own prefetching


def tile(kind: int, rows: int, cols: int) -> Any:
    """A routine f(x, x_stride, valid_rows, w, w_stride, n, k, out, out_stride); addresses and strides in bytes.

    It computes 1..`rows` activation rows times n weight rows, `cols` of them at a time. Rows beyond `valid_rows` and columns
    beyond n repeat the last valid one: they compute the same bits and store them to the same place, so every edge uses the one
    code path. Weights of kind PANEL are consecutive panels from `unpack`, and `w_stride` is their size.
    """
    name = f"tile_{kind + 1}_{rows}x{cols}"
    return v.routine(name, types.void, [types.int64] * 9, partial(_emit_columns, kind=kind, rows=rows, cols=cols))


def _emit_columns(b: Builder, *args: Value, kind: int, rows: int, cols: int) -> None:
    x, xs, nx, w, ws, n, k, out, outs = args
    with v.loop(b, b.udiv(b.add(n, v.i64(cols - 1)), v.i64(cols))) as i:
        first = b.mul(i, v.i64(cols))
        here = b.add(w, b.mul(i if kind == formats.PANEL else first, ws))
        to = b.add(out, b.mul(first, v.i64(4)))
        _emit(b, x, xs, nx, here, ws, b.sub(n, first), k, to, outs, kind=kind, rows=rows, cols=cols)


def _emit(b: Builder, *args: Value, kind: int, rows: int, cols: int) -> None:
    x, xs, nx, w, ws, nw, k, out, outs = args
    row_ids = [_clamp(b, r, nx) for r in range(rows)]
    col_ids = [_clamp(b, c, nw) for c in range(cols)]
    x_rows = [b.add(x, b.mul(r, xs)) for r in row_ids]
    if kind == formats.PANEL:
        w_rows = [b.add(w, v.i64(c * v.LANES * 4)) for c in range(cols)]
    else:
        w_rows = [b.add(w, b.mul(c, ws)) for c in col_ids]
    # Locals keep their value from one tile to the next, so each tile starts by clearing its accumulators.
    acc = [[v.variable(b, v.vec(F32)) for _ in col_ids] for _ in row_ids]
    for slot in (slot for row in acc for slot in row):
        b.store(v.const(v.vec(F32), 0.0), slot)
    values = formats.step_values(kind)
    steps = b.udiv(k, v.i64(values))
    with v.loop(b, steps) as i:
        w_at, x_at = b.mul(i, v.i64(formats.step_bytes(kind, cols))), b.mul(i, v.i64(values * 4))
        weights = [formats.read_step(b, kind, v.at(b, base, w_at)) for base in w_rows]
        if kind != formats.PANEL:
            for base in w_rows:
                v.prefetch(b, v.at(b, base, b.add(w_at, b.mul(ws, v.i64(AHEAD)))))
        for part in range(values // v.LANES):
            for r, base in enumerate(x_rows):
                here = v.load(b, v.at(b, base, b.add(x_at, v.i64(part * v.LANES * 4))), v.vec(F32))
                _accumulate(b, acc[r], here, [vectors[part] for vectors in weights])
    if values == v.LANES:
        _emit_tail(b, kind, cols, x_rows, w_rows, k, steps, acc)
    sums = v.tree_sums(b, [b.load(slot) for row in acc for slot in row])
    for r, i in enumerate(row_ids):
        for c, j in enumerate(col_ids):
            v.store(b, sums[r * cols + c], v.at(b, out, b.add(b.mul(i, outs), b.mul(j, v.i64(4)))))


def _emit_tail(
    b: Builder, kind: int, cols: int, x_rows: list[Value], w_rows: list[Value], k: Value, steps: Value, acc: Any
) -> None:
    """The last, partial vector of rows whose length is not a multiple of 16: missing lanes add 0 * 0."""
    rest = b.sub(k, b.mul(steps, v.i64(v.LANES)))
    with b.if_then(b.icmp_signed(">", rest, v.i64(0)), likely=False):
        mask = v.first_lanes(b, rest)
        w_at, x_at = b.mul(steps, v.i64(formats.step_bytes(kind, cols))), b.mul(steps, v.i64(v.LANES * 4))
        at = [v.at(b, base, w_at) for base in w_rows]
        if kind == formats.PANEL:
            weights = [formats.read_step(b, kind, p)[0] for p in at]
        else:
            weights = [formats.read_part(b, kind, p, mask) for p in at]
        for r, base in enumerate(x_rows):
            _accumulate(b, acc[r], v.load_part(b, v.at(b, base, x_at), v.vec(F32), mask), weights)


def _accumulate(b: Builder, slots: list[Value], x: Value, weights: list[Value]) -> None:
    for slot, w in zip(slots, weights, strict=True):
        b.store(v.fma(b, x, w, b.load(slot)), slot)


def _clamp(b: Builder, index: int, valid: Value) -> Value:
    if index == 0:
        return v.i64(0)
    last = b.sub(valid, v.i64(1))
    return b.select(b.icmp_signed("<", last, v.i64(index)), last, v.i64(index))


def unpack(kind: int, cols: int) -> Any:
    """A routine f(w, w_stride, n, k, panel) that writes n weight rows as consecutive f32 panels of `cols` interleaved rows.

    The last panel repeats row n - 1 where n is not a multiple of `cols`. A panel has `panel_bytes(k, cols)` bytes.
    """
    name = f"unpack_{kind + 1}_{cols}"
    return v.routine(name, types.void, [types.int64] * 5, partial(_emit_panels, kind=kind, cols=cols))


def _emit_panels(b: Builder, w: Value, ws: Value, n: Value, k: Value, panel: Value, *, kind: int, cols: int) -> None:
    vectors = b.udiv(b.add(k, v.i64(v.LANES - 1)), v.i64(v.LANES))
    size = b.mul(vectors, v.i64(v.LANES * cols * 4))
    with v.loop(b, b.udiv(b.add(n, v.i64(cols - 1)), v.i64(cols))) as i:
        first = b.mul(i, v.i64(cols))
        here, to = b.add(w, b.mul(first, ws)), b.add(panel, b.mul(i, size))
        _emit_unpack(b, here, ws, b.sub(n, first), k, to, kind=kind, cols=cols)


def _emit_unpack(b: Builder, w: Value, ws: Value, nw: Value, k: Value, panel: Value, *, kind: int, cols: int) -> None:
    w_rows = [b.add(w, b.mul(_clamp(b, c, nw), ws)) for c in range(cols)]
    values, size, pitch = formats.step_values(kind), formats.step_bytes(kind, 1), cols * v.LANES * 4
    steps = b.udiv(k, v.i64(values))
    with v.loop(b, steps) as i:
        to = b.add(panel, b.mul(i, v.i64(values // v.LANES * pitch)))
        for c, base in enumerate(w_rows):
            at = v.at(b, base, b.mul(i, v.i64(size)))
            for part, value in enumerate(formats.read_step(b, kind, at)):
                v.store(b, value, v.at(b, to, part * pitch + c * v.LANES * 4))
    if values != v.LANES:
        return
    rest = b.sub(k, b.mul(steps, v.i64(v.LANES)))
    with b.if_then(b.icmp_signed(">", rest, v.i64(0)), likely=False):
        mask, to = v.first_lanes(b, rest), b.add(panel, b.mul(steps, v.i64(pitch)))
        for c, base in enumerate(w_rows):
            value = formats.read_part(b, kind, v.at(b, base, b.mul(steps, v.i64(size))), mask)
            v.store(b, value, v.at(b, to, c * v.LANES * 4))
