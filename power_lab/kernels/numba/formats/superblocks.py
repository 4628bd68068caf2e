"""Blocks of 256 values, their scales quantised too (source: ggml's K-quants and IQ4_XS layouts).

Every value is bit-equal to `reference.dequantize`. A block's scale of 11 bits times a sub-block's scale of at most 8 bits times a code
of at most 6 bits is exact in f32, so a fused scale * q - minimum rounds once, as the separate multiply and subtract do.

Opening a block decodes all its scales into a local of 16 floats; the parts read theirs from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from llvmlite import ir

from power_lab.kernels.layouts import IQ4_LEVELS
from power_lab.kernels.numba import vector as v
from power_lab.kernels.numba.formats.base import Format, halves, load_bytes, signed, skip, unsigned
from power_lab.kernels.numba.formats.codes import Codes, WideCodes
from power_lab.kernels.numba.machine import Machine
from power_lab.kernels.numba.vector import F32, I8, I16, I32, LANES, Builder, Value


class Opened(NamedTuple):
    """A block whose scales have been decoded into locals of 16 floats."""

    pointer: Value
    scales: Value
    minima: Value


def _words(values: Sequence[int]) -> ir.Constant:
    return ir.Constant(v.vec(I32), list(values))


def _fill(element: ir.Type, value: int) -> ir.Constant:
    return v.const(v.vec(element), value)


def _spread(b: Builder, raw: Value, lanes: Sequence[int]) -> Value:
    """Bytes of `raw` in the order of `lanes`, as i32 [16]."""
    return b.zext(v.shuffle(b, raw, raw, lanes), v.vec(I32))


def _times(b: Builder, number: int, index: Value) -> Value:
    return b.mul(index, v.i64(number))


def _plus(b: Builder, index: Value, number: int) -> Value:
    return b.add(index, v.i64(number))


class _FourBitScales(Format):
    """f16 d, f16 dmin, 12 bytes: eight 6-bit scales and eight 6-bit minima of sub-blocks of 32 values, which are d * sc * q - dmin * m."""

    values, parts = 256, 4

    def open(self, b: Builder, pointer: Value) -> Opened:
        raw = load_bytes(b, pointer, 0)  # lanes 4..15 are the 12 bytes
        scale, minimum = range(4, 8), range(8, 12)  # lower bits of the first four, and upper bits of the last four
        last = range(12, 16)
        low = _spread(b, raw, [*scale, *last, *minimum, *last])
        low = b.and_(b.lshr(low, _words([0] * 12 + [4] * 4)), _words(([63] * 4 + [15] * 4) * 2))
        high = b.lshr(_spread(b, raw, [*scale, *scale, *minimum, *minimum]), _fill(I32, 2))
        codes = b.or_(low, b.and_(high, _words(([0] * 4 + [48] * 4) * 2)))
        d, dmin = halves(b, pointer)
        both = v.shuffle(b, d, b.fneg(dmin), [0] * 8 + [LANES] * 8)
        local = v.variable(b, v.vec(F32), b.fmul(unsigned(b, codes), both))
        return Opened(pointer, local, local)

    def _scale(self, b: Builder, step: Opened, sub: Value) -> tuple[Value, Value]:
        """Scale and negated minimum of a sub-block."""
        return v.pick(b, step.scales, sub), v.pick(b, step.minima, _plus(b, sub, 8))


class Q4_K(_FourBitScales):
    """The scales, then 128 bytes: of each 32, the low halves are one sub-block and the high halves the next."""

    size = 144

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self.codes = Codes(machine, range(16))

    def read(self, b: Builder, step: Opened, part: Value) -> Iterator[Value]:
        data = skip(b, step.pointer, _plus(b, _times(b, 32, part), 16))
        for half in (0, 1):
            scaled = self.codes.scaled(b, *self._scale(b, step, _plus(b, _times(b, 2, part), half)))
            for at in (0, 16):
                q = b.lshr(b.zext(load_bytes(b, data, at), v.vec(I32)), _fill(I32, 4 * half))
                yield self.codes.decode(b, scaled, q)


class Q5_K(_FourBitScales):
    """The scales, 32 bytes that hold bit s of value i of sub-block s in byte i, then the lower four bits as in Q4_K."""

    size = 176

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self.codes = WideCodes(machine, 0)

    def read(self, b: Builder, step: Opened, part: Value) -> Iterator[Value]:
        data = skip(b, step.pointer, _plus(b, _times(b, 32, part), 48))
        for half in (0, 1):
            sub = _plus(b, _times(b, 2, part), half)
            scaled = self.codes.scaled(b, *self._scale(b, step, sub))
            bit = v.splat(b, b.shl(v.const(I8, 1), b.trunc(sub, I8)))
            for at in (0, 16):
                fifth = b.and_(load_bytes(b, step.pointer, 16 + at), bit)
                q = b.lshr(b.zext(load_bytes(b, data, at), v.vec(I32)), _fill(I32, 4 * half))
                yield self.codes.decode(b, scaled, q, b.icmp_signed("!=", fifth, _fill(I8, 0)))


class Q6_K(Format):
    """128 bytes of lower four bits, 64 of upper two, 16 signed scales of 16 values, f16 d; value = d * scale * (q - 32).

    Each half of the block: the low halves of 64 bytes, then their high halves; two bits of 32 bytes for every 32 values.
    """

    values, size, parts = 256, 210, 2

    def open(self, b: Builder, pointer: Value) -> Opened:
        d = halves(b, pointer, 206)[1]  # the first are the last two scales
        local = v.variable(b, v.vec(F32), b.fmul(signed(b, load_bytes(b, pointer, 192)), d))
        return Opened(pointer, local, local)

    def read(self, b: Builder, step: Opened, part: Value) -> Iterator[Value]:
        low = skip(b, step.pointer, _times(b, 64, part))
        high = skip(b, step.pointer, _plus(b, _times(b, 32, part), 128))
        for i in range(8):
            nibble = load_bytes(b, low, 16 * (i % 4))
            nibble = b.and_(nibble, _fill(I8, 15)) if i < 4 else b.lshr(nibble, _fill(I8, 4))
            upper, quarter = load_bytes(b, high, 16 * (i % 2)), i // 2
            if quarter < 2:
                upper = b.shl(upper, _fill(I8, 4 - 2 * quarter))
            elif quarter == 3:
                upper = b.lshr(upper, _fill(I8, 2))
            q = b.sub(b.or_(nibble, b.and_(upper, _fill(I8, 48))), _fill(I8, 32))
            scale = v.pick(b, step.scales, _plus(b, _times(b, 8, part), i))
            yield b.fmul(signed(b, q), scale)


def _two_bits(b: Builder, data: Value, i: int) -> Value:
    """Vector i of the 128 values whose bits are in 32 bytes: of each byte, two bits for every 32 values."""
    return b.and_(b.lshr(load_bytes(b, data, 16 * (i % 2)), _fill(I8, i // 2 * 2)), _fill(I8, 3))


class Q2_K(Format):
    """16 bytes of 4-bit scales and 4-bit minima of 16 values, 64 bytes of two-bit codes, f16 d, f16 dmin; value = d * sc * q - dmin * m."""

    values, size, parts = 256, 84, 2

    def open(self, b: Builder, pointer: Value) -> Opened:
        raw = b.zext(load_bytes(b, pointer, 0), v.vec(I32))
        d, dmin = halves(b, pointer, 80)
        scales = b.fmul(unsigned(b, b.and_(raw, _fill(I32, 15))), d)
        minima = b.fmul(unsigned(b, b.lshr(raw, _fill(I32, 4))), b.fneg(dmin))
        return Opened(pointer, v.variable(b, v.vec(F32), scales), v.variable(b, v.vec(F32), minima))

    def read(self, b: Builder, step: Opened, part: Value) -> Iterator[Value]:
        data = skip(b, step.pointer, _plus(b, _times(b, 32, part), 16))
        for i in range(8):
            sub = _plus(b, _times(b, 8, part), i)
            q = unsigned(b, _two_bits(b, data, i))
            yield v.fma(b, q, v.pick(b, step.scales, sub), v.pick(b, step.minima, sub))


class Q3_K(Format):
    """32 bytes of third bits, 64 of two-bit codes, 12 of sixteen 6-bit scales, f16 d; value = d * (sc - 32) * (q - 4)."""

    values, size, parts = 256, 110, 2

    def open(self, b: Builder, pointer: Value) -> Opened:
        raw = load_bytes(b, pointer, 92)  # lanes 4..15 are the 12 bytes
        first = list(range(4, 12))
        low = b.and_(b.lshr(_spread(b, raw, first * 2), _words([0] * 8 + [4] * 8)), _fill(I32, 15))
        high = b.lshr(_spread(b, raw, list(range(12, 16)) * 4), _words([2 * (i // 4) for i in range(LANES)]))
        codes = b.or_(low, b.shl(b.and_(high, _fill(I32, 3)), _fill(I32, 4)))
        scales = b.sitofp(b.sub(codes, _fill(I32, 32)), v.vec(F32))
        local = v.variable(b, v.vec(F32), b.fmul(scales, halves(b, pointer, 106)[1]))  # the first is made of scales
        return Opened(pointer, local, local)

    def read(self, b: Builder, step: Opened, part: Value) -> Iterator[Value]:
        data = skip(b, step.pointer, _plus(b, _times(b, 32, part), 32))
        for i in range(8):
            bit = b.shl(v.const(I8, 1 << (i // 2)), b.trunc(_times(b, 4, part), I8))
            third = b.and_(load_bytes(b, step.pointer, 16 * (i % 2)), v.splat(b, bit))
            less = b.select(b.icmp_signed("==", third, _fill(I8, 0)), _fill(I8, -4), _fill(I8, 0))
            scale = v.pick(b, step.scales, _plus(b, _times(b, 8, part), i))
            yield b.fmul(signed(b, b.add(_two_bits(b, data, i), less)), scale)


class IQ4_XS(Format):
    """f16 d, upper bits of eight 6-bit scales in 2 bytes, lower ones in 4, 128 bytes; value = d * (sc - 32) * table[q].

    Sub-blocks are as in IQ4_NL.
    """

    values, size, parts = 256, 136, 4

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self.codes = Codes(machine, IQ4_LEVELS)

    def open(self, b: Builder, pointer: Value) -> Opened:
        raw, sub = load_bytes(b, pointer, 0), [i % 8 for i in range(LANES)]  # 8 scales, twice
        low = b.and_(
            b.lshr(_spread(b, raw, [4 + i // 2 for i in sub]), _words([i % 2 * 4 for i in sub])), _fill(I32, 15)
        )
        upper = v.splat(b, b.zext(v.load(b, skip(b, pointer, 2), I16), I32))
        high = b.and_(b.lshr(upper, _words([2 * i for i in sub])), _fill(I32, 3))
        codes = b.sub(b.or_(low, b.shl(high, _fill(I32, 4))), _fill(I32, 32))
        local = v.variable(b, v.vec(F32), b.fmul(b.sitofp(codes, v.vec(F32)), halves(b, pointer)[0]))
        return Opened(pointer, local, local)

    def read(self, b: Builder, step: Opened, part: Value) -> Iterator[Value]:
        data = skip(b, step.pointer, _plus(b, _times(b, 32, part), 8))
        for sub in (0, 1):
            scale = v.pick(b, step.scales, _plus(b, _times(b, 2, part), sub))
            scaled = self.codes.scaled(b, scale)
            wide = b.zext(load_bytes(b, data, 16 * sub), v.vec(I32))
            yield self.codes.decode(b, scaled, wide)
            yield self.codes.decode(b, scaled, b.lshr(wide, _fill(I32, 4)))
