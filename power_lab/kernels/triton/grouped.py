"""Sums of products with stored codes, scaled group by group: x and integer codes on the matrix unit, f32 scales on what they add up to.

For each group of a scale, in order: dot = sum of x * level, in chained steps of 16 values from zero, then total += scale * dot, one fused
multiply-add; where there are minima, then total += minimum * (sum of x), which the matrix unit adds up in the same steps.
"""

# pyright: reportPossiblyUnbound=false
# What a branch on constants leaves out is not compiled.

from __future__ import annotations

import triton
import triton.language as tl

from power_lab.kernels.triton import chunks, unpack


@triton.jit
def dot(w, x, acc, INTERPRET: tl.constexpr):
    if INTERPRET:  # the interpreter has no bf16 arithmetic
        return tl.dot(w.to(tl.float32), x.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(w, x, acc)


@triton.jit
def _x(at, rm, K, k, AT: tl.constexpr, EVEN: tl.constexpr):
    """bf16 [16, BM] of x, turned, AT behind the places `at` of depth k: an offset that a load takes without arithmetic."""
    if EVEN:
        return tl.load(at + AT, mask=rm[None, :], other=0.0)
    else:
        return tl.load(at + AT, mask=rm[None, :] & (tl.arange(0, 16)[:, None] + k + AT < K), other=0.0)


@triton.jit
def _integers(
    planes, words, high, k, RUN: tl.constexpr, n, nm, N, FORM: tl.constexpr, INTERPRET: tl.constexpr
):  # fmt: skip
    """[BN, 16] of each chunk of a run of the tile at depth k."""
    if INTERPRET:
        inside = tl.arange(0, 16)[None, :]
        found = ()
        for field in tl.static_range(FORM.fields):
            at = k + (RUN * FORM.fields + field) * 16 + inside
            found = found + (unpack.level(planes, n[:, None], at, N, nm[:, None], FORM),)  # noqa: RUF005
        return found
    else:
        return chunks.integers(words[RUN], high, RUN, FORM)


@triton.jit
def sums(
    X, one, two, n, nm, N, r, rm, K, first, last,
    FORM: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, EVEN: tl.constexpr, GATED: tl.constexpr, POLICY: tl.constexpr,
    WARPS: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """f32 [BN, BM] sums over k in first..last of weight `one`, and of `two` in gated products. `first` is where a tile begins."""
    FIELDS: tl.constexpr = FORM.fields
    CHUNKS: tl.constexpr = FORM.group // 16
    ONES: tl.constexpr = 16 * WARPS  # rows that add up x, as few as the warps share
    acc = tl.zeros((BN, BM), tl.float32)
    beside = tl.zeros((BN, BM), tl.float32)
    n = n.to(tl.int64)
    ones = tl.full((ONES, 16), 1.0, tl.float32 if INTERPRET else tl.bfloat16)
    stored = chunks.held(one, first, n, nm, N, FORM, INTERPRET)
    stored2 = stored
    if GATED:
        stored2 = chunks.held(two, first, n, nm, N, FORM, INTERPRET)
    rows = X + r.to(tl.int64)[None, :] * K + tl.arange(0, 16)[:, None]
    for k in range(first, last, FORM.tile):
        at = rows + k
        ahead = nm & (k + FORM.tile < last)
        next_stored = chunks.held(one, k + FORM.tile, n, ahead, N, FORM, INTERPRET)
        if GATED:
            next_stored2 = chunks.held(two, k + FORM.tile, n, ahead, N, FORM, INTERPRET)
        words, high, words2, high2 = 0, 0, 0, 0
        if not INTERPRET:
            words, high = chunks.codes(one, k, n, nm, N, BN, FORM, POLICY)
            if GATED:
                words2, high2 = chunks.codes(two, k, n, nm, N, BN, FORM, POLICY)
        for run in tl.static_range(FORM.words // 16):
            w = _integers(one, words, high, k, run, n, nm, N, FORM, INTERPRET)
            if GATED:
                w2 = _integers(two, words2, high2, k, run, n, nm, N, FORM, INTERPRET)
            for field in tl.static_range(FIELDS):
                x = _x(at, rm, K, k, (run * FIELDS + field) * 16, EVEN)
                if (run * FIELDS + field) % CHUNKS == 0:
                    d = tl.zeros((BN, BM), tl.float32)
                    d2 = tl.zeros((BN, BM), tl.float32)
                    total = tl.zeros((ONES, BM), tl.float32)
                d = dot(w[field], x, d, INTERPRET)
                if GATED:
                    d2 = dot(w2[field], x, d2, INTERPRET)
                if FORM.affine:
                    total = dot(ones, x, total, INTERPRET)
                if (run * FIELDS + field + 1) % CHUNKS == 0:
                    wide = d
                    if FORM.affine:
                        wide = tl.reshape(tl.broadcast_to(total[None], (BN // ONES, ONES, BM)), (BN, BM))
                    acc = _scaled(
                        one,
                        stored,
                        k,
                        (run * FIELDS + field) // CHUNKS,
                        d,
                        wide,
                        acc,
                        n,
                        nm,
                        N,
                        BN,
                        BM,
                        FORM,
                        INTERPRET,
                    )
                    if GATED:
                        beside = _scaled(
                            two,
                            stored2,
                            k,
                            (run * FIELDS + field) // CHUNKS,
                            d2,
                            wide,
                            beside,
                            n,
                            nm,
                            N,
                            BN,
                            BM,
                            FORM,
                            INTERPRET,
                        )
        stored = next_stored
        if GATED:
            stored2 = next_stored2
    return acc, beside


@triton.jit
def _scaled(
    planes, stored, k, AT: tl.constexpr, d, total, acc, n, nm, N, BN: tl.constexpr, BM: tl.constexpr, FORM: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """`acc` and a group's share."""
    scale, minimum = chunks.factors(planes, stored, k, AT, n, nm, N, BN, BM, FORM, INTERPRET)
    acc = tl.fma(d, scale, acc)
    if FORM.affine:
        acc = tl.fma(total, minimum, acc)
    return acc
