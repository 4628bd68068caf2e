"""Register tiles of the linear kernels: ROWS activation rows times COLS weight rows, one 16-lane accumulator for each pair.

The reduction is one plan for every tile and every row count: lane l of the accumulator takes k = l, l + 16, l + 32, ... in order by
fused multiply-add, and the 16 lanes are added by `vector.tree_sums`. Tiles only choose how many accumulators are alive at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from power_lab.kernels.numba import vector as v
from power_lab.kernels.numba.formats.base import Format
from power_lab.kernels.numba.formats.plain import Panel, Plain
from power_lab.kernels.numba.vector import F32, Builder, Value

PLAN = "lanes=16 fma over k, tree 8-4-2-1"
AHEAD = 16  # weight rows that are asked for before they are read: most are too short for the processor to foresee
LINE = 64  # bytes of a cache line


class Tile:
    """Emits f(x, x_stride, valid_rows, w, w_stride, n, k, out, out_stride); addresses and strides in bytes.

    It computes 1..`rows` activation rows times n weight rows, `cols` of them at a time. Rows beyond `valid_rows` and columns
    beyond n repeat the last valid one: they compute the same bits and store them to the same place, so every edge uses the one
    code path. Weights of the format `Panel` are consecutive panels from `Unpack`, and `w_stride` is their size.
    """

    arguments = 9

    def __init__(self, format: Format, rows: int, cols: int) -> None:
        self.format, self.rows, self.cols = format, rows, cols
        self.packed = isinstance(format, Panel)

    def emit(self, b: Builder, *args: Value) -> None:
        x, xs, nx, w, ws, n, k, out, outs = args
        row_ids = [_clamp(b, r, nx) for r in range(self.rows)]
        x_rows = [b.add(x, b.mul(r, xs)) for r in row_ids]
        out_rows = [b.add(out, b.mul(r, outs)) for r in row_ids]
        with v.loop(b, _quotient_up(b, n, self.cols)) as i:
            first = b.mul(i, v.i64(self.cols))
            col_ids = [_clamp(b, c, b.sub(n, first)) for c in range(self.cols)]
            here = b.add(w, b.mul(i if self.packed else first, ws))
            sums = self._sums(b, x_rows, here, ws, col_ids, k)
            for r, base in enumerate(out_rows):
                to = b.add(base, b.mul(first, v.i64(4)))
                for c, j in enumerate(col_ids):
                    v.store(b, sums[r * self.cols + c], v.at(b, to, b.mul(j, v.i64(4))))

    def _sums(
        self, b: Builder, x_rows: list[Value], w: Value, ws: Value, col_ids: list[Value], k: Value
    ) -> list[Value]:
        if self.packed:
            w_rows = [b.add(w, v.i64(c * v.LANES * 4)) for c in range(self.cols)]
        else:
            w_rows = [b.add(w, b.mul(c, ws)) for c in col_ids]
        # Locals keep their value from one tile to the next, so each tile starts by clearing its accumulators.
        acc = [[v.variable(b, v.vec(F32)) for _ in w_rows] for _ in x_rows]
        for slot in (slot for row in acc for slot in row):
            b.store(v.const(v.vec(F32), 0.0), slot)
        steps = b.udiv(k, v.i64(self.format.values))
        with v.loop(b, steps) as i:
            self._step(b, i, x_rows, w_rows, ws, acc)
        if isinstance(self.format, Plain):
            self._tail(b, self.format, x_rows, w_rows, k, steps, acc)
        return v.tree_sums(b, [b.load(slot) for row in acc for slot in row])

    def _step(self, b: Builder, i: Value, x_rows: list[Value], w_rows: list[Value], ws: Value, acc: Any) -> None:
        form = self.format
        w_at, x_at = b.mul(i, v.i64(form.size)), b.mul(i, v.i64(form.values * 4))
        opened = [form.open(b, v.at(b, base, w_at)) for base in w_rows]
        with _parts(b, form) as part:
            if not self.packed:
                self._prefetch(b, w_rows, b.add(w_at, b.mul(part, v.i64(form.size // form.parts))), ws)
            from_part = b.add(x_at, b.mul(part, v.i64(form.values // form.parts * 4)))
            for j, weights in enumerate(zip(*(form.read(b, step, part) for step in opened), strict=True)):
                for r, base in enumerate(x_rows):
                    x = v.load(b, v.at(b, base, b.add(from_part, v.i64(j * v.LANES * 4))), v.vec(F32))
                    _accumulate(b, acc[r], x, weights)

    def _prefetch(self, b: Builder, w_rows: list[Value], at: Value, ws: Value) -> None:
        ahead = b.add(at, b.mul(ws, v.i64(AHEAD)))
        for base in w_rows:
            for line in range(0, self.format.size // self.format.parts, LINE):
                v.prefetch(b, v.at(b, base, b.add(ahead, v.i64(line))))

    def _tail(
        self, b: Builder, form: Plain, x_rows: list[Value], w_rows: list[Value], k: Value, steps: Value, acc: Any
    ) -> None:
        """The last, partial vector of rows whose length is not a multiple of 16: missing lanes add 0 * 0."""
        rest = b.sub(k, b.mul(steps, v.i64(v.LANES)))
        with b.if_then(b.icmp_signed(">", rest, v.i64(0)), likely=False):
            mask = v.first_lanes(b, rest)
            w_at, x_at = b.mul(steps, v.i64(form.size)), b.mul(steps, v.i64(v.LANES * 4))
            weights = [form.read_masked(b, v.at(b, base, w_at), mask) for base in w_rows]
            for r, base in enumerate(x_rows):
                _accumulate(b, acc[r], v.load_part(b, v.at(b, base, x_at), v.vec(F32), mask), weights)


class Unpack:
    """Emits f(w, w_stride, n, k, panel), which writes n weight rows as consecutive f32 panels of `cols` interleaved rows.

    The last panel repeats row n - 1 where n is not a multiple of `cols`. A panel has `cols` times k floats, k rounded up to 16.
    """

    arguments = 5

    def __init__(self, format: Format, cols: int) -> None:
        self.format, self.cols = format, cols

    def emit(self, b: Builder, w: Value, ws: Value, n: Value, k: Value, panel: Value) -> None:
        pitch = self.cols * v.LANES * 4
        size = b.mul(_quotient_up(b, k, v.LANES), v.i64(pitch))
        with v.loop(b, _quotient_up(b, n, self.cols)) as i:
            first = b.mul(i, v.i64(self.cols))
            w_rows = [b.add(w, b.mul(b.add(first, _clamp(b, c, b.sub(n, first))), ws)) for c in range(self.cols)]
            self._panel(b, w_rows, k, b.add(panel, b.mul(i, size)), pitch)

    def _panel(self, b: Builder, w_rows: list[Value], k: Value, panel: Value, pitch: int) -> None:
        form = self.format
        steps, width = b.udiv(k, v.i64(form.values)), form.values // form.parts // v.LANES * pitch
        with v.loop(b, steps) as i:
            opened = [form.open(b, v.at(b, base, b.mul(i, v.i64(form.size)))) for base in w_rows]
            with _parts(b, form) as part:
                to = b.add(panel, b.mul(b.add(b.mul(i, v.i64(form.parts)), part), v.i64(width)))
                for j, weights in enumerate(zip(*(form.read(b, step, part) for step in opened), strict=True)):
                    for c, value in enumerate(weights):
                        v.store(b, value, v.at(b, to, j * pitch + c * v.LANES * 4))
        if isinstance(form, Plain):
            self._tail(b, form, w_rows, k, steps, b.add(panel, b.mul(steps, v.i64(pitch))))

    def _tail(self, b: Builder, form: Plain, w_rows: list[Value], k: Value, steps: Value, to: Value) -> None:
        rest = b.sub(k, b.mul(steps, v.i64(v.LANES)))
        with b.if_then(b.icmp_signed(">", rest, v.i64(0)), likely=False):
            mask = v.first_lanes(b, rest)
            for c, base in enumerate(w_rows):
                value = form.read_masked(b, v.at(b, base, b.mul(steps, v.i64(form.size))), mask)
                v.store(b, value, v.at(b, to, c * v.LANES * 4))


@contextmanager
def _parts(b: Builder, form: Format) -> Iterator[Value]:
    """for part in range(form.parts)."""
    if form.parts == 1:
        yield v.i64(0)
    else:
        with v.loop(b, v.i64(form.parts)) as part:
            yield part


def _accumulate(b: Builder, slots: list[Value], x: Value, weights: Any) -> None:
    for slot, w in zip(slots, weights, strict=True):
        b.store(v.fma(b, x, w, b.load(slot)), slot)


def _clamp(b: Builder, index: int, valid: Value) -> Value:
    if index == 0:
        return v.i64(0)
    last = b.sub(valid, v.i64(1))
    return b.select(b.icmp_signed("<", last, v.i64(index)), last, v.i64(index))


def _quotient_up(b: Builder, value: Value, divisor: int) -> Value:
    return b.udiv(b.add(value, v.i64(divisor - 1)), v.i64(divisor))
