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


def tile(kind: int, rows: int, cols: int) -> Any:
    """A routine f(x, x_stride, valid_rows, w, w_stride, valid_cols, k, out, out_stride); addresses and strides in bytes.

    Rows beyond `valid_rows` (1..rows) and columns beyond `valid_cols` repeat the last valid one: they compute the same bits and store
    them to the same place, so every edge uses the one code path.
    """
    name = f"tile_{kind + 1}_{rows}x{cols}"
    return v.routine(name, types.void, [types.int64] * 9, partial(_emit, kind=kind, rows=rows, cols=cols))


def _emit(b: Builder, *args: Value, kind: int, rows: int, cols: int) -> None:
    x, xs, nx, w, ws, nw, k, out, outs = args
    row_ids = [_clamp(b, r, nx) for r in range(rows)]
    col_ids = [_clamp(b, c, nw) for c in range(cols)]
    x_rows = [b.add(x, b.mul(r, xs)) for r in row_ids]
    w_rows = [b.add(w, v.i64(c * v.LANES * 4)) if kind == formats.PANEL else b.add(w, b.mul(i, ws)) for c, i in enumerate(col_ids)]
    acc = [[v.variable(b, v.vec(F32)) for _ in col_ids] for _ in row_ids]
    values = formats.step_values(kind)
    steps = b.udiv(k, v.i64(values))
    with v.loop(b, steps) as i:
        w_at, x_at = b.mul(i, v.i64(formats.step_bytes(kind, cols))), b.mul(i, v.i64(values * 4))
        weights = [formats.read_step(b, kind, v.at(b, base, w_at)) for base in w_rows]
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


def _emit_tail(b: Builder, kind: int, cols: int, x_rows: list[Value], w_rows: list[Value], k: Value, steps: Value, acc: Any) -> None:
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
    """A routine f(w, w_stride, valid_cols, k, panel) that writes `cols` weight rows as one interleaved f32 panel."""
    name = f"unpack_{kind + 1}_{cols}"
    return v.routine(name, types.void, [types.int64] * 5, partial(_emit_unpack, kind=kind, cols=cols))


def _emit_unpack(b: Builder, w: Value, ws: Value, nw: Value, k: Value, panel: Value, *, kind: int, cols: int) -> None:
    w_rows = [b.add(w, b.mul(_clamp(b, c, nw), ws)) for c in range(cols)]
    values, size, pitch = formats.step_values(kind), formats.step_bytes(kind, 1), cols * v.LANES * 4
    steps = b.udiv(k, v.i64(values))
    with v.loop(b, steps) as i:
        for c, base in enumerate(w_rows):
            for part, value in enumerate(formats.read_step(b, kind, v.at(b, base, b.mul(i, v.i64(size))))):
                vector_index = b.add(b.mul(i, v.i64(values // v.LANES)), v.i64(part))
                v.store(b, value, v.at(b, panel, b.add(b.mul(vector_index, v.i64(pitch)), v.i64(c * v.LANES * 4))))
    if values != v.LANES:
        return
    rest = b.sub(k, b.mul(steps, v.i64(v.LANES)))
    with b.if_then(b.icmp_signed(">", rest, v.i64(0)), likely=False):
        mask = v.first_lanes(b, rest)
        for c, base in enumerate(w_rows):
            value = formats.read_part(b, kind, v.at(b, base, b.mul(steps, v.i64(size))), mask)
            v.store(b, value, v.at(b, panel, b.add(b.mul(steps, v.i64(pitch)), v.i64(c * v.LANES * 4))))
