"""Blocks of 32 values under one scale (source: ggml's block layouts).

Every value is bit-equal to `reference.dequantize`: a scale of 11 bits times an integer of at most 8 bits is exact in f32, so a fused
d * q + m rounds once, as the separate multiply and add do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from power_lab.kernels.layouts import E2M1_LEVELS, IQ4_LEVELS
from power_lab.kernels.numba import vector as v
from power_lab.kernels.numba.formats.base import Format, halves, load_bytes, signed, skip
from power_lab.kernels.numba.formats.codes import Codes, WideCodes
from power_lab.kernels.numba.machine import Machine
from power_lab.kernels.numba.vector import F32, I1, I8, I16, I32, Builder, Value


class Opened(NamedTuple):
    """A block whose scale has been read: `scaled` is for its codes, `data` where they start."""

    pointer: Value
    scaled: tuple[Value, Value | None]
    data: int


class _Nibbles(Format):
    """16 bytes of 4-bit codes: the low halves are values 0..15, the high ones 16..31."""

    values = 32

    def read(self, b: Builder, step: Opened, part: Value) -> Iterator[Value]:
        wide = b.zext(load_bytes(b, step.pointer, step.data), v.vec(I32))
        yield self.codes.decode(b, step.scaled, wide)
        yield self.codes.decode(b, step.scaled, b.lshr(wide, v.const(v.vec(I32), 4)))

    codes: Codes


class Q4_0(_Nibbles):
    """f16 d, 16 bytes; value = d * (q - 8)."""

    size = 18

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self.codes = Codes(machine, range(-8, 8))

    def open(self, b: Builder, pointer: Value) -> Opened:
        return Opened(pointer, self.codes.scaled(b, halves(b, pointer)[0]), 2)


class Q4_1(_Nibbles):
    """f16 d, f16 m, 16 bytes; value = d * q + m."""

    size = 20

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self.codes = Codes(machine, range(16))

    def open(self, b: Builder, pointer: Value) -> Opened:
        return Opened(pointer, self.codes.scaled(b, *halves(b, pointer)), 4)


class IQ4_NL(Q4_0):
    """As Q4_0, with values from a table; value = d * table[q]."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self.codes = Codes(machine, IQ4_LEVELS)


class MXFP4(_Nibbles):
    """One byte e, 16 bytes; value = 2^(e - 128) * (twice the 4-bit float)."""

    size = 17

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self.codes = Codes(machine, E2M1_LEVELS)

    def open(self, b: Builder, pointer: Value) -> Opened:
        e = b.zext(v.load(b, pointer, I8), I32)
        c = lambda value: v.const(I32, value)  # noqa: E731
        small = b.shl(c(0x200000), b.and_(e, c(1)))  # 2^-128 and 2^-127 are denormal
        bits = b.select(b.icmp_unsigned("<", e, c(2)), small, b.shl(b.sub(e, c(1)), c(23)))
        return Opened(pointer, self.codes.scaled(b, v.splat(b, b.bitcast(bits, F32))), 1)


class _FiveBits(Format):
    """32 fifth bits, then 16 bytes of the lower four."""

    values = 32
    codes: WideCodes

    def read(self, b: Builder, step: Opened, part: Value) -> Iterator[Value]:
        wide = b.zext(load_bytes(b, step.pointer, step.data + 4), v.vec(I32))
        for half, q in enumerate((wide, b.lshr(wide, v.const(v.vec(I32), 4)))):
            bits = v.load(b, skip(b, step.pointer, step.data + 2 * half), I16)
            yield self.codes.decode(b, step.scaled, q, b.bitcast(bits, v.vec(I1)))


class Q5_0(_FiveBits):
    """f16 d, 4 bytes of fifth bits, 16 bytes; value = d * (q - 16)."""

    size = 22

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self.codes = WideCodes(machine, -16)

    def open(self, b: Builder, pointer: Value) -> Opened:
        return Opened(pointer, self.codes.scaled(b, halves(b, pointer)[0]), 2)


class Q5_1(_FiveBits):
    """f16 d, f16 m, 4 bytes of fifth bits, 16 bytes; value = d * q + m."""

    size = 24

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self.codes = WideCodes(machine, 0)

    def open(self, b: Builder, pointer: Value) -> Opened:
        return Opened(pointer, self.codes.scaled(b, *halves(b, pointer)), 4)


class Q8_0(Format):
    """f16 d, 32 signed bytes; value = d * q."""

    values, size = 32, 34

    def open(self, b: Builder, pointer: Value) -> tuple[Value, Value]:
        return pointer, halves(b, pointer)[0]  # the second is made of values; unused

    def read(self, b: Builder, step: tuple[Value, Value], part: Value) -> Iterator[Value]:
        pointer, scale = step
        for half in (0, 1):
            yield b.fmul(signed(b, load_bytes(b, pointer, 2 + 16 * half)), scale)
