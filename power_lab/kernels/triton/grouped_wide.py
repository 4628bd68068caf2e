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


@triton.jit(do_not_specialize=["first", "count", "part"])
def spread(
    weight, Panel, Factors, first, count, height, part, K,
    PARTS: tl.constexpr, BN: tl.constexpr, FORM: tl.constexpr, PDL: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Panel bf16 [height, K]: levels of `count` rows of a stored weight from `first` on; Factors f32 [1 or 2, groups of K, height].

    Program (rows, tile). Factors are the scales and, where there are some, minima. Of two PARTS eight rows of one and eight of the other
    take turns, so that a lane of the matrix unit has both of a pair; up to eights, what is behind the last row is 0.
    """
    chain.begin(PDL)
    chain.wait(PDL)
    N = weight[-1]
    i = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = i < count
    kept = i < height // PARTS
    n = (first + i).to(tl.int64)
    k = tl.program_id(1) * FORM.tile
    to = i
    if PARTS == 2:
        to = i // 8 * 16 + part * 8 + i % 8
    panel = Panel + to.to(tl.int64)[:, None] * K + tl.arange(0, 16)[None, :]
    if not INTERPRET:
        words, high = chunks.codes(weight, k, n, inside, N, BN, FORM, "")
    FIELDS: tl.constexpr = FORM.fields
    for run in tl.static_range(FORM.words // 16):
        if not INTERPRET:
            integers = chunks.integers(words[run], high, run, FORM)
        for field in tl.static_range(FIELDS):
            j = k + (run * FIELDS + field) * 16 + tl.arange(0, 16)[None, :]
            if INTERPRET:
                mask = inside[:, None] & (j < K)
                values = unpack.level(weight, n[:, None], j, N, mask, FORM).to(tl.float32).to(tl.bfloat16)
            else:
                values = integers[field]
            tl.store(panel + k + (run * FIELDS + field) * 16, values, mask=kept[:, None] & (j < K))
    groups = K // FORM.group
    for g in tl.static_range(FORM.tile // FORM.group):
        at = k + g * FORM.group
        scale, minimum = unpack.scales(weight, n, at, N, inside & (at < K), FORM)
        factor = Factors + (at // FORM.group).to(tl.int64) * height + to
        tl.store(factor, scale, mask=kept & (at < K))
        if FORM.affine:
            tl.store(factor + groups.to(tl.int64) * height, minimum, mask=kept & (at < K))


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
    d, Factors, Sums, n, r, height, padded, groups, g, acc, AFFINE: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr
):  # fmt: skip
    """`acc` and the share of group g, whose sums are d."""
    at = Factors + height.to(tl.int64) * g + n
    acc = tl.fma(d, tl.broadcast_to(tl.load(at)[:, None], (BN, BM)), acc)
    if AFFINE:
        total = tl.load(Sums + padded.to(tl.int64) * g + r)
        minimum = tl.load(at + height.to(tl.int64) * groups)
        acc = tl.fma(tl.broadcast_to(total[None, :], (BN, BM)), tl.broadcast_to(minimum[:, None], (BN, BM)), acc)
    return acc


@triton.jit
def _sums(
    X, panel, Factors, Sums, column, row, height, padded, groups, first, last,
    GROUP: tl.constexpr, TURN: tl.constexpr, AFFINE: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """f32 [BN, BM] sums over k in first..last, TURN groups at a time."""
    acc = tl.zeros((BN, BM), tl.float32)
    n = tl.minimum(column + tl.arange(0, BN), height - 1)  # what lies outside is computed, and not stored
    r = row + tl.arange(0, BM)
    for k in range(first, last, GROUP * TURN):
        for i in tl.static_range(TURN):
            x = X.load([row, k + i * GROUP]).T
            d = dot(panel.load([column, k + i * GROUP]), x, tl.zeros((BN, BM), tl.float32), INTERPRET)
            acc = _share(d, Factors, Sums, n, r, height, padded, groups, k // GROUP + i, acc, AFFINE, BN, BM)
    return acc


@triton.jit(do_not_specialize=["R"])
def grouped_wide(
    X, panel, Factors, Sums, Out, Bias, R, N, height, K, pitch, padded, span,
    GROUP: tl.constexpr, TURN: tl.constexpr, AFFINE: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, SPLITS: tl.constexpr,
    ACTIVATION: tl.constexpr, BIASED: tl.constexpr, BAND: tl.constexpr, PDL: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Out[R, N], its rows `pitch` apart, of X [R, K] and a panel [height, K] of levels with their factors, or of the two parts of a gate.

    X and panel are descriptors of tiles as deep as a group; TURN groups are a step of the loop. `Sums` has rows of `padded` numbers, so
    that tiles of rows are whole. Programs go through BAND tiles of rows before the next tile of the panel.
    """
    chain.begin(PDL)
    tiles = tl.cdiv(height, BN)
    pid = tl.program_id(0)
    band = pid // (BAND * tiles)
    high = tl.minimum(tl.cdiv(R, BM) - band * BAND, BAND)
    row = (band * BAND + (pid % (BAND * tiles)) % high) * BM
    column = (pid % (BAND * tiles)) // high * BN
    groups = K // GROUP
    chain.wait(PDL)
    acc = _sums(
        X, panel, Factors, Sums, column, row, height, padded, groups, 0, tl.minimum(K, span),
        GROUP, TURN, AFFINE, BN, BM, INTERPRET,
    )  # fmt: skip
    for s in range(1, SPLITS):
        acc += _sums(
            X, panel, Factors, Sums, column, row, height, padded, groups, s * span, tl.minimum(K, (s + 1) * span),
            GROUP, TURN, AFFINE, BN, BM, INTERPRET,
        )  # fmt: skip
    r = (row + tl.arange(0, BM))[None, :]
    if ACTIVATION > 0:
        gate, up = tl.split(tl.permute(tl.reshape(acc, (BN // 16, 2, 8, BM)), (0, 2, 3, 1)))
        value = tl.reshape(activate(gate, ACTIVATION) * up, (BN // 2, BM))
        n = (column // 2 + tl.arange(0, BN // 2))[:, None]
    else:
        value = acc
        n = (column + tl.arange(0, BN))[:, None]
    if BIASED:
        value += tl.load(Bias + n, mask=n < N, other=0.0)
    tl.store(Out + r.to(tl.int64) * pitch + n, value.to(Out.dtype.element_ty), mask=(n < N) & (r < R))
