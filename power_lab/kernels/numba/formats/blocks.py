"""Blocks of 32 values under one scale (source: ggml's block layouts).

Every value is bit-equal to `reference.dequantize`: a scale of 11 bits times an integer of at most 8 bits is exact in f32, so a fused
d * q + m rounds once, as the separate multiply and add do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from power_lab.kernels.layouts import E2M1_LEVELS, IQ4_LEVELS
from power_lab.kernels.numba import vector as v
from power_lab.kernels.numba.formats.base import Format, halves, load_bytes, signed, skip, splats
from power_lab.kernels.numba.formats.codes import Codebook, FiveBits, FourBits, nibbles
from power_lab.kernels.numba.vector import F32, I1, I8, I16, I32, Builder, Value


class Opened(NamedTuple):
    """A block's address, and the f16 or two that it starts with: the scale and perhaps the minimum."""

    pointer: Value
    scale: Value
    minimum: Value


class _Block(Format):
    values = 32

    def open(self, b: Builder, pointer: Value) -> Opened:
        return Opened(pointer, *splats(b, halves(b, pointer)))


class Q4_0(_Block):
    """f16 d, 16 bytes; value = d * (q - 8). Low halves of the bytes are values 0..15, high ones 16..31, here and below."""

    size = 18

    def read(self, b: Builder, step: Opened, part: Value) -> Iterator[Value]:
        for q in nibbles(b, load_bytes(b, step.pointer, 2)):
            yield FourBits(self.machine, -8).decode(b, q, step.scale)


class Q4_1(_Block):
    """f16 d, f16 m, 16 bytes; value = d * q + m."""

    size = 20

    def read(self, b: Builder, step: Opened, part: Value) -> Iterator[Value]:
        for q in nibbles(b, load_bytes(b, step.pointer, 4)):
            yield FourBits(self.machine, 0).decode(b, q, step.scale, step.minimum)


class IQ4_NL(_Block):
    """f16 d, 16 bytes; value = d * table[q]."""

    size = 18

    def read(self, b: Builder, step: Opened, part: Value) -> Iterator[Value]:
        for q in nibbles(b, load_bytes(b, step.pointer, 2)):
            yield Codebook(self.machine, IQ4_LEVELS).decode(b, q, step.scale)


class MXFP4(Format):
    """One byte e, 16 bytes; value = 2^(e - 128) * table[q], the table of twice the 4-bit floats of OCP Microscaling Formats 1.0."""

    values, size = 32, 17

    def open(self, b: Builder, pointer: Value) -> tuple[Value, Value]:
        e = b.zext(v.load(b, pointer, I8), I32)
        c = lambda value: v.const(I32, value)  # noqa: E731
        small = b.shl(c(0x200000), b.and_(e, c(1)))  # 2^-128 and 2^-127 are denormal
        bits = b.select(b.icmp_unsigned("<", e, c(2)), small, b.shl(b.sub(e, c(1)), c(23)))
        return pointer, v.splat(b, b.bitcast(bits, F32))

    def read(self, b: Builder, step: tuple[Value, Value], part: Value) -> Iterator[Value]:
        pointer, scale = step
        for q in nibbles(b, load_bytes(b, pointer, 1)):
            yield Codebook(self.machine, E2M1_LEVELS).decode(b, q, scale)


def _fifth_bits(b: Builder, pointer: Value, half: int) -> Value:
    """A mask out of four bytes: bits of values 0..15, or of 16..31."""
    return b.bitcast(v.load(b, skip(b, pointer, 2 * half), I16), v.vec(I1))


class Q5_0(_Block):
    """f16 d, 4 bytes of fifth bits, 16 bytes; value = d * (q - 16)."""

    size = 22

    def read(self, b: Builder, step: Opened, part: Value) -> Iterator[Value]:
        bits = skip(b, step.pointer, 2)
        for half, q in enumerate(nibbles(b, load_bytes(b, step.pointer, 6))):
            yield FiveBits(-16).decode(b, q, _fifth_bits(b, bits, half), step.scale)


class Q5_1(_Block):
    """f16 d, f16 m, 4 bytes of fifth bits, 16 bytes; value = d * q + m."""

    size = 24

    def read(self, b: Builder, step: Opened, part: Value) -> Iterator[Value]:
        bits = skip(b, step.pointer, 4)
        for half, q in enumerate(nibbles(b, load_bytes(b, step.pointer, 8))):
            yield FiveBits(0).decode(b, q, _fifth_bits(b, bits, half), step.scale, step.minimum)


class Q8_0(_Block):
    """f16 d, 32 signed bytes; value = d * q."""

    size = 34

    def read(self, b: Builder, step: Opened, part: Value) -> Iterator[Value]:
        for half in (0, 1):
            yield b.fmul(signed(b, load_bytes(b, step.pointer, 2 + 16 * half)), step.scale)
