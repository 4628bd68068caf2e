"""Reading stored weights: for each storage type, LLVM code that turns the next values of a row into vectors of 16 floats.

Every value is bit-equal to `reference.dequantize`: a scale of 11 bits times an integer of at most 8 bits is exact in f32, so the
fused d * q + m of Q4_1 rounds once, as the separate multiply and add do.
"""

from __future__ import annotations

from llvmlite import ir

from power_lab.kernels.numba import vector as v
from power_lab.kernels.numba.vector import F16, F32, I8, I16, I32, Builder, Value
from power_lab.kernels.quants import GEOMETRY, QuantType

PANEL = -1
"""The kernels' own unpacked form: f32, zero-padded to whole vectors, the vectors of a register tile's rows interleaved."""

VALUE_TYPES: dict[int, ir.Type] = {QuantType.F32: F32, QuantType.F16: F16, QuantType.BF16: I16}


def step_values(kind: int) -> int:
    """Values that one step of a row covers: a block, or one vector for the plain types."""
    return max(v.LANES, 1 if kind == PANEL else GEOMETRY[QuantType(kind)][0])


def step_bytes(kind: int, tile: int) -> int:
    """Bytes between steps; `tile` rows are interleaved in a panel."""
    if kind == PANEL:
        return tile * v.LANES * 4
    values, size = GEOMETRY[QuantType(kind)]
    return step_values(kind) // values * size


def read_step(b: Builder, kind: int, pointer: Value) -> list[Value]:
    """The step's values at `pointer`, in order, as vectors of 16 floats."""
    if kind == QuantType.Q4_1:
        return _read_q4_1(b, pointer)
    if kind == QuantType.Q8_0:
        return _read_q8_0(b, pointer)
    stored = F32 if kind == PANEL else VALUE_TYPES[kind]
    return [_widen(b, v.load(b, pointer, v.vec(stored)))]


def read_part(b: Builder, kind: int, pointer: Value, mask: Value) -> Value:
    """The masked values of a plain row's last, partial vector; zero elsewhere. Reads nothing beyond the row."""
    return _widen(b, v.load_part(b, pointer, v.vec(VALUE_TYPES[kind]), mask))


def _widen(b: Builder, x: Value) -> Value:
    if x.type.element == I16:  # bfloat16 is the upper half of a float
        return b.bitcast(b.shl(b.zext(x, v.vec(I32)), v.const(v.vec(I32), 16)), v.vec(F32))
    return x if x.type.element == F32 else b.fpext(x, v.vec(F32))


def _two_halves(b: Builder, pointer: Value) -> list[Value]:
    """The two f16 at `pointer`, each in all lanes. Read as a pair: that is one load, where a lone 16-bit one needs a slow insertion."""
    pair = b.fpext(v.load(b, pointer, v.vec(F16, 2)), v.vec(F32, 2))
    return [v.shuffle(b, pair, pair, [i] * v.LANES) for i in (0, 1)]


def _skip(b: Builder, pointer: Value, count: int) -> Value:
    return b.gep(pointer, [v.i64(count)], source_etype=I8)


def _read_q4_1(b: Builder, pointer: Value) -> list[Value]:
    """Block: f16 d, f16 m, 16 bytes; low nibbles are values 0..15, high ones 16..31; value = d * q + m."""
    scale, minimum = _two_halves(b, pointer)
    wide = b.zext(v.load(b, _skip(b, pointer, 4), v.vec(I8)), v.vec(I32))
    halves = b.and_(wide, v.const(v.vec(I32), 15)), b.lshr(wide, v.const(v.vec(I32), 4))
    return [v.fma(b, b.sitofp(q, v.vec(F32)), scale, minimum) for q in halves]


def _read_q8_0(b: Builder, pointer: Value) -> list[Value]:
    """Block: f16 d, 32 int8; value = d * q."""
    scale, _ = _two_halves(b, pointer)  # the second is made of values; unused
    halves = (v.load(b, _skip(b, pointer, 2 + 16 * h), v.vec(I8)) for h in (0, 1))
    return [b.fmul(b.sitofp(b.sext(q, v.vec(I32)), v.vec(F32)), scale) for q in halves]
