"""Products of many rows with stored codes, scaled group by group: what `grouped` adds, in that order, so a row's bits are the same.

Codes become integers once for all rows (`spread`), in bf16, and their factors f32; sums of x over groups, for minima, are made once as well
(`added`). `wide` brings tiles of both by the copy engine.
"""

# pyright: reportPossiblyUnbound=false
# What a branch on constants leaves out is not compiled.

from __future__ import annotations

import triton
import triton.language as tl

from power_lab.kernels.triton import chain, chunks, unpack
from power_lab.kernels.triton.grouped import dot
from power_lab.kernels.triton.product import activate


@triton.jit(do_not_specialize=["first", "count"])
def spread(
    weight, Panel, Factors, first, count, K, BN: tl.constexpr, FORM: tl.constexpr, PDL: tl.constexpr, INTERPRET: tl.constexpr
):  # fmt: skip
    """Panel bf16 [count, K]: the levels of the rows of a stored weight from `first` on; Factors f32 [1 or 2, groups of K, count].

    Program (rows, tile). Factors are the scales and, where there are some, minima.
    """
    chain.begin(PDL)
    chain.wait(PDL)
    N = weight[-1]
    i = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = i < count
    n = (first + i).to(tl.int64)
    k = tl.program_id(1) * FORM.tile
    panel = Panel + i.to(tl.int64)[:, None] * K + tl.arange(0, 16)[None, :]
    if not INTERPRET:
        words, high = chunks.codes(weight, k, n, inside, N, BN, FORM, "")
    FIELDS: tl.constexpr = FORM.fields
    for run in tl.static_range(FORM.words // 16):
        if not INTERPRET:
            integers = chunks.integers(words[run], high, run, FORM)
        for field in tl.static_range(FIELDS):
            j = k + (run * FIELDS + field) * 16 + tl.arange(0, 16)[None, :]
            mask = inside[:, None] & (j < K)
            if INTERPRET:
                values = unpack.level(weight, n[:, None], j, N, mask, FORM).to(tl.float32).to(tl.bfloat16)
            else:
                values = integers[field]
            tl.store(panel + k + (run * FIELDS + field) * 16, values, mask=mask)
    groups = K // FORM.group
    for g in tl.static_range(FORM.tile // FORM.group):
        at = k + g * FORM.group
        scale, minimum = unpack.scales(weight, n, at, N, inside & (at < K), FORM)
        to = Factors + (at // FORM.group).to(tl.int64) * count + i
        tl.store(to, scale, mask=inside & (at < K))
        if FORM.affine:
            tl.store(to + groups.to(tl.int64) * count, minimum, mask=inside & (at < K))


@triton.jit(do_not_specialize=["R"])
def added(X, Sums, R, K, padded, BM: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr, INTERPRET: tl.constexpr):
    """Sums f32 [groups of K, padded] of x over each group, by the matrix unit in the steps of `grouped.sums`. Program (rows, group).

    `padded` is R rounded up to tiles of BM; behind R lie sums of nothing.
    """
    chain.begin(PDL)
    chain.wait(PDL)
    r = tl.program_id(0) * BM + tl.arange(0, BM)
    rm = r < R
    k = tl.program_id(1) * GROUP
    x = X + r.to(tl.int64)[None, :] * K + tl.arange(0, 16)[:, None] + k
    ones = tl.full((16, 16), 1.0, tl.float32 if INTERPRET else tl.bfloat16)
    total = tl.zeros((16, BM), tl.float32)
    for j in tl.static_range(0, GROUP, 16):
        total = dot(ones, tl.load(x + j, mask=rm[None, :], other=0.0), total, INTERPRET)
    first = tl.arange(0, 16)[:, None]
    to = Sums + tl.program_id(1).to(tl.int64) * padded + r[None, :] + first
    tl.store(to, total, mask=(first == 0) & (r[None, :] < padded))


@triton.jit
def _share(
    d, Factors, Sums, n, r, N, padded, groups, g, acc, AFFINE: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr
):  # fmt: skip
    """`acc` and the share of group g, whose sums are d."""
    at = Factors + N.to(tl.int64) * g + n
    acc = tl.fma(d, tl.broadcast_to(tl.load(at)[:, None], (BN, BM)), acc)
    if AFFINE:
        total = tl.load(Sums + padded.to(tl.int64) * g + r)
        minimum = tl.load(at + N.to(tl.int64) * groups)
        acc = tl.fma(tl.broadcast_to(total[None, :], (BN, BM)), tl.broadcast_to(minimum[:, None], (BN, BM)), acc)
    return acc


@triton.jit
def _sums(
    X, one, two, Factors, Factors2, Sums, column, row, N, padded, groups, first, last,
    GROUP: tl.constexpr, TURN: tl.constexpr, AFFINE: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, GATED: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """f32 [BN, BM] sums over k in first..last of weight `one`, and of `two` in gated products. TURN groups at a time."""
    acc = tl.zeros((BN, BM), tl.float32)
    beside = tl.zeros((BN, BM), tl.float32)
    n = tl.minimum(column + tl.arange(0, BN), N - 1)  # what lies outside is computed, and not stored
    r = row + tl.arange(0, BM)
    for k in range(first, last, GROUP * TURN):
        for i in tl.static_range(TURN):
            x = X.load([row, k + i * GROUP]).T
            d = dot(one.load([column, k + i * GROUP]), x, tl.zeros((BN, BM), tl.float32), INTERPRET)
            acc = _share(d, Factors, Sums, n, r, N, padded, groups, k // GROUP + i, acc, AFFINE, BN, BM)
            if GATED:
                d = dot(two.load([column, k + i * GROUP]), x, tl.zeros((BN, BM), tl.float32), INTERPRET)
                beside = _share(d, Factors2, Sums, n, r, N, padded, groups, k // GROUP + i, beside, AFFINE, BN, BM)
    return acc, beside


@triton.jit(do_not_specialize=["R"])
def grouped_wide(
    X, one, two, Factors, Factors2, Sums, Out, Bias, R, N, K, pitch, padded, span,
    GROUP: tl.constexpr, TURN: tl.constexpr, AFFINE: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, SPLITS: tl.constexpr,
    ACTIVATION: tl.constexpr, BIASED: tl.constexpr, BAND: tl.constexpr, PDL: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Out[R, N], its rows `pitch` apart, of X [R, K] and panels [N, K] of levels with their factors, or two that are gated.

    X and panels are descriptors of tiles as deep as a group; TURN groups are a step of the loop. `Sums` has rows of `padded` numbers, so
    that tiles of rows are whole. Programs go through BAND tiles of rows before the next tile of columns.
    """
    chain.begin(PDL)
    GATED: tl.constexpr = ACTIVATION > 0
    tiles = tl.cdiv(N, BN)
    pid = tl.program_id(0)
    band = pid // (BAND * tiles)
    high = tl.minimum(tl.cdiv(R, BM) - band * BAND, BAND)
    row = (band * BAND + (pid % (BAND * tiles)) % high) * BM
    column = (pid % (BAND * tiles)) // high * BN
    n = column + tl.arange(0, BN)
    r = row + tl.arange(0, BM)
    groups = K // GROUP
    chain.wait(PDL)
    acc, beside = _sums(
        X, one, two, Factors, Factors2, Sums, column, row, N, padded, groups, 0, tl.minimum(K, span),
        GROUP, TURN, AFFINE, BN, BM, GATED, INTERPRET,
    )  # fmt: skip
    for s in range(1, SPLITS):
        a, b = _sums(
            X, one, two, Factors, Factors2, Sums, column, row, N, padded, groups, s * span, tl.minimum(K, (s + 1) * span),
            GROUP, TURN, AFFINE, BN, BM, GATED, INTERPRET,
        )  # fmt: skip
        acc += a
        beside += b
    if GATED:
        acc = activate(acc, ACTIVATION) * beside
    n = n[:, None]
    if BIASED:
        acc += tl.load(Bias + n, mask=n < N, other=0.0)
    tl.store(Out + r.to(tl.int64)[None, :] * pitch + n, acc.to(Out.dtype.element_ty), mask=(n < N) & (r[None, :] < R))
