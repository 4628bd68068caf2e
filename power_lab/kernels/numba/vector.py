"""LLVM vector code: the few emitters that every kernel is built from.

Numba does not vectorise strict float loops, so hot loops are written as LLVM IR through `@intrinsic`: generic vectors of 16 floats and
`llvm.fma`, which LLVM lowers to AVX-512, AVX2 or NEON with the same bits. Addresses are plain 64-bit integers; the caller keeps the
arrays alive. Elementwise functions (`exp`, `log`) are emitted operation by operation, so a lane gives the same bits as a scalar.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import Parameter, Signature
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16  # the width of every reduction; narrower machines split it without changing the order

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()
POINTER = I8.as_pointer()

Builder = ir.IRBuilder
Value = Any  # llvmlite values are untyped


def vec(element: ir.Type, lanes: int = LANES) -> ir.VectorType:
    return ir.VectorType(element, lanes)


def const(type: ir.Type, value: float) -> ir.Constant:
    """A constant of a scalar or (splatted) vector type."""
    if isinstance(type, ir.VectorType):
        return ir.Constant(type, [value] * type.count)
    return ir.Constant(type, value)


def i64(value: int) -> ir.Constant:
    return ir.Constant(I64, value)


def call(b: Builder, name: str, result: ir.Type, args: Sequence[Value]) -> Value:
    """Call an LLVM intrinsic by its full name."""
    kind = ir.FunctionType(result, [a.type for a in args])
    return b.call(cgutils.get_or_insert_function(b.module, kind, name), list(args))


def suffix(type: ir.Type) -> str:
    """LLVM's name mangling: f32, v16f32, v16i32 ..."""
    if isinstance(type, ir.VectorType):
        return f"v{type.count}{suffix(type.element)}"
    return {F32: "f32", I32: "i32"}[type]


def fma(b: Builder, x: Value, y: Value, z: Value) -> Value:
    """x * y + z, rounded once."""
    return call(b, f"llvm.fma.{suffix(z.type)}", z.type, (x, y, z))


def at(b: Builder, address: Value, offset: Value | int = 0) -> Value:
    """A byte pointer from an integer address and a byte offset."""
    offset = i64(offset) if isinstance(offset, int) else offset
    return b.gep(b.inttoptr(address, POINTER), [offset], source_etype=I8)


def load(b: Builder, pointer: Value, type: ir.Type) -> Value:
    """Unaligned load."""
    value = b.load(b.bitcast(pointer, type.as_pointer()), typ=type)
    value.align = 1
    return value


def store(b: Builder, value: Value, pointer: Value) -> None:
    """Unaligned store."""
    b.store(value, b.bitcast(pointer, value.type.as_pointer()), align=1)


def prefetch(b: Builder, pointer: Value) -> None:
    """Ask for the cache line of an address that will be read soon; any address is allowed.

    It goes to the second cache: the first one's few outstanding misses would halve the rate at which a core reads memory.
    """
    hint = [ir.Constant(I32, value) for value in (0, 2, 1)]  # a read, to the second cache, of data
    call(b, "llvm.prefetch.p0", ir.VoidType(), (pointer, *hint))


def first_lanes(b: Builder, count: Value, lanes: int = LANES) -> Value:
    """Mask of the lanes below `count` (int64)."""
    return b.icmp_signed("<", ir.Constant(vec(I64, lanes), list(range(lanes))), splat(b, count, lanes))


def load_part(b: Builder, pointer: Value, type: ir.VectorType, mask: Value) -> Value:
    """Load the masked lanes and nothing beyond them; the others are zero."""
    typed = b.bitcast(pointer, type.as_pointer())
    name = f"llvm.masked.load.v{type.count}{_element(type)}.p0"
    return call(b, name, type, (typed, ir.Constant(I32, 1), mask, const(type, 0)))


def store_part(b: Builder, value: Value, pointer: Value, mask: Value) -> None:
    """Store the masked lanes and touch nothing beyond them."""
    typed = b.bitcast(pointer, value.type.as_pointer())
    name = f"llvm.masked.store.v{value.type.count}{_element(value.type)}.p0"
    call(b, name, ir.VoidType(), (value, typed, ir.Constant(I32, 1), mask))


def _element(type: ir.VectorType) -> str:
    return {F32: "f32", F16: "f16", I32: "i32", I16: "i16", I8: "i8"}[type.element]


def splat(b: Builder, scalar: Value, lanes: int = LANES) -> Value:
    type = vec(scalar.type, lanes)
    one = b.insert_element(ir.Constant(type, ir.Undefined), scalar, ir.Constant(I32, 0))
    return shuffle(b, one, one, [0] * lanes)


def shuffle(b: Builder, x: Value, y: Value, lanes: Sequence[int]) -> Value:
    """Lanes of the concatenation x, y."""
    return b.shuffle_vector(x, y, ir.Constant(vec(I32, len(lanes)), list(lanes)))


def lane(b: Builder, vector: Value, index: int) -> Value:
    return b.extract_element(vector, ir.Constant(I32, index))


def opaque(b: Builder, pointer: Value) -> Value:
    """The same pointer, but LLVM does not know that: what is loaded through it comes from memory, not from registers."""
    kind = ir.FunctionType(pointer.type, [pointer.type])
    return b.asm(kind, "", "=r,0", [pointer], side_effect=False)


def pick(b: Builder, local: Value, index: Value) -> Value:
    """Lane `index` (int64) of a vector of floats in memory, in all lanes."""
    return splat(b, b.load(b.gep(b.bitcast(local, F32.as_pointer()), [index], source_etype=F32), typ=F32))


def tree_sums(b: Builder, vectors: Sequence[Value]) -> list[Value]:
    """The lane sum of each vector, each by the same tree: lane i + lane i+8, then +4, +2, +1.

    Vectors are packed together as they shrink, so many sums cost little more than one; packing moves lanes and never changes the
    additions, so a vector's sum does not depend on its company.
    """
    packed, width = list(vectors), LANES
    while width > 1:
        half = width // 2
        if len(packed) % 2 and len(packed) > 1:
            packed.append(packed[-1])
        if len(packed) > 1:
            packed = [_fold(b, x, y, width, half) for x, y in zip(packed[::2], packed[1::2], strict=True)]
        else:
            packed = [_fold(b, packed[0], packed[0], width, half)]
        width = half
    # Every folding doubled the vectors in one register, or repeated a lone one; the sums are its first lanes, in order.
    return [lane(b, packed[i // LANES], i % LANES) for i in range(len(vectors))]


def _fold(b: Builder, x: Value, y: Value, width: int, half: int) -> Value:
    """Add the upper half of each group of `width` lanes to its lower half; groups of x, then those of y."""
    low = [start + i for start in range(0, 2 * LANES, width) for i in range(half)]
    return b.fadd(shuffle(b, x, y, low), shuffle(b, x, y, [i + half for i in low]))


def tree_max(b: Builder, x: Value) -> Value:
    """The largest lane; NaN lanes lose."""
    for half in (8, 4, 2, 1):
        other = shuffle(b, x, x, [(i + half) % LANES for i in range(LANES)])
        x = b.select(b.fcmp_ordered(">", other, x), other, x)
    return lane(b, x, 0)


def exp(b: Builder, x: Value) -> Value:
    """e^x in f32 for a scalar or vector; at most 1.01 ulp for results in the normal range; NaN stays NaN.

    Cody-Waite reduction by ln 2 in two parts, then a degree-6 polynomial on [-ln2/2, ln2/2] (minimax coefficients fitted for this
    project), scaled by 2^n in two exact steps so that the largest and denormal results come out right.
    """
    f = lambda value: const(x.type, value)  # noqa: E731
    inside = b.select(b.fcmp_ordered("<", x, f(-104.0)), f(-104.0), x)
    inside = b.select(b.fcmp_ordered(">", inside, f(89.0)), f(89.0), inside)
    n = call(b, f"llvm.rint.{suffix(x.type)}", x.type, (b.fmul(inside, f(1.44269504)),))
    r = fma(b, n, f(-0.693145751953125), inside)
    r = fma(b, n, f(-1.42860677e-06), r)
    p = f(EXP_POLYNOMIAL[0])
    for c in EXP_POLYNOMIAL[1:]:
        p = fma(b, p, r, f(c))
    integer = vec(I32, x.type.count) if isinstance(x.type, ir.VectorType) else I32
    # fptosi of NaN is undefined: convert a value that is never NaN, and let p carry the NaN.
    whole = b.fptosi(b.select(b.fcmp_ordered("ord", n, n), n, f(0.0)), integer)
    first = b.ashr(whole, const(integer, 1))
    for part in (first, b.sub(whole, first)):
        p = b.fmul(p, b.bitcast(b.shl(b.add(part, const(integer, 127)), const(integer, 23)), x.type))
    return p


EXP_POLYNOMIAL = (
    0.0013814597623422742,
    0.008368716575205326,
    0.04166838899254799,
    0.1666652113199234,
    0.4999999403953552,
    1.0,
    1.0,
)


def log(b: Builder, x: Value) -> Value:
    """Natural logarithm in f32 of a positive, finite, normal scalar or vector; about 1 ulp.

    x = m * 2^e with m in [sqrt(1/2), sqrt(2)); log m = 2 atanh(s), s = (m - 1) / (m + 1), by its series in s^2.
    """
    f = lambda value: const(x.type, value)  # noqa: E731
    integer = vec(I32, x.type.count) if isinstance(x.type, ir.VectorType) else I32
    c = lambda value: const(integer, value)  # noqa: E731
    shifted = b.sub(b.bitcast(x, integer), c(0x3F3504F3))  # the bits of sqrt(1/2)
    exponent = b.sitofp(b.ashr(shifted, c(23)), x.type)
    m = b.bitcast(b.add(b.and_(shifted, c(0x7FFFFF)), c(0x3F3504F3)), x.type)
    t = b.fsub(m, f(1.0))
    s = b.fdiv(t, b.fadd(m, f(1.0)))
    z = b.fmul(s, s)
    p = f(LOG_SERIES[0])
    for k in LOG_SERIES[1:]:
        p = fma(b, p, z, f(k))
    # 2 s (1 + z p) = t - s (t - 2 z p): keeps t's exact bits as the leading term.
    tail = fma(b, f(-1.0), b.fmul(s, b.fsub(t, b.fmul(f(2.0), b.fmul(z, p)))), b.fmul(exponent, f(1.42860677e-06)))
    return fma(b, exponent, f(0.693145751953125), b.fadd(t, tail))


LOG_SERIES = (1 / 9, 1 / 7, 1 / 5, 1 / 3)


@contextmanager
def loop(b: Builder, count: Value) -> Iterator[Value]:
    """for i in range(count)."""
    with cgutils.for_range(b, count) as it:
        yield it.index


class Span:
    """The vector of a sweep that starts at element `index`: all lanes, or those under a mask in the last, partial one."""

    def __init__(self, b: Builder, index: Value, mask: Value | None) -> None:
        self.b, self.index, self.mask = b, index, mask

    def _pointer(self, base: Value, size: int) -> Value:
        return at(self.b, base, self.b.mul(self.index, i64(size)))

    def load(self, base: Value) -> Value:
        """16 floats of the f32 array at address `base`; zero in lanes that are off."""
        pointer = self._pointer(base, 4)
        return load(self.b, pointer, vec(F32)) if self.mask is None else load_part(self.b, pointer, vec(F32), self.mask)

    def store(self, value: Value, base: Value) -> None:
        pointer = self._pointer(base, 4)
        store(self.b, value, pointer) if self.mask is None else store_part(self.b, value, pointer, self.mask)

    def only(self, value: Value, other: Value) -> Value:
        """`value` in the lanes that are on, `other` in the rest."""
        return value if self.mask is None else self.b.select(self.mask, value, other)


def sweep(b: Builder, count: Value, body: Callable[[Span], None]) -> None:
    """Emit `body` for every vector of `count` elements, and once more, masked, for what is left."""
    full = b.udiv(count, i64(LANES))
    with loop(b, full) as i:
        body(Span(b, b.mul(i, i64(LANES)), None))
    done = b.mul(full, i64(LANES))
    rest = b.sub(count, done)
    with b.if_then(b.icmp_signed(">", rest, i64(0)), likely=False):
        body(Span(b, done, first_lanes(b, rest)))


def variable(b: Builder, type: ir.Type, initial: Value | None = None) -> Value:
    """A local that LLVM keeps in a register."""
    slot = cgutils.alloca_once(b, type)
    b.store(const(type, 0) if initial is None else initial, slot)
    return slot


def routine(name: str, result: Any, arguments: Sequence[Any], emit: Callable[..., Value | None]) -> Any:
    """Wrap `emit(builder, *values) -> value | None` as a function that kernels can call with exactly these argument types.

    It becomes one LLVM function of that name in each module and is never inlined: kernels that call it in many places stay
    quick to compile.
    """

    def typing(typing_context: Any, *given: Any) -> Any:
        def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
            function = _shared(b.module, name, [a.type for a in args], context.get_value_type(result), emit)
            value = b.call(function, args)
            return context.get_dummy_value() if result is types.void else value

        return result(*arguments), codegen

    # Numba learns the number of arguments from the signature.
    parameters = [Parameter(f"a{i}", Parameter.POSITIONAL_ONLY) for i in range(len(arguments) + 1)]
    typing.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    typing.__name__ = typing.__qualname__ = name
    return intrinsic(typing)


def _shared(
    module: ir.Module, name: str, arguments: list[ir.Type], result: ir.Type, emit: Callable[..., Value | None]
) -> Value:
    """The function `power_lab.name` of the module that is being built."""
    name = f"power_lab.{name}"
    if name not in module.globals:
        nothing = result == ir.VoidType() or isinstance(result, ir.PointerType)
        function = define(module, name, arguments, ir.VoidType() if nothing else result, emit)
        function.linkage = "linkonce_odr"
        function.attributes.add("noinline")
    return module.globals[name]


def define(
    module: ir.Module, name: str, arguments: Sequence[ir.Type], result: ir.Type, emit: Callable[..., Value | None]
) -> ir.Function:
    """Add the function `name` to `module`, its body from `emit(builder, *values)`."""
    function = ir.Function(module, ir.FunctionType(result, arguments), name)
    b = ir.IRBuilder(function.append_basic_block("entry"))
    value = emit(b, *function.args)
    b.ret_void() if result == ir.VoidType() else b.ret(value)
    return function


def call_at(b: Builder, function: Value, *args: Value) -> None:
    """Call the function, of int64 arguments and no result, whose address is given."""
    type = ir.FunctionType(ir.VoidType(), [I64] * len(args)).as_pointer()
    b.call(b.bitcast(b.inttoptr(function, POINTER), type), args)


@intrinsic
def address(typing_context: Any, array: Any) -> Any:
    """The int64 address of an array's first element."""

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        data = context.make_array(signature.args[0])(context, b, args[0]).data
        return b.ptrtoint(data, I64)

    return types.int64(array), codegen


def _pointer(element: Any) -> Any:
    @intrinsic
    def pointer(typing_context: Any, at: Any) -> Any:
        def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
            return b.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(element)(types.int64), codegen

    return pointer


f32_pointer, f64_pointer, i32_pointer, i64_pointer = (
    _pointer(t) for t in (types.float32, types.float64, types.int32, types.int64)
)
"""An address as a typed pointer, for `numba.carray`."""

f32_bits = routine("f32_bits", types.int64, [types.float32], lambda b, x: b.zext(b.bitcast(x, I32), I64))
f32_from_bits = routine("f32_from_bits", types.float32, [types.int64], lambda b, x: b.bitcast(b.trunc(x, I32), F32))
"""Floats travel in a job's int64 words as their bits."""
