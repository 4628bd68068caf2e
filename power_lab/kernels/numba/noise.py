"""Counter-based noise: Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").

The key is the seed, the counter names the draw, so a token's noise needs no state and never depends on other tokens, rows or steps:
key = (seed low, seed high), counter = (64-token group * 16 + lane, stream, position low, position high). Output word w of lane l of
group g belongs to token 64 g + 16 w + l, so that 16 neighbouring tokens form one vector.
"""

from __future__ import annotations

from llvmlite import ir

from power_lab.kernels.numba import vector as v
from power_lab.kernels.numba.vector import F32, I32, I64, Builder, Value

GROUP = 64
STREAM = 0  # the second counter word; other uses of the same seed take other streams
ROUNDS = 10
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85


def philox(b: Builder, counter: list[Value], key: list[Value]) -> list[Value]:
    """Ten rounds on vectors of 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    type = c0.type
    for turn in range(ROUNDS):
        if turn:
            k0, k1 = b.add(k0, _word(type, WEYL[0])), b.add(k1, _word(type, WEYL[1]))
        high0, low0 = _multiply(b, c0, MULTIPLIERS[0])
        high1, low1 = _multiply(b, c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = b.xor(b.xor(high1, c1), k0), low1, b.xor(b.xor(high0, c3), k1), low0
    return [c0, c1, c2, c3]


def _word(type: ir.Type, value: int) -> ir.Constant:
    return v.const(type, value - (1 << 32) if value >> 31 else value)


def _multiply(b: Builder, x: Value, factor: int) -> tuple[Value, Value]:
    """High and low words of the 64-bit product."""
    wide = v.vec(I64, x.type.count)
    product = b.mul(b.zext(x, wide), v.const(wide, factor))
    return b.trunc(b.lshr(product, v.const(wide, 32)), x.type), b.trunc(product, x.type)


def group_words(b: Builder, group: Value, seed: Value, position: Value) -> list[Value]:
    """The four words of each lane of a group: 16-lane vectors for tokens 64 g + 16 w + lane."""
    lanes = ir.Constant(v.vec(I32), list(range(v.LANES)))
    base = v.splat(b, b.trunc(b.mul(group, v.i64(v.LANES)), I32))
    halves = lambda x: [v.splat(b, b.trunc(part, I32)) for part in (x, b.lshr(x, v.i64(32)))]  # noqa: E731
    counter = [b.add(base, lanes), v.const(v.vec(I32), STREAM), *halves(position)]
    return philox(b, counter, halves(seed))


def gumbel(b: Builder, word: Value) -> Value:
    """Standard Gumbel noise of random words: -ln(-ln(1 - u)), u = (word + 1/2) / 2^32 in f32.

    -ln(1 - u) is a standard exponential that is accurate to f32 even where it is tiny; those are the draws that win.
    """
    f = lambda value: v.const(v.vec(F32), value)  # noqa: E731
    u = b.fmul(b.fadd(b.uitofp(word, v.vec(F32)), f(0.5)), f(2.0**-32))
    u = b.select(b.fcmp_ordered("<", u, f(1 - 2.0**-24)), u, f(1 - 2.0**-24))  # words that round up to 1
    rest = b.fsub(f(1.0), u)
    # ln(rest) plus what 1 - u lost by rounding.
    lost = b.fdiv(b.fsub(b.fsub(f(1.0), rest), u), rest)
    exponential = b.fneg(b.fadd(v.log(b, rest), lost))
    return b.fneg(v.log(b, exponential))
