"""Turning small integer codes into floats: tables in registers where the processor looks up 16 floats at once, else arithmetic.

The table of a block holds value(code) for each code, computed by the same operations that the arithmetic applies to each value: the
bits agree.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from power_lab.kernels.numba import vector as v
from power_lab.kernels.numba.machine import Machine
from power_lab.kernels.numba.vector import F32, I8, I32, Builder, Value


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


class Codes:
    """value(q) = values[q] * scale [+ minimum] for 4-bit codes q.

    Args:
        values: of the 16 codes.
    """

    def __init__(self, machine: Machine, values: Sequence[int]) -> None:
        self.machine, self.values = machine, tuple(values)

    def scaled(self, b: Builder, scale: Value, minimum: Value | None = None) -> tuple[Value, Value | None]:
        """What `decode` needs for one scale and minimum, each in all lanes."""
        if not has_tables(self.machine):
            return scale, minimum
        return _scale(b, floats(self.values), scale, minimum), None

    def decode(self, b: Builder, scaled: tuple[Value, Value | None], q: Value) -> Value:
        """Values of i32 codes; bits above the lowest four are ignored."""
        scale, minimum = scaled
        if has_tables(self.machine):
            return lookup(b, scale, q)
        q = b.and_(q, v.const(v.vec(I32), 15))
        first = self.values[0]
        if self.values == tuple(range(first, first + v.LANES)):
            whole = b.add(q, v.const(v.vec(I32), first)) if first else q
        else:
            whole = b.sext(byte_lookup(b, self.machine, self.values, b.trunc(q, v.vec(I8))), v.vec(I32))
        return _scale(b, b.sitofp(whole, v.vec(F32)), scale, minimum)


class WideCodes:
    """value(q) = (first + q) * scale [+ minimum] for 5-bit codes q whose highest bit comes as a mask."""

    def __init__(self, machine: Machine, first: int) -> None:
        self.machine, self.first = machine, first

    def scaled(self, b: Builder, scale: Value, minimum: Value | None = None) -> tuple[Value, Value | None]:
        if not has_tables(self.machine):
            return scale, minimum
        low = floats(range(self.first, self.first + 16))
        high = floats(range(self.first + 16, self.first + 32))
        return _scale(b, low, scale, minimum), _scale(b, high, scale, minimum)

    def decode(self, b: Builder, scaled: tuple[Value, Value | None], q: Value, high: Value) -> Value:
        """Values of i32 codes, of which the lowest four bits count, and their fifth bits."""
        if has_tables(self.machine):
            return b.select(high, lookup(b, scaled[1], q), lookup(b, scaled[0], q))
        fifth = b.select(high, v.const(v.vec(I32), self.first + 16), v.const(v.vec(I32), self.first))
        whole = b.add(b.and_(q, v.const(v.vec(I32), 15)), fifth)
        return _scale(b, b.sitofp(whole, v.vec(F32)), *scaled)


def _scale(b: Builder, x: Value, scale: Value, minimum: Value | None) -> Value:
    return b.fmul(x, scale) if minimum is None else v.fma(b, x, scale, minimum)
