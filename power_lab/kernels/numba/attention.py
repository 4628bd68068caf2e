"""Causal grouped-query attention over pages.

One work item is one row and one KV head, or some of its query heads where a step has too few items for all threads; the query heads of an
item share each key and value that is read, and none sees another. Keys are taken in canonical
splits of `SPLIT` at absolute positions: scores and a softmax over the split, then the weighted values; splits are combined in order by the
online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867). Nothing of an item depends on other rows or on keys behind its position;
where a window cuts the first split depends on the row's position alone.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numba import carray, njit, types

from power_lab.kernels.numba import vector as v
from power_lab.kernels.numba.program import Job, bits, f32, i32
from power_lab.kernels.numba.team import ATTENTION, SOFTCAP
from power_lab.kernels.numba.vector import (
    F32,
    LANES,
    Builder,
    Span,
    Value,
    f32_from_bits,
    f32_pointer,
    i32_pointer,
)
from power_lab.kernels.ops import BLOCK, SPLIT, Batch, KVCache

PLAN = f"scores: fma over head_dim; splits of {SPLIT}: exp(s - max), tree sum, values: fma over keys; splits in order"
GROUP = 4  # query heads in registers at a time
AHEAD = 4096  # bytes of a page of keys that are asked for before they are read
ROWS_AHEAD = 8  # rows of values
CAPPED = 8192  # logits of a chunk
WIDE = 4  # vectors of a value row in registers at a time


def scratch_floats(group: int, head_dim: int) -> int:
    """Scratch of one thread: scores of a split, its statistics and values, and the running ones, for each query head of a group."""
    return group * (SPLIT + 2 * head_dim + 4)


def _emit_scores(b: Builder, q: Value, k: Value, dim: Value, out: Value, *, heads: int, vectors: int) -> None:
    """out[h, i] = sum_d q[h, d] * k[d, i] for 16 * `vectors` keys of a page; row pitches: q `dim`, k BLOCK, out SPLIT."""
    acc = [[v.variable(b, v.vec(F32)) for _ in range(vectors)] for _ in range(heads)]
    with v.loop(b, dim) as d:
        row = b.mul(d, v.i64(BLOCK * 4))
        for i in range(vectors):
            v.prefetch(b, v.at(b, k, b.add(row, v.i64(AHEAD + i * v.LANES * 4))))
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


def _emit_weigh(
    b: Builder, e: Value, values: Value, dim: Value, lanes: Value, count: Value, acc: Value, *, heads: int, wide: int
) -> None:
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
        for span in spans:
            v.prefetch(b, v.at(b, base, b.add(b.mul(pitch, v.i64(ROWS_AHEAD)), b.mul(span.index, v.i64(4)))))
        here = [span.load(base) for span in spans]
        for h in range(heads):
            weight = v.splat(b, v.load(b, v.at(b, e, b.add(b.mul(i, v.i64(4)), v.i64(h * SPLIT * 4))), F32))
            for slot, value in zip(sums[h], here, strict=True):
                b.store(v.fma(b, weight, value, b.load(slot)), slot)
    for row, slots in zip(rows, sums, strict=True):
        for span, slot in zip(spans, slots, strict=True):
            span.store(b.load(slot), row)


def _emit_cap(b: Builder, x: Value, scale: Value, cap: Value, count: Value) -> None:
    """x[:count] = cap * tanh(scale * x / cap) in place, tanh(y) as 1 - 2 / (e^2y + 1)."""
    f = lambda value: v.const(v.vec(F32), value)  # noqa: E731
    inner, outer = v.splat(b, b.fdiv(b.fmul(scale, v.const(F32, 2.0)), cap)), v.splat(b, cap)

    def squash(span: Span) -> None:
        power = v.exp(b, b.fmul(span.load(x), inner))
        tanh = b.fsub(f(1.0), b.fdiv(f(2.0), b.fadd(power, f(1.0))))
        span.store(b.fmul(tanh, outer), x)

    v.sweep(b, count, squash)


def _emit_clear(b: Builder, out: Value, count: Value) -> None:
    v.sweep(b, count, lambda span: span.store(v.const(v.vec(F32), 0.0), out))


def _emit_combine(b: Builder, stats: Value, acc: Value, running: Value, total: Value, dim: Value, first: Value) -> None:
    """Fold a split into the running result: rescale both to the larger maximum and add. The first split (first = 0) is the result."""
    read = lambda base, offset: v.load(b, v.at(b, base, offset), F32)  # noqa: E731
    write = lambda value, base, offset: v.store(b, value, v.at(b, base, offset))  # noqa: E731
    with b.if_else(b.icmp_signed("==", first, v.i64(0))) as (start, go_on):
        with start:
            for offset in (0, 4):
                write(read(stats, offset), running, offset)
            v.sweep(b, dim, lambda span: span.store(span.load(acc), total))
        with go_on:
            before, here = read(running, 0), read(stats, 0)
            top = b.select(b.fcmp_ordered(">", here, before), here, before)
            old, new = (v.exp(b, b.fsub(part, top)) for part in (before, here))
            write(v.fma(b, read(stats, 4), new, b.fmul(read(running, 4), old)), running, 4)
            write(top, running, 0)
            olds, news = v.splat(b, old), v.splat(b, new)
            v.sweep(
                b, dim, lambda span: span.store(v.fma(b, span.load(acc), news, b.fmul(span.load(total), olds)), total)
            )


def _emit_finish(b: Builder, total: Value, running: Value, dim: Value, out: Value) -> None:
    divisor = v.splat(b, v.load(b, v.at(b, running, 4), F32))
    v.sweep(b, dim, lambda span: span.store(b.fdiv(span.load(total), divisor), out))


def _emit_drain(b: Builder, running: Value, sink: Value) -> None:
    """The sum of weights takes the sink's in: a logit without a value."""
    weight = v.exp(b, b.fsub(v.load(b, v.at(b, sink), F32), v.load(b, v.at(b, running), F32)))
    at = v.at(b, running, 4)
    v.store(b, b.fadd(v.load(b, at, F32), weight), at)


def _scores(heads: int, vectors: int) -> Any:
    emit = partial(_emit_scores, heads=heads, vectors=vectors)
    return v.routine(f"scores_{heads}_{vectors}", types.void, [types.int64] * 4, emit)


def _weigh(heads: int, wide: int) -> Any:
    return v.routine(
        f"weigh_{heads}_{wide}", types.void, [types.int64] * 6, partial(_emit_weigh, heads=heads, wide=wide)
    )


scores_1, scores_2, scores_3, scores_4 = (_scores(heads, BLOCK // LANES) for heads in (1, 2, 3, 4))
part_1, part_2, part_3, part_4 = (_scores(heads, 1) for heads in (1, 2, 3, 4))
weigh_1, weigh_2, weigh_3, weigh_4 = (_weigh(heads, WIDE) for heads in (1, 2, 3, 4))
weigh_narrow = _weigh(1, 1)
soften = v.routine("soften", types.void, [types.int64, types.float32, types.int64, types.int64], _emit_soften)
cap_scores = v.routine("cap_scores", types.void, [types.int64, types.float32, types.float32, types.int64], _emit_cap)
clear = v.routine("clear", types.void, [types.int64] * 2, _emit_clear)
combine = v.routine("combine", types.void, [types.int64] * 6, _emit_combine)
drain = v.routine("drain", types.void, [types.int64] * 2, _emit_drain)
finish = v.routine("finish", types.void, [types.int64] * 4, _emit_finish)


@njit(nogil=True, inline="always")
def _page_scores(heads, q, k, dim, count, out):
    """Scores of a page's first `count` keys, or of some more; keys behind them are not read from memory for nothing."""
    for h in range(0, heads, GROUP):
        some, at, to = min(GROUP, heads - h), q + h * dim * 4, out + h * SPLIT * 4
        if count > BLOCK - LANES:
            if some == 4:
                scores_4(at, k, dim, to)
            elif some == 3:
                scores_3(at, k, dim, to)
            elif some == 2:
                scores_2(at, k, dim, to)
            else:
                scores_1(at, k, dim, to)
        else:
            for i in range(0, count, LANES):
                if some == 4:
                    part_4(at, k + i * 4, dim, to + i * 4)
                elif some == 3:
                    part_3(at, k + i * 4, dim, to + i * 4)
                elif some == 2:
                    part_2(at, k + i * 4, dim, to + i * 4)
                else:
                    part_1(at, k + i * 4, dim, to + i * 4)


@njit(nogil=True, inline="always")
def _page_values(heads, e, values, dim, count, acc):
    for h in range(0, heads, GROUP):
        some, weights, to = min(GROUP, heads - h), e + h * SPLIT * 4, acc + h * dim * 4
        done = dim // (WIDE * LANES) * WIDE * LANES
        for d in range(0, done, WIDE * LANES):
            if some == 4:
                weigh_4(weights, values + d * 4, dim, LANES, count, to + d * 4)
            elif some == 3:
                weigh_3(weights, values + d * 4, dim, LANES, count, to + d * 4)
            elif some == 2:
                weigh_2(weights, values + d * 4, dim, LANES, count, to + d * 4)
            else:
                weigh_1(weights, values + d * 4, dim, LANES, count, to + d * 4)
        for d in range(done, dim, LANES):
            for i in range(some):
                weigh_narrow(
                    weights + i * SPLIT * 4, values + d * 4, dim, min(LANES, dim - d), count, to + (i * dim + d) * 4
                )


@njit(nogil=True, inline="always")
def _item(q, heads, dim, start, count, pages, kv_head, page_bytes, scale, softcap, sinks, keys, values, out, scratch):
    """One row's queries of one KV head over keys start..count - 1. sinks (0 for none), q, keys, values, out and scratch are addresses."""
    inside, size = kv_head * dim * BLOCK * 4, heads * dim * 4
    stats, running = scratch + heads * SPLIT * 4, scratch + heads * (SPLIT + 2) * 4
    acc = running + heads * 8
    total = acc + size
    for first in range(start // SPLIT * SPLIT, count, SPLIT):
        low, last = max(first, start), min(count, first + SPLIT)
        whole = low // BLOCK * BLOCK
        for i in range(whole, last, BLOCK):
            page = keys + pages[i // BLOCK] * page_bytes + inside
            _page_scores(heads, q, page, dim, min(BLOCK, last - i), scratch + (i - first) * 4)
        for h in range(heads):
            scores, factor = scratch + (h * SPLIT + low - first) * 4, scale
            if softcap > 0:
                cap_scores(scores, scale, softcap, last - low)
                factor = np.float32(1)
            soften(scores, factor, last - low, stats + h * 8)
        clear(acc, heads * dim)
        for i in range(whole, last, BLOCK):
            key = max(i, low)
            page = values + pages[i // BLOCK] * page_bytes + inside + (key - i) * dim * 4
            _page_values(heads, scratch + (key - first) * 4, page, dim, min(i + BLOCK, last) - key, acc)
        for h in range(heads):
            at = h * dim * 4
            combine(stats + h * 8, acc + at, running + h * 8, total + at, dim, max(first - start, 0))
    for h in range(heads):
        if sinks:
            drain(running + h * 8, sinks + h * 4)
        finish(total + h * dim * 4, running + h * 8, dim, out + h * dim * 4)


@njit(nogil=True)
def chunk(job, index, scratch):
    """One work item; `job` as made by `job`."""
    qkv, qkv_pitch, positions, table_of, tables, pages = job[1:7]
    group, dim, kv_heads, keys, values, out = job[7:13]
    scale, softcap, window, temperature, sinks, parts = job[13:19]
    row, head, part = index // (kv_heads * parts), index // parts % kv_heads, index % parts
    first, last = part * group // parts, (part + 1) * group // parts
    position = carray(i32_pointer(positions), row + 1)[row]
    table = carray(i32_pointer(tables + carray(i32_pointer(table_of), row + 1)[row] * pages * 4), pages)
    size, factor = dim * 4, f32_from_bits(scale)
    if temperature:
        factor *= carray(f32_pointer(temperature), position + 1)[position]
    start = max(position + 1 - window, 0) if window else 0
    q, to = (
        qkv + row * qkv_pitch + (head * group + first) * size,
        out + ((row * kv_heads + head) * group + first) * size,
    )
    page_bytes, cap = kv_heads * dim * BLOCK * 4, f32_from_bits(softcap)
    sink = sinks + (head * group + first) * 4 if sinks else 0
    _item(
        q, last - first, dim, start, position + 1, table, head, page_bytes, factor, cap, sink, keys, values, to, scratch
    )


def _parts(items: int, group: int, threads: int) -> int:
    """Parts of each KV head's query heads: as few as give every thread the same number of items, or four items to each thread."""
    parts = 1
    while parts < group and items * parts % threads and items * parts < 4 * threads:
        parts += 1
    return parts


def job(
    qkv: np.ndarray,
    batch: Batch,
    q_heads: int,
    scale: float,
    cache: KVCache,
    out: np.ndarray,
    window: int,
    softcap: float,
    temperature: np.ndarray | None,
    sinks: np.ndarray | None,
    threads: int,
) -> Job:
    """Arguments as in `Ops.attention`."""
    group, items = q_heads // cache.heads, qkv.shape[0] * cache.heads
    parts = _parts(items, group, threads)
    rows = (
        f32(qkv),
        qkv.strides[0],
        i32(batch.positions),
        i32(batch.table_of),
        i32(batch.tables),
        batch.tables.shape[1],
    )
    shape = (group, cache.head_dim, cache.heads, f32(cache.keys), f32(cache.values), f32(out))
    optional = (0 if array is None else f32(array) for array in (temperature, sinks))
    rules = (bits(scale), bits(softcap), window, *optional, parts)
    return items * parts, ATTENTION, *rows, *shape, *rules


@njit(nogil=True)
def softcap_chunk(job, index, scratch):
    """Some values; `job` as made by `softcap_job`."""
    x, count, cap = job[1:4]
    first = index * CAPPED
    cap_scores(x + first * 4, np.float32(1), f32_from_bits(cap), min(CAPPED, count - first))


def softcap_job(x: np.ndarray, cap: float) -> Job:
    """x = cap * tanh(x / cap), f32 of any shape."""
    return -(-x.size // CAPPED), SOFTCAP, f32(x), x.size, bits(cap)
