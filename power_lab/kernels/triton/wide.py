"""The kernel of matrix products of many rows: W Xᵀ of plain values, tiles brought by the copy engine.

It adds what `product` adds, in that order, so a row's bits are the same.
"""

# pyright: reportPossiblyUnbound=false
# What a branch on constants leaves out is not compiled.

from __future__ import annotations

import triton
import triton.language as tl

from power_lab.kernels.triton import chain, unpack
from power_lab.kernels.triton.operand import to_operand, whole
from power_lab.kernels.triton.product import activate, dot


@triton.jit
def sums(
    X, one, two, n, r, first, last,
    BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, GATED: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """f32 [BN, BM] sums over k in first..last of weight `one`, and of `two` in gated products."""
    acc = tl.zeros((BN, BM), tl.float32)
    beside = tl.zeros((BN, BM), tl.float32)
    for k in range(first, last, BK):
        x = X.load([r, k]).T
        acc = dot(one.load([n, k]), x, acc, INTERPRET)
        if GATED:
            beside = dot(two.load([n, k]), x, beside, INTERPRET)
    return whole(acc, X.dtype), whole(beside, X.dtype)


@triton.jit(do_not_specialize=["R"])
def wide(
    X, one, two, Out, Bias, R, N, K, pitch, span,
    BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr, HELD: tl.constexpr, ACTIVATION: tl.constexpr,
    BIASED: tl.constexpr, BAND: tl.constexpr, PDL: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Out[R, N], its rows `pitch` apart, of X [R, K] and a weight [N, K], or two that are gated: descriptors of tiles.

    Programs go through BAND tiles of rows before the next tile of columns. Sums of splits are HELD in registers, or meet in Out where the
    tile is too large for that.
    """
    chain.begin(PDL)
    GATED: tl.constexpr = ACTIVATION > 0
    tl.static_assert(SPLITS == 1 or HELD or not GATED, "gates need whole sums")
    tiles = tl.cdiv(N, BN)
    pid = tl.program_id(0)
    band = pid // (BAND * tiles)
    high = tl.minimum(tl.cdiv(R, BM) - band * BAND, BAND)
    row = (band * BAND + (pid % (BAND * tiles)) % high) * BM
    column = (pid % (BAND * tiles)) // high * BN
    n = column + tl.arange(0, BN)[:, None]
    r = row + tl.arange(0, BM)[None, :]
    mask = (n < N) & (r < R)
    out = Out + r.to(tl.int64) * pitch + n
    chain.wait(PDL)
    if SPLITS == 1 or HELD:
        acc, beside = sums(X, one, two, column, row, 0, tl.minimum(K, span), BN, BM, BK, GATED, INTERPRET)
        for s in range(1, SPLITS):
            last = tl.minimum(K, (s + 1) * span)
            a, b = sums(X, one, two, column, row, s * span, last, BN, BM, BK, GATED, INTERPRET)
            acc += a
            beside += b
        if GATED:
            acc = activate(acc, ACTIVATION) * beside
        if BIASED:
            acc += tl.load(Bias + n, mask=n < N, other=0.0)
        tl.store(out, to_operand(acc, Out.dtype.element_ty), mask=mask)
    else:
        for s in range(SPLITS):
            last = tl.minimum(K, (s + 1) * span)
            acc, _ = sums(X, one, two, column, row, s * span, last, BN, BM, BK, False, INTERPRET)
            if s > 0:
                acc += tl.load(out, mask=mask, other=0.0)
            if BIASED:  # noqa: SIM102  one is a constant
                if s == SPLITS - 1:
                    acc += tl.load(Bias + n, mask=n < N, other=0.0)
            tl.store(out, acc, mask=mask)
            tl.debug_barrier()  # what one thread stored, another may load


@triton.jit(do_not_specialize=["first", "count"])
def spread(
    weight, Panel, first, count, K, BN: tl.constexpr, FORM: tl.constexpr, PDL: tl.constexpr, INTERPRET: tl.constexpr
):  # fmt: skip
    """Panel f16 [count, K]: the rows of a stored weight from `first` on, as `product` gives them to the matrix unit."""
    chain.begin(PDL)
    chain.wait(PDL)
    N = weight[-1]
    i = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = i < count
    for half in tl.static_range(FORM.depth // FORM.tile):
        k = tl.program_id(1) * FORM.depth + half * FORM.tile
        n = (first + i).to(tl.int64)
        values = unpack.tile(weight, k, half, n, inside, N, BN, FORM, "", INTERPRET)
        j = k + tl.arange(0, FORM.tile)[None, :]
        tl.store(Panel + i.to(tl.int64)[:, None] * K + j, values, mask=inside[:, None] & (j < K))
