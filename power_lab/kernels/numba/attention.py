"""Causal grouped-query attention over pages.

One work item is one row and one KV head; all query heads of the group share each key and value that is read. Keys are taken in canonical
splits of `SPLIT` at absolute positions: scores and a softmax over the split, then the weighted values; splits are combined in order by the
online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867). Nothing of an item depends on other rows or on keys behind its position.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numba import njit, prange, types

from power_lab.kernels.numba import vector as v
from power_lab.kernels.numba.vector import F32, Builder, Span, Value, address
from power_lab.kernels.ops import BLOCK, SPLIT

PLAN = f"scores: fma over head_dim; splits of {SPLIT}: exp(s - max), tree sum, values: fma over keys; splits in order"
GROUP = 4  # query heads in registers at a time
WIDE = 4  # vectors of a value row in registers at a time


def scratch_floats(group: int, head_dim: int) -> int:
    """Scratch of one thread: scores of a split, its statistics and values, and the running ones, for each query head of a group."""
    return group * (SPLIT + 2 * head_dim + 4)


def _emit_scores(b: Builder, q: Value, k: Value, dim: Value, out: Value, *, heads: int) -> None:
    """out[h, 0..63] = sum_d q[h, d] * k[d, 0..63], for one page; q has a row pitch of `dim`, out of SPLIT."""
    vectors = BLOCK // v.LANES
    acc = [[v.variable(b, v.vec(F32)) for _ in range(vectors)] for _ in range(heads)]
    with v.loop(b, dim) as d:
        row = b.mul(d, v.i64(BLOCK * 4))
        keys = [v.load(b, v.at(b, k, b.add(row, v.i64(i * v.LANES * 4))), v.vec(F32)) for i in range(vectors)]
        for h in range(heads):
            at = b.mul(b.add(d, b.mul(dim, v.i64(h))), v.i64(4))
            query = v.splat(b, v.load(b, v.at(b, q, at), F32))
            for slot, key in zip(acc[h], keys, strict=True):
                b.store(v.fma(b, query, key, b.load(slot)), slot)
    for h in range(heads):
        for i, slot in enumerate(acc[h]):
            v.store(b, b.load(slot), v.at(b, out, (h * SPLIT + i * v.LANES) * 4))


def _emit_soften(b: Builder, scores: Value, scale: Value, count: Value, stats: Value) -> None:
    """scores[:count] becomes exp(scale * s - max) in place; the maximum and the sum go to stats[0] and stats[1]."""
    low = v.const(v.vec(F32), float("-inf"))
    best, total, factor = v.variable(b, v.vec(F32), low), v.variable(b, v.vec(F32)), v.splat(b, scale)

    def largest(span: Span) -> None:
        scaled = b.fmul(span.load(scores), factor)
        span.store(scaled, scores)
        value, old = span.only(scaled, low), b.load(best)
        b.store(b.select(b.fcmp_ordered(">", value, old), value, old), best)

    v.sweep(b, count, largest)
    peak = v.tree_max(b, b.load(best))
    top = v.splat(b, peak)

    def weigh(span: Span) -> None:
        e = span.only(v.exp(b, b.fsub(span.load(scores), top)), v.const(v.vec(F32), 0.0))
        span.store(e, scores)
        b.store(b.fadd(b.load(total), e), total)

    v.sweep(b, count, weigh)
    v.store(b, peak, v.at(b, stats))
    v.store(b, v.tree_sums(b, [b.load(total)])[0], v.at(b, stats, 4))


def _emit_weigh(b: Builder, e: Value, values: Value, dim: Value, lanes: Value, count: Value, acc: Value, *, heads: int, wide: int) -> None:
    """acc[h, :] += sum_i e[h, i] * values[i, :] over the first `count` keys of a page, for one strip of `wide` vectors.

    A strip of one vector may be partial: only its first `lanes` are touched. Row pitches: e SPLIT, values and acc `dim`.
    """
    mask = v.first_lanes(b, lanes) if wide == 1 else None
    spans = [Span(b, v.i64(i * v.LANES), mask) for i in range(wide)]
    pitch = b.mul(dim, v.i64(4))
    rows = [b.add(acc, b.mul(pitch, v.i64(h))) for h in range(heads)]
    sums = [[v.variable(b, v.vec(F32), span.load(row)) for span in spans] for row in rows]
    with v.loop(b, count) as i:
        base = b.add(values, b.mul(i, pitch))
        here = [span.load(base) for span in spans]
        for h in range(heads):
            weight = v.splat(b, v.load(b, v.at(b, e, b.add(b.mul(i, v.i64(4)), v.i64(h * SPLIT * 4))), F32))
            for slot, value in zip(sums[h], here, strict=True):
                b.store(v.fma(b, weight, value, b.load(slot)), slot)
    for row, slots in zip(rows, sums, strict=True):
        for span, slot in zip(spans, slots, strict=True):
            span.store(b.load(slot), row)


def _scores(heads: int) -> Any:
    return v.routine(f"scores_{heads}", types.void, [types.int64] * 4, partial(_emit_scores, heads=heads))


def _weigh(heads: int, wide: int) -> Any:
    return v.routine(f"weigh_{heads}_{wide}", types.void, [types.int64] * 6, partial(_emit_weigh, heads=heads, wide=wide))


scores_1, scores_2, scores_3, scores_4 = (_scores(heads) for heads in (1, 2, 3, 4))
weigh_1, weigh_2, weigh_3, weigh_4 = (_weigh(heads, WIDE) for heads in (1, 2, 3, 4))
weigh_narrow = _weigh(1, 1)
soften = v.routine("soften", types.void, [types.int64, types.float32, types.int64, types.int64], _emit_soften)
exp = v.routine("exp", types.float32, [types.float32], v.exp)


@njit(nogil=True)
def _page_scores(heads, q, k, dim, out):
    for h in range(0, heads, GROUP):
        some, at, to = min(GROUP, heads - h), q + h * dim * 4, out + h * SPLIT * 4
        if some == 4:
            scores_4(at, k, dim, to)
        elif some == 3:
            scores_3(at, k, dim, to)
        elif some == 2:
            scores_2(at, k, dim, to)
        else:
            scores_1(at, k, dim, to)


@njit(nogil=True)
def _page_values(heads, e, values, dim, count, acc):
    for h in range(0, heads, GROUP):
        some, weights, to = min(GROUP, heads - h), e + h * SPLIT * 4, acc + h * dim * 4
        done = dim // (WIDE * 16) * WIDE * 16
        for d in range(0, done, WIDE * 16):
            if some == 4:
                weigh_4(weights, values + d * 4, dim, 16, count, to + d * 4)
            elif some == 3:
                weigh_3(weights, values + d * 4, dim, 16, count, to + d * 4)
            elif some == 2:
                weigh_2(weights, values + d * 4, dim, 16, count, to + d * 4)
            else:
                weigh_1(weights, values + d * 4, dim, 16, count, to + d * 4)
        for d in range(done, dim, 16):
            for i in range(some):
                weigh_narrow(weights + i * SPLIT * 4, values + d * 4, dim, min(16, dim - d), count, to + (i * dim + d) * 4)


@njit(nogil=True)
def _split(q, heads, first, count, pages, head, scale, keys, values, e, stats, acc):
    """One canonical split: keys first..first + count - 1. Leaves each head's maximum, sum and unscaled values in scratch."""
    dim = keys.shape[2]
    page_size = keys.shape[1] * dim * BLOCK * 4
    inside = head * dim * BLOCK * 4
    for i in range(0, count, BLOCK):
        page = pages[(first + i) // BLOCK]
        _page_scores(heads, q, address(keys) + page * page_size + inside, dim, address(e) + i * 4)
    for h in range(heads):
        soften(address(e) + h * SPLIT * 4, scale, count, address(stats) + h * 8)
    acc[:] = 0
    for i in range(0, count, BLOCK):
        page = pages[(first + i) // BLOCK]
        _page_values(heads, address(e) + i * 4, address(values) + page * page_size + inside, dim, min(BLOCK, count - i), address(acc))


@njit(nogil=True)
def _combine(stats, acc, running, total):
    """Fold a split into the running result: rescale both to the larger maximum and add."""
    for h in range(acc.shape[0]):
        top = max(running[h, 0], stats[h, 0])
        old, new = exp(running[h, 0] - top), exp(stats[h, 0] - top)
        running[h, 1] = running[h, 1] * old + stats[h, 1] * new
        running[h, 0] = top
        for d in range(acc.shape[1]):
            total[h, d] = total[h, d] * old + acc[h, d] * new


@njit(nogil=True)
def _item(q, heads, position, pages, head, scale, keys, values, out, scratch):
    """Attention of one row's queries of one KV head; q and out are addresses of `heads` heads; scratch f32 [S]."""
    dim = keys.shape[2]
    e = scratch[: heads * SPLIT]
    stats = scratch[e.size : e.size + heads * 2].reshape(heads, 2)
    running = scratch[e.size + heads * 2 : e.size + heads * 4].reshape(heads, 2)
    start = e.size + heads * 4
    acc = scratch[start : start + heads * dim].reshape(heads, dim)
    total = scratch[start + heads * dim : start + 2 * heads * dim].reshape(heads, dim)
    for first in range(0, position + 1, SPLIT):
        _split(q, heads, first, min(SPLIT, position + 1 - first), pages, head, scale, keys, values, e, stats, acc)
        if first == 0:
            running[:], total[:] = stats, acc
        else:
            _combine(stats, acc, running, total)
    for h in range(heads):
        for d in range(dim):
            out[h * dim + d] = total[h, d] / running[h, 1]


@njit(parallel=True, nogil=True)
def attention(qkv, positions, table_of, tables, q_heads, scale, keys, values, out, scratch):
    """qkv f32 [R, (q_heads + 2 kv_heads) * head_dim], out f32 [R, q_heads * head_dim], scratch f32 [threads, S]."""
    parts, kv_heads, dim = scratch.shape[0], keys.shape[1], keys.shape[2]
    heads = q_heads // kv_heads
    for part in prange(parts):
        for item in range(part, qkv.shape[0] * kv_heads, parts):
            row, head = item // kv_heads, item % kv_heads
            q = address(qkv) + (row * qkv.shape[1] + head * heads * dim) * 4
            mine = out[row, head * heads * dim : (head + 1) * heads * dim]
            _item(q, heads, positions[row], tables[table_of[row]], head, np.float32(scale), keys, values, mine, scratch[part])
