"""The kernel of matrix products: W Xᵀ in tiles, weights unpacked in registers on their way to the matrix unit.

A weight comes as a tuple: its planes in the order of `planes.PLANES` (or its plain values), then N.
"""

# pyright: reportPossiblyUnbound=false
# What a branch on constants leaves out is not compiled.

from __future__ import annotations

import triton
import triton.language as tl

from power_lab.kernels.triton import chain, unpack
from power_lab.kernels.triton.operand import to_operand, whole


@triton.jit
def pick(weights, ITEM: tl.constexpr, tile, BN: tl.constexpr):
    """Item ITEM of the weight that owns this tile of the stacked ones."""
    item = weights[0][ITEM]
    end = tl.cdiv(weights[0][-1], BN)
    for j in tl.static_range(1, len(weights)):
        item = tl.where(tile >= end, weights[j][ITEM], item)
        end += tl.cdiv(weights[j][-1], BN)
    return item


@triton.jit
def place(weights, tile, BN: tl.constexpr):
    """(first tile, first column) of the weight that owns this tile."""
    first, column = 0, 0
    end, total = 0, 0
    for j in tl.static_range(len(weights)):
        first = tl.where(tile >= end, end, first)
        column = tl.where(tile >= end, total, column)
        end += tl.cdiv(weights[j][-1], BN)
        total += weights[j][-1]
    return first, column


@triton.jit
def dot(w, x, acc, INTERPRET: tl.constexpr):
    if INTERPRET:  # the interpreter has no bf16 arithmetic
        return tl.dot(w.to(tl.float32), x.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(w.to(x.dtype), x, acc)


@triton.jit
def _dense(weight, n, nm, K, k, BK: tl.constexpr, EVEN: tl.constexpr, POLICY: tl.constexpr):
    """A [BN, BK] tile of plain values at depth k."""
    rk = tl.arange(0, BK)
    at = weight + n.to(tl.int64)[:, None] * K + rk[None, :] + k
    if EVEN:
        return tl.load(at, mask=nm[:, None], other=0.0, eviction_policy=POLICY)
    else:
        return tl.load(at, mask=nm[:, None] & (rk[None, :] + k < K), other=0.0, eviction_policy=POLICY)


@triton.jit
def x_tile(X, r, rm, K, k, DEPTH: tl.constexpr, EVEN: tl.constexpr):
    """[DEPTH, BM] of the rows r, turned."""
    rk = tl.arange(0, DEPTH)
    at = X + r.to(tl.int64)[None, :] * K + rk[:, None] + k
    if EVEN:
        return tl.load(at, mask=rm[None, :], other=0.0)
    else:
        return tl.load(at, mask=rm[None, :] & (rk[:, None] + k < K), other=0.0)


@triton.jit
def _sum(
    X, one, two, n, nm, N, r, rm, K, first, last,
    FORM: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, GATED: tl.constexpr,
    POLICY: tl.constexpr, LEAN: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """f32 [BN, BM] sums over k in first..last of weight `one`, and of `two` in gated products."""
    acc = tl.zeros((BN, BM), tl.float32)
    beside = tl.zeros((BN, BM), tl.float32)
    if not LEAN:  # or else ptxas, for the sake of no steps at all, waits for each of the matrix unit's instructions
        tl.assume(first < last)
    if FORM is None:
        for k in range(first, last, BK):
            x = x_tile(X, r, rm, K, k, BK, EVEN)
            acc = dot(_dense(one[0], n, nm, K, k, BK, EVEN, POLICY), x, acc, INTERPRET)
            if GATED:
                beside = dot(_dense(two[0], n, nm, K, k, BK, EVEN, POLICY), x, beside, INTERPRET)
    else:
        n = n.to(tl.int64)
        for k in range(first, last, BK):
            for half in tl.static_range(BK // FORM.tile):
                depth = k + half * FORM.tile
                x = x_tile(X, r, rm, K, depth, FORM.tile, EVEN)
                w = unpack.tile(one, depth, half % (FORM.depth // FORM.tile), n, nm, N, BN, FORM, POLICY, INTERPRET)
                acc = dot(w, x, acc, INTERPRET)
                if GATED:
                    w = unpack.tile(two, depth, half % (FORM.depth // FORM.tile), n, nm, N, BN, FORM, POLICY, INTERPRET)
                    beside = dot(w, x, beside, INTERPRET)
    return whole(acc, X.dtype.element_ty), whole(beside, X.dtype.element_ty)


@triton.jit
def activate(g, ACTIVATION: tl.constexpr):
    """silu or the tanh form of GELU (Hendrycks and Gimpel 2016, arXiv:1606.08415), g (1 + tanh u) / 2 = g / (1 + e^-2u)."""
    if ACTIVATION == 1:
        return g / (1.0 + tl.exp(-g))
    else:
        return g / (1.0 + tl.exp(g * (g * g * -0.07135481282553) - g * 1.5957691216057308))


@triton.jit
def store(Out, Bias, acc, beside, at, column, mask, ACTIVATION: tl.constexpr, BIASED: tl.constexpr):
    if ACTIVATION > 0:
        acc = activate(acc, ACTIVATION) * beside
    if BIASED:
        acc += tl.load(Bias + column, mask=mask, other=0.0)
    tl.store(Out + at, to_operand(acc, Out.dtype.element_ty), mask=mask)


@triton.jit
def ahead(weight, n, N, K, first, FORM: tl.constexpr, COUNT: tl.constexpr, PDL: tl.constexpr):
    """Bring what these rows hold from depth `first` on into the L2 cache: COUNT lines of plain values, or the words of COUNT tiles."""
    n = tl.minimum(n, N - 1).to(tl.int64)[:, None]
    if FORM is None:
        k = tl.minimum(first + tl.arange(0, COUNT) * 64, K - 1)
        chain.prefetch(weight[0] + n * K + k[None, :], PDL)
    else:
        t = tl.minimum(first // FORM.tile + tl.arange(0, COUNT), (K - 1) // FORM.tile).to(tl.int64)
        chain.prefetch(weight[0] + (t[None, :] * N + n) * FORM.words, PDL)


@triton.jit(do_not_specialize=["R"])
def product(
    X, weights, Out, Bias, Partials, Counters, R, K, columns, pitch, span,
    FORM: tl.constexpr, BN: tl.constexpr, USED: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr,
    ACTIVATION: tl.constexpr, BIASED: tl.constexpr, EVEN: tl.constexpr, STREAM: tl.constexpr, BAND: tl.constexpr,
    AHEAD: tl.constexpr, LEAN: tl.constexpr, APART: tl.constexpr, PDL: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Out[R, columns], its rows `pitch` apart, of weights that lie side by side, or of two that are gated. Program (tile, split).

    A tile has BN lines, of which USED are columns of a weight; the others are empty.
    Splits leave their sums in `Partials`; the last to arrive adds them, in order, unless they stay APART.
    """
    chain.begin(PDL)
    GATED: tl.constexpr = ACTIVATION > 0
    POLICY: tl.constexpr = "evict_first" if STREAM else ""
    if GATED:
        tiles = tl.cdiv(columns, USED)
    else:
        tiles = 0
        for j in tl.static_range(len(weights)):
            tiles += tl.cdiv(weights[j][-1], USED)
    pid = tl.program_id(0)
    band = pid // (BAND * tiles)
    high = tl.minimum(tl.cdiv(R, BM) - band * BAND, BAND)
    row = band * BAND + (pid % (BAND * tiles)) % high
    tile = (pid % (BAND * tiles)) // high
    if GATED:
        one, two, N, first, column = weights[0], weights[1], weights[0][-1], 0, 0
    else:
        one = stacked(weights, tile, USED)
        two = one
        N = pick(weights, -1, tile, USED)
        first, column = place(weights, tile, USED)
    n = (tile - first) * USED + tl.arange(0, BN)
    nm = n < N
    near = n
    if USED < BN:
        last = (tile - first + 1) * USED
        nm, near = n < tl.minimum(N, last), tl.minimum(n, last - 1)
    r = row * BM + tl.arange(0, BM)
    rm = r < R
    mask = nm[:, None] & rm[None, :]
    out_column = column + n[:, None]
    at = r.to(tl.int64)[None, :] * pitch + out_column
    split = tl.program_id(1)
    if AHEAD > 0:
        ahead(one, near, N, K, split * span, FORM, AHEAD, PDL)
        if GATED:
            ahead(two, near, N, K, split * span, FORM, AHEAD, PDL)
    chain.wait(PDL)
    first_k, end = split * span, tl.minimum(K, (split + 1) * span)
    acc, beside = _sum(
        X, one, two, n, nm, N, r, rm, K, first_k, end, FORM, BN, BM, BK, EVEN, GATED, POLICY, LEAN, INTERPRET
    )
    if SPLITS == 1:
        store(Out, Bias, acc, beside, at, out_column, mask, ACTIVATION, BIASED)
    else:
        size = R.to(tl.int64) * columns
        sums = Partials + r.to(tl.int64)[None, :] * columns + out_column
        tl.store(sums + split * size, acc, mask=mask)
        if GATED:
            tl.store(sums + (SPLITS + split) * size, beside, mask=mask)
        if not APART:
            tl.debug_barrier()  # every thread's sums are written before one of them says so
            if tl.atomic_add(Counters + pid, 1, sem="acq_rel") == SPLITS - 1:
                total = tl.load(sums, mask=mask, other=0.0, cache_modifier=".cg")
                total_beside = beside
                if GATED:
                    total_beside = tl.load(sums + SPLITS * size, mask=mask, other=0.0, cache_modifier=".cg")
                for i in range(1, SPLITS):
                    total += tl.load(sums + i * size, mask=mask, other=0.0, cache_modifier=".cg")
                    if GATED:
                        total_beside += tl.load(sums + (SPLITS + i) * size, mask=mask, other=0.0, cache_modifier=".cg")
                store(Out, Bias, total, total_beside, at, out_column, mask, ACTIVATION, BIASED)
                tl.store(Counters + pid, 0)


@triton.jit
def stacked(weights, tile, BN: tl.constexpr):
    """The planes of the weight that owns this tile."""
    if len(weights) == 1:
        return weights[0]
    elif len(weights[0]) == 2:
        return (pick(weights, 0, tile, BN), 0)
    else:
        return (
            pick(weights, 0, tile, BN), pick(weights, 1, tile, BN), pick(weights, 2, tile, BN), pick(weights, 3, tile, BN),
            pick(weights, 4, tile, BN), 0,
        )  # fmt: skip


@triton.jit(do_not_specialize=["size"])
def combine(Gate, Up, Out, size, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Out = f(Gate) * Up, value by value."""
    chain.begin(PDL)
    chain.wait(PDL)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < size
    g = tl.load(Gate + i, mask=mask, other=0.0)
    result = activate(g, ACTIVATION) * tl.load(Up + i, mask=mask, other=0.0)
    tl.store(Out + i, to_operand(result, Out.dtype.element_ty), mask=mask)
