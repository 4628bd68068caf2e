"""Turning packed codes of 4 and 5 bits into floats, 16 at a time.

Codes come as i32; of a 4-bit code only the lowest four bits count, so that neighbours in the same byte need not be masked away.

Where the processor looks up 16 floats at once, a table in a register holds value(code) for each code, computed by the operations that
would be applied to each value: the bits agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llvmlite import ir

from power_lab.kernels.numba import vector as v
from power_lab.kernels.numba.machine import Machine
from power_lab.kernels.numba.vector import F32, I8, I32, Builder, Value


@dataclass(frozen=True)
class FourBits:
    """value(q) = (first + q) * scale [+ minimum]."""

    machine: Machine
    first: int

    def decode(self, b: Builder, q: Value, scale: Value, minimum: Value | None = None) -> Value:
        if has_tables(self.machine):
            codes = floats(range(self.first, self.first + v.LANES))
            return lookup(b, _scaled(b, codes, scale, minimum), q)
        return _scaled(b, _to_floats(b, b.add(b.and_(q, whole(15)), whole(self.first))), scale, minimum)


@dataclass(frozen=True)
class FiveBits:
    """value(q) = (first + q) * scale [+ minimum] with first 0 or -16; the fifth bit of a code comes as a mask."""

    first: int

    def decode(self, b: Builder, q: Value, fifth: Value, scale: Value, minimum: Value | None = None) -> Value:
        four = b.and_(q, whole(15))
        if self.first == 0:
            code = b.select(fifth, b.or_(four, whole(16)), four)
        else:  # setting all higher bits subtracts 16
            code = b.select(fifth, four, b.or_(four, whole(-16)))
        return _scaled(b, _to_floats(b, code), scale, minimum)


@dataclass(frozen=True)
class Codebook:
    """value(q) = values[q] * scale, for any 16 values that fit a byte."""

    machine: Machine
    values: Sequence[int]

    def decode(self, b: Builder, q: Value, scale: Value) -> Value:
        if has_tables(self.machine):
            return lookup(b, b.fmul(floats(self.values), scale), q)
        code = b.trunc(b.and_(q, whole(15)), v.vec(I8))
        number = b.sext(byte_lookup(b, self.machine, self.values, code), v.vec(I32))
        return b.fmul(_to_floats(b, number), scale)


def nibbles(b: Builder, data: Value) -> tuple[Value, Value]:
    """The codes in the low and in the high halves of 16 bytes; the low ones carry the high ones above them."""
    wide = b.zext(data, v.vec(I32))
    return wide, b.lshr(wide, whole(4))


def whole(value: int) -> ir.Constant:
    """An integer in all lanes."""
    return v.const(v.vec(I32), value)


def _to_floats(b: Builder, integers: Value) -> Value:
    return b.sitofp(integers, v.vec(F32))


def _scaled(b: Builder, x: Value, scale: Value, minimum: Value | None) -> Value:
    """x * scale [+ minimum], rounded once: the products are exact."""
    return b.fmul(x, scale) if minimum is None else v.fma(b, x, scale, minimum)


def floats(values: Sequence[float]) -> ir.Constant:
    return ir.Constant(v.vec(F32, len(values)), [float(value) for value in values])


def has_tables(machine: Machine) -> bool:
    return machine.has("avx512f")


def lookup(b: Builder, table: Value, index: Value) -> Value:
    """table[index % 16] for each lane: f32 [16] at i32 [16]. Where `has_tables`."""
    return v.call(b, "llvm.x86.avx512.permvar.sf.512", v.vec(F32), (table, index))


def byte_lookup(b: Builder, machine: Machine, table: Sequence[int], index: Value) -> Value:
    """table[index] for each lane: i8 [16] at i8 [16] below 16."""
    entries = ir.Constant(v.vec(I8), list(table))
    if machine.has("ssse3"):
        return v.call(b, "llvm.x86.ssse3.pshuf.b.128", v.vec(I8), (entries, index))
    if machine.triple.startswith(("aarch64", "arm64")):
        return v.call(b, "llvm.aarch64.neon.tbl1.v16i8", v.vec(I8), (entries, index))
    result = v.const(v.vec(I8), table[0])
    for code in range(1, v.LANES):
        result = b.select(b.icmp_signed("==", index, v.const(v.vec(I8), code)), v.const(v.vec(I8), table[code]), result)
    return result
