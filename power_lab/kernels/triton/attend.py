"""What programs of attention do with tiles of queries and keys, and the kernel of many rows: all keys of a group in one program.

`share.attend_few` runs the same operations on a row, in the same order.
"""

# pyright: reportPossiblyUnbound=false
# What a branch on constants leaves out is not compiled.

from __future__ import annotations

import math

import triton
import triton.language as tl

from power_lab.kernels.triton import chain
from power_lab.kernels.triton.operand import to_operand

LOG2E = tl.constexpr(math.log2(math.e))
LOWEST = tl.constexpr(-1e38)  # a maximum below every score: finite, so that nothing here is inf - inf


@triton.jit
def opens(row, positions, table_of, ROWS: tl.constexpr):
    """Does a group begin at this row?"""
    before = tl.maximum(row - 1, 0)
    same = tl.load(table_of + row) == tl.load(table_of + before)
    follows = tl.load(positions + row) == tl.load(positions + before) + 1
    return (row % ROWS == 0) | ((same & follows) == 0)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["positions", "table_of", "groups"])
def list_groups(
    positions, table_of, groups, rows, ROWS: tl.constexpr, AT_ONCE: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """groups[0] = how many; groups[1:] = their first rows, ascending."""
    chain.begin(PDL)
    chain.wait(PDL)
    total = 0
    for at in range(0, rows, AT_ONCE):
        row = at + tl.arange(0, AT_ONCE)
        first = (opens(tl.minimum(row, rows - 1), positions, table_of, ROWS) & (row < rows)).to(tl.int32)
        tl.store(groups + total + tl.cumsum(first, 0), row, mask=first != 0)
        total += tl.sum(first, 0)
    tl.store(groups, total)


@triton.jit
def weigh(peak, m):
    """The larger of two maxima, and what results under either of them count under it: 1 for one of them."""
    gap = peak - m
    smaller = tl.exp2(-tl.abs(gap))
    return tl.maximum(peak, m), tl.where(gap >= 0, 1.0, smaller), tl.where(gap <= 0, 1.0, smaller)


@triton.jit
def _fold(peak, total, acc, m, sums, part):
    """Two partial softmax results as one: both rescaled to the larger maximum, and added."""
    top, old, new = weigh(peak, m)
    return top, tl.fma(total, old, sums * new), tl.fma(acc, old[:, None], part * new[:, None])


@triton.jit
def drained(total, peak, sinks, head):
    """The sum of weights with that of the head's sink: a logit, in units of log2 e, that has no value."""
    if sinks is None:
        return total
    else:
        return total + tl.exp2(tl.load(sinks + head) * LOG2E - peak)


@triton.jit
def finish(total, acc):
    """The softmax-weighted mean. Adding 0 makes -0 into 0: whether empty splits were folded in must not show."""
    return acc / total + 0.0


@triton.jit
def _keys_and_values(
    paged, page, key, low, high,
    D: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, PAGE: tl.constexpr, KV_HEADS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """A page's keys [PAGE, WIDTH] and values [PAGE, VALUES] of a head: 0 beyond D. Values of keys outside of low..high - 1 are 0, since
    they are multiplied by a weight of 0, and may hold anything."""
    keys, values, key_tiles, value_tiles, place = paged
    _, kv_head, column = place
    there = ((key >= low) & (key < high))[:, None]
    if key_tiles is not None:
        line = (page * KV_HEADS + kv_head) * PAGE
        k, v = key_tiles.load([line, 0]), value_tiles.load([line, column])
        return k, tl.where(there, v, 0.0) if MASKED else v
    else:
        i, d, e = tl.arange(0, PAGE)[:, None], tl.arange(0, WIDTH)[None, :], column + tl.arange(0, VALUES)[None, :]
        start = page.to(tl.int64) * (KV_HEADS * PAGE * D)
        keys += kv_head * (PAGE * D) + start  # in this order pointers take the fewest registers
        values += kv_head * (PAGE * D) + start
        if MASKED:
            k = tl.load(keys + i * D + d, mask=there & (d < D), other=0.0)
            return k, tl.load(values + i * D + e, mask=there & (e < D), other=0.0)
        elif D != WIDTH:
            k = tl.load(keys + i * D + d, mask=d < D, other=0.0)
            return k, tl.load(values + i * D + e, mask=e < D, other=0.0)
        else:
            return tl.load(keys + i * D + d), tl.load(values + i * D + e)


@triton.jit
def tile_of(
    q, paged, page, tile, rules, m, sums, part,
    D: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, PAGE: tl.constexpr, KV_HEADS: tl.constexpr,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """A page of keys and values into the running maximum m [M], sum [M] and weighted values [M, VALUES] of a split."""
    position, factor, cap, low, high, window = rules
    key = tile * PAGE + tl.arange(0, PAGE)
    k, v = _keys_and_values(paged, page, key, low, high, D, WIDTH, VALUES, PAGE, KV_HEADS, MASKED)
    if INTERPRET:
        k, v = k.to(tl.float32), v.to(tl.float32)
    score = tl.dot(q, tl.trans(k))
    if CAPPED:  # tanh(y) = 1 - 2 / (e^2y + 1)
        score = cap * (1.0 - 2.0 / (tl.exp2(score * factor[:, None]) + 1.0))
    if MASKED:
        seen = key[None, :] <= position[:, None]
        if WINDOWED:
            seen = seen & (key[None, :] > position[:, None] - window)
        score = tl.where(seen, score, float("-inf"))
    if CAPPED:
        top = tl.maximum(m, tl.max(score, 1))
        weight = tl.exp2(score - top[:, None])
    else:
        top = tl.maximum(m, tl.max(score, 1) * factor)
        weight = tl.exp2(tl.fma(score, factor[:, None], -top[:, None]))
    keep = tl.exp2(m - top)
    sums = sums * keep + tl.sum(weight, 1)
    if not INTERPRET:
        weight = weight.to(tl.bfloat16)
    return top, sums, tl.dot(weight, v, part * keep[:, None])


@triton.jit
def unit_of(unit, HEAD_BLOCKS: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr):
    """A KV head, which block of its query heads, and the first of VALUES columns of its values."""
    PARTS: tl.constexpr = WIDTH // VALUES
    return unit // (HEAD_BLOCKS * PARTS), unit // PARTS % HEAD_BLOCKS, unit % PARTS * VALUES


@triton.jit
def group_of(
    unit, first, count, queries, positions, table_of, tables, temperature, pages, window, scale, cap,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, PITCH: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, PAGE: tl.constexpr,
    M: tl.constexpr, HEADS: tl.constexpr, HEAD_BLOCKS: tl.constexpr, WINDOWED: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """What a group is computed on: queries [M, WIDTH] as `rope.rope_write` left them, where its keys and values are (block
    table, KV head, first of the values' columns), rules of masking, (place of a line, is it used).

    Line i of M is query head `block * HEADS + i % HEADS` of the KV head, of row `first + i // HEADS`. Rows are PITCH f32 values apart.
    """
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
    kv_head, block, column = unit_of(unit, HEAD_BLOCKS, WIDTH, VALUES)
    line, d = tl.arange(0, M), tl.arange(0, WIDTH)
    start = tl.load(positions + first)
    low, high = 0, start + count  # the keys that any of the rows sees
    if WINDOWED:
        low = tl.maximum(start + 1 - window, 0)
    within = block * HEADS + line % HEADS
    used = (line // HEADS < count) & (within < GROUP)
    row, head = (first + line // HEADS).to(tl.int64), kv_head * GROUP + within
    position = start + tl.minimum(line // HEADS, count - 1)
    factor = tl.full((M,), 1.0, tl.float32) * scale
    if temperature is not None:
        factor *= tl.load(temperature + position)
    source = (row * (2 * PITCH) + head * (2 * D))[:, None] + d[None, :]
    q = tl.load(queries + source, mask=used[:, None] & (d < D)[None, :], other=0.0)
    if INTERPRET:
        q = q.to(tl.float32)
    table = tables + tl.load(table_of + first).to(tl.int64) * pages
    return q, (table, kv_head, column), (position, factor, cap, low, high, window), (row * Q_HEADS + head, used)


@triton.jit
def put(out, to, column, result, D: tl.constexpr, VALUES: tl.constexpr):
    """VALUES columns of the lines' results."""
    at, used = to
    d = column + tl.arange(0, VALUES)
    result = to_operand(result, out.dtype.element_ty)
    tl.store(out + at[:, None] * D + d[None, :], result, mask=used[:, None] & (d < D)[None, :])


@triton.jit
def nothing(M: tl.constexpr, VALUES: tl.constexpr):
    """The result of no keys."""
    return tl.full((M,), LOWEST, tl.float32), tl.zeros((M,), tl.float32), tl.zeros((M, VALUES), tl.float32)


@triton.jit
def afresh(sums, part, M: tl.constexpr, VALUES: tl.constexpr, TILES: tl.constexpr):
    """The state in which a split begins. The lowest maximum weighs old sums by 0, so that they need not be cleared."""
    if TILES == 1:  # then nothing is carried from tile to tile, and takes no registers
        sums, part = tl.zeros((M,), tl.float32), tl.zeros((M, VALUES), tl.float32)
    return tl.full((M,), LOWEST, tl.float32), sums, part


# --- rows that a program takes from their first key to their last ------------------------------------------------------------------------


@triton.jit
def _sweep(
    q, paged, first, last, rules, m, sums, part, peak, total, acc,
    D: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, M: tl.constexpr, PAGE: tl.constexpr, TILES: tl.constexpr,
    KV_HEADS: tl.constexpr, MASKED: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Tiles first..last - 1: where one ends a split, it is folded in."""
    table = paged[4][0]
    following = tl.load(table + first, mask=first < last, other=0)
    for tile in tl.range(first, last):
        page, following = following, tl.load(table + tl.minimum(tile + 1, last - 1))  # early: nothing waits for it
        m, sums, part = tile_of(
            q, paged, page, tile, rules, m, sums, part,
            D, WIDTH, VALUES, PAGE, KV_HEADS, MASKED, WINDOWED, CAPPED, INTERPRET,
        )  # fmt: skip
        if (tile + 1) % TILES == 0:
            peak, total, acc = _fold(peak, total, acc, m, sums, part)
            m, sums, part = afresh(sums, part, M, VALUES, TILES)
    return m, sums, part, peak, total, acc


@triton.jit(
    do_not_specialize=["rows", "pages", "window"],
    do_not_specialize_on_alignment=["positions", "table_of", "tables", "groups"],
)
def attend_many(
    queries, positions, table_of, tables, temperature, sinks, keys, values, key_tiles, value_tiles, out, groups,
    rows, pages, window, scale, cap,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, PITCH: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, PAGE: tl.constexpr,
    TILES: tl.constexpr, M: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, HEAD_BLOCKS: tl.constexpr,
    BARE: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, INTERPRET: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Listed groups of rows, HEADS query heads of one KV head: grid (units, programs that share the list)."""
    chain.begin(PDL)
    chain.wait(PDL)
    line = tl.arange(0, M)
    begin, step, end = tl.program_id(1), tl.num_programs(1), tl.load(groups)
    for item in tl.range(begin, end, step, num_stages=1):
        first = tl.load(groups + end - item)  # the last rows of a prompt have the most keys: they begin first
        ends = (first + line >= rows) | opens(tl.minimum(first + line, rows - 1), positions, table_of, ROWS)
        count = tl.min(tl.where(ends & (line > 0), line, ROWS), 0)
        q, place, rules, to = group_of(
            tl.program_id(0), first, count, queries, positions, table_of, tables, temperature, pages, window, scale, cap,
            Q_HEADS, KV_HEADS, PITCH, D, WIDTH, VALUES, PAGE, M, HEADS, HEAD_BLOCKS, WINDOWED, INTERPRET,
        )  # fmt: skip
        paged = keys, values, key_tiles, value_tiles, place
        low, high = rules[3], rules[4]
        first_tile, last_tile = low // PAGE, (high + PAGE - 1) // PAGE
        m, sums, part = nothing(M, VALUES)
        peak, total, acc = nothing(M, VALUES)
        edge = first_tile
        if BARE:  # between tiles where some rows do not see all, every row sees every key: the same bits without a mask
            bare = first_tile
            if WINDOWED:
                bare = tl.minimum((tl.maximum(high - window, 0) + PAGE - 1) // PAGE, last_tile)
                m, sums, part, peak, total, acc = _sweep(
                    q, paged, first_tile, bare, rules, m, sums, part, peak, total, acc,
                    D, WIDTH, VALUES, M, PAGE, TILES, KV_HEADS, True, WINDOWED, CAPPED, INTERPRET,
                )  # fmt: skip
            edge = tl.maximum((high - count + 1) // PAGE, bare)
            m, sums, part, peak, total, acc = _sweep(
                q, paged, bare, edge, rules, m, sums, part, peak, total, acc,
                D, WIDTH, VALUES, M, PAGE, TILES, KV_HEADS, False, WINDOWED, CAPPED, INTERPRET,
            )  # fmt: skip
        m, sums, part, peak, total, acc = _sweep(
            q, paged, edge, last_tile, rules, m, sums, part, peak, total, acc,
            D, WIDTH, VALUES, M, PAGE, TILES, KV_HEADS, True, WINDOWED, CAPPED, INTERPRET,
        )  # fmt: skip
        peak, total, acc = _fold(peak, total, acc, m, sums, part)
        total = drained(total, peak, sinks, to[0] % Q_HEADS)
        put(out, to, place[2], finish(total[:, None], acc), D, VALUES)
