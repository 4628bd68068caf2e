"""Plain values: F32, F16, BF16, and the panels that kernels unpack other types to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from llvmlite import ir

from power_lab.kernels.numba import vector as v
from power_lab.kernels.numba.formats.base import Format
from power_lab.kernels.numba.machine import Machine
from power_lab.kernels.numba.vector import F16, F32, I16, I32, Builder, Value


class Plain(Format):
    """Values one after the other; a row may end in a part of a vector."""

    values = v.LANES
    stored: ClassVar[ir.Type]

    def open(self, b: Builder, pointer: Value) -> Value:
        return pointer

    def read(self, b: Builder, step: Value, part: Value) -> Iterator[Value]:
        yield self._widen(b, v.load(b, step, v.vec(self.stored)))

    def read_masked(self, b: Builder, pointer: Value, mask: Value) -> Value:
        """The masked values of a row's last, partial vector; zero elsewhere. Reads nothing beyond the row."""
        return self._widen(b, v.load_part(b, pointer, v.vec(self.stored), mask))

    def _widen(self, b: Builder, x: Value) -> Value:
        return b.fpext(x, v.vec(F32))


class F32Values(Plain):
    stored, size = F32, 4 * v.LANES

    def _widen(self, b: Builder, x: Value) -> Value:
        return x


class F16Values(Plain):
    stored, size = F16, 2 * v.LANES


class BF16Values(Plain):
    """bfloat16 is the upper half of a float."""

    stored, size = I16, 2 * v.LANES

    def _widen(self, b: Builder, x: Value) -> Value:
        return b.bitcast(b.shl(b.zext(x, v.vec(I32)), v.const(v.vec(I32), 16)), v.vec(F32))


class Panel(F32Values):
    """The kernels' own unpacked form: f32, zero-padded to whole vectors, the vectors of a tile's `rows` weight rows interleaved."""

    def __init__(self, machine: Machine, rows: int) -> None:
        super().__init__(machine)
        self.size = rows * 4 * v.LANES

    def read_masked(self, b: Builder, pointer: Value, mask: Value) -> Value:
        return v.load(b, pointer, v.vec(F32))  # the padding is there to be read
