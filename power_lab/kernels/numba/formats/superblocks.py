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
from power_lab.kernels.numba.formats.codes import Codebook, FiveBits, FourBits, nibbles, whole
from power_lab.kernels.numba.vector import F32, I8, I16, I32, LANES, Builder, Value


class Opened(NamedTuple):
    """A block whose scales have been decoded into locals of 16 floats."""

    pointer: Value
    scales: Value
    minima: Value


def _opened(b: Builder, pointer: Value, scales: Value, minima: Value | None = None) -> Opened:
    first = v.variable(b, v.vec(F32), scales)
    return Opened(pointer, first, first if minima is None else v.variable(b, v.vec(F32), minima))


def _words(values: Sequence[int]) -> ir.Constant:
    return ir.Constant(v.vec(I32), list(values))


def _lanes(values: Sequence[int]) -> ir.Constant:
    return ir.Constant(v.vec(I8), list(values))


def _bytes(value: int, count: int = LANES) -> ir.Constant:
    return v.const(v.vec(I8, count), value)


def _spread(b: Builder, raw: Value, lanes: Sequence[int]) -> Value:
    """Bytes of `raw` in the order of `lanes`, as i32 [16]."""
    return b.zext(v.shuffle(b, raw, raw, lanes), v.vec(I32))


def _copies(b: Builder, pair: Value, which: Sequence[int]) -> Value:
    """f32 [16] of the two numbers of `pair`."""
    return v.shuffle(b, pair, pair, which)


def _both(b: Builder, data: Value) -> tuple[Value, Value]:
    """The two vectors of 32 bytes."""
    return tuple(v.shuffle(b, data, data, range(first, first + LANES)) for first in (0, LANES))


def _times(b: Builder, number: int, index: Value) -> Value:
    return b.mul(index, v.i64(number))


def _plus(b: Builder, index: Value, number: int) -> Value:
    return b.add(index, v.i64(number))


class _FourBitCodes(Format):
    """f16 d, f16 dmin, 12 bytes: eight 6-bit scales and eight 6-bit minima of sub-blocks of 32 values, which are d * sc * q - dmin * m.

    Of each 32 bytes of codes, the low halves are one sub-block and the high halves the next.
    """

    values, parts = 256, 4

    def open(self, b: Builder, pointer: Value) -> Opened:
        raw = load_bytes(b, pointer, 0)  # lanes 4..15 are the 12 bytes
        scale, minimum = range(4, 8), range(8, 12)  # lower bits of the first four, and upper bits of the last four
        last, none = range(12, 16), [LANES] * 4
        zeros, shared = _bytes(0), v.shuffle(b, raw, raw, [*scale, *last, *minimum, *last])
        upper = v.shuffle(b, raw, zeros, [*none, *scale, *none, *minimum])
        low = b.and_(shared, _lanes([63] * 4 + [15] * 4 + [63] * 4 + [0] * 4))
        low = b.or_(low, b.and_(b.lshr(shared, _bytes(4)), _lanes([0] * 12 + [15] * 4)))
        codes = b.or_(low, b.and_(b.lshr(upper, _bytes(2)), _bytes(48)))
        d = b.fmul(halves(b, pointer), ir.Constant(v.vec(F32, 2), [1.0, -1.0]))
        return _opened(b, pointer, b.fmul(unsigned(b, codes), _copies(b, d, [0] * 8 + [1] * 8)))

    def _scale(self, b: Builder, step: Opened, sub: Value) -> tuple[Value, Value]:
        """Scale and negated minimum of a sub-block."""
        return v.pick(b, step.scales, sub), v.pick(b, step.scales, _plus(b, sub, 8))


class Q4_K(_FourBitCodes):
    """The scales, then 128 bytes of codes."""

    size = 144

    def read(self, b: Builder, step: Opened, part: Value) -> Iterator[Value]:
        data = skip(b, step.pointer, _plus(b, _times(b, 32, part), 16))
        for half in (0, 1):
            scale = self._scale(b, step, _plus(b, _times(b, 2, part), half))
            for at in (0, 16):
                yield FourBits(self.machine, 0).decode(b, nibbles(b, load_bytes(b, data, at))[half], *scale)


class Q5_K(_FourBitCodes):
    """The scales, 32 bytes that hold bit s of value i of sub-block s in byte i, then 128 bytes of the lower four bits."""

    size = 176

    def read(self, b: Builder, step: Opened, part: Value) -> Iterator[Value]:
        data = skip(b, step.pointer, _plus(b, _times(b, 32, part), 48))
        for half in (0, 1):
            sub = _plus(b, _times(b, 2, part), half)
            scale, bit = self._scale(b, step, sub), v.splat(b, b.shl(v.const(I8, 1), b.trunc(sub, I8)))
            for at in (0, 16):
                fifth = b.icmp_signed("!=", b.and_(load_bytes(b, step.pointer, 16 + at), bit), _bytes(0))
                yield FiveBits(0).decode(b, nibbles(b, load_bytes(b, data, at))[half], fifth, *scale)


class Q6_K(Format):
    """128 bytes of lower four bits, 64 of upper two, 16 signed scales of 16 values, f16 d; value = d * scale * (q - 32).

    Each half of the block: the low halves of 64 bytes, then their high halves; two bits of 32 bytes for every 32 values.
    """

    values, size, parts = 256, 210, 2

    def open(self, b: Builder, pointer: Value) -> Opened:
        d = _copies(b, halves(b, pointer, 206), [1] * LANES)  # the first are the last two scales
        return _opened(b, pointer, b.fmul(signed(b, load_bytes(b, pointer, 192)), d))

    def read(self, b: Builder, step: Opened, part: Value) -> Iterator[Value]:
        low = skip(b, step.pointer, _times(b, 64, part))
        high = skip(b, step.pointer, _plus(b, _times(b, 32, part), 128))
        for quarter in range(4):
            nibble, upper = load_bytes(b, low, 32 * (quarter % 2), 32), load_bytes(b, high, 0, 32)
            nibble = b.and_(nibble, _bytes(15, 32)) if quarter < 2 else b.lshr(nibble, _bytes(4, 32))
            shift = 4 - 2 * quarter
            upper = b.shl(upper, _bytes(shift, 32)) if shift >= 0 else b.lshr(upper, _bytes(-shift, 32))
            q = b.sub(b.or_(nibble, b.and_(upper, _bytes(48, 32))), _bytes(32, 32))
            for i, half in enumerate(_both(b, q)):
                sub = _plus(b, _times(b, 8, part), 2 * quarter + i)
                yield b.fmul(signed(b, half), v.pick(b, step.scales, sub))


def _two_bits(b: Builder, data: Value, quarter: int) -> Value:
    """32 of the 128 codes in 32 bytes: of each byte, two bits for every 32 values."""
    return b.and_(b.lshr(load_bytes(b, data, 0, 32), _bytes(2 * quarter, 32)), _bytes(3, 32))


class Q2_K(Format):
    """16 bytes of 4-bit scales and 4-bit minima of 16 values, 64 bytes of two-bit codes, f16 d, f16 dmin; value = d * sc * q - dmin * m."""

    values, size, parts = 256, 84, 2

    def open(self, b: Builder, pointer: Value) -> Opened:
        raw, pair = load_bytes(b, pointer, 0), halves(b, pointer, 80)
        scales = b.fmul(unsigned(b, b.and_(raw, _bytes(15))), _copies(b, pair, [0] * LANES))
        minima = b.fmul(unsigned(b, b.lshr(raw, _bytes(4))), _copies(b, b.fneg(pair), [1] * LANES))
        return _opened(b, pointer, scales, minima)

    def read(self, b: Builder, step: Opened, part: Value) -> Iterator[Value]:
        data = skip(b, step.pointer, _plus(b, _times(b, 32, part), 16))
        for quarter in range(4):
            for i, half in enumerate(_both(b, _two_bits(b, data, quarter))):
                sub = _plus(b, _times(b, 8, part), 2 * quarter + i)
                yield v.fma(b, unsigned(b, half), v.pick(b, step.scales, sub), v.pick(b, step.minima, sub))


class Q3_K(Format):
    """32 bytes of third bits, 64 of two-bit codes, 12 of sixteen 6-bit scales, f16 d; value = d * (sc - 32) * (q - 4)."""

    values, size, parts = 256, 110, 2

    def open(self, b: Builder, pointer: Value) -> Opened:
        raw = load_bytes(b, pointer, 92)  # lanes 4..15 are the 12 bytes
        low = b.lshr(_spread(b, raw, [*range(4, 12)] * 2), _words([0] * 8 + [4] * 8))
        high = b.lshr(_spread(b, raw, [*range(12, 16)] * 4), _words([2 * (i // 4) for i in range(LANES)]))
        codes = b.or_(b.and_(low, whole(15)), b.shl(b.and_(high, whole(3)), whole(4)))
        d = _copies(b, halves(b, pointer, 106), [1] * LANES)  # the first are scales
        return _opened(b, pointer, b.fmul(b.sitofp(b.sub(codes, whole(32)), v.vec(F32)), d))

    def read(self, b: Builder, step: Opened, part: Value) -> Iterator[Value]:
        data = skip(b, step.pointer, _plus(b, _times(b, 32, part), 32))
        for quarter in range(4):
            bit = b.shl(v.const(I8, 1 << quarter), b.trunc(_times(b, 4, part), I8))
            third = b.and_(load_bytes(b, step.pointer, 0, 32), v.splat(b, bit, 32))
            less = b.select(b.icmp_signed("==", third, _bytes(0, 32)), _bytes(-4, 32), _bytes(0, 32))
            for i, half in enumerate(_both(b, b.or_(_two_bits(b, data, quarter), less))):
                sub = _plus(b, _times(b, 8, part), 2 * quarter + i)
                yield b.fmul(signed(b, half), v.pick(b, step.scales, sub))


class IQ4_XS(Format):
    """f16 d, upper bits of eight 6-bit scales in 2 bytes, lower ones in 4, 128 bytes; value = d * (sc - 32) * table[q].

    Sub-blocks are as in IQ4_NL.
    """

    values, size, parts = 256, 136, 4

    def open(self, b: Builder, pointer: Value) -> Opened:
        raw, sub = load_bytes(b, pointer, 0), [i % 8 for i in range(LANES)]  # 8 scales, twice
        low = b.and_(b.lshr(_spread(b, raw, [4 + i // 2 for i in sub]), _words([i % 2 * 4 for i in sub])), whole(15))
        upper = v.splat(b, b.zext(v.load(b, skip(b, pointer, 2), I16), I32))
        high = b.and_(b.lshr(upper, _words([2 * i for i in sub])), whole(3))
        codes = b.sub(b.or_(low, b.shl(high, whole(4))), whole(32))
        d = _copies(b, halves(b, pointer), [0] * LANES)
        return _opened(b, pointer, b.fmul(b.sitofp(codes, v.vec(F32)), d))

    def read(self, b: Builder, step: Opened, part: Value) -> Iterator[Value]:
        data = skip(b, step.pointer, _plus(b, _times(b, 32, part), 8))
        for sub in (0, 1):
            scale = v.pick(b, step.scales, _plus(b, _times(b, 2, part), sub))
            for q in nibbles(b, load_bytes(b, data, 16 * sub)):
                yield Codebook(self.machine, IQ4_LEVELS).decode(b, q, scale)
