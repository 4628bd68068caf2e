"""The kernels of attention: tiles of queries over tiles of keys, partial results of splits, their fold.

`attend_few` shares the splits of few rows out among its programs, evenly, and the program that ends a group of rows last folds them;
`attend_many` walks all keys of a group in one program. Both run the same operations on a row, in the same order.
"""

# pyright: reportPossiblyUnbound=false
# What a branch on constants leaves out is not compiled.

from __future__ import annotations

import triton
import triton.language as tl

from power_lab.kernels.triton import chain

LOWEST = tl.constexpr(-1e38)  # a maximum below every score: finite, so that nothing here is inf - inf


@triton.jit
def _opens(row, positions, table_of, ROWS: tl.constexpr):
    """Does a group begin at this row?"""
    before = tl.maximum(row - 1, 0)
    same = tl.load(table_of + row) == tl.load(table_of + before)
    follows = tl.load(positions + row) == tl.load(positions + before) + 1
    return (row % ROWS == 0) | ((same & follows) == 0)


@triton.jit(do_not_specialize=["rows"])
def list_groups(
    positions, table_of, groups, rows, ROWS: tl.constexpr, AT_ONCE: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """groups[0] = how many; groups[1:] = their first rows, ascending."""
    chain.begin(PDL)
    chain.wait(PDL)
    total = 0
    for at in range(0, rows, AT_ONCE):
        row = at + tl.arange(0, AT_ONCE)
        opens = (_opens(tl.minimum(row, rows - 1), positions, table_of, ROWS) & (row < rows)).to(tl.int32)
        tl.store(groups + total + tl.cumsum(opens, 0), row, mask=opens != 0)
        total += tl.sum(opens, 0)
    tl.store(groups, total)


@triton.jit
def _fold(peak, total, acc, m, sums, part):
    """Two partial softmax results as one: both rescaled to the larger maximum, and added."""
    top = tl.maximum(peak, m)
    old, new = tl.exp2(peak - top), tl.exp2(m - top)
    return top, tl.fma(total, old, sums * new), tl.fma(acc, old[:, None], part * new[:, None])


@triton.jit
def _finish(total, acc):
    """The softmax-weighted mean. Adding 0 makes -0 into 0: whether empty splits were folded in must not show."""
    return acc / total[:, None] + 0.0


@triton.jit
def _pages(table, tile, last_page, TILE: tl.constexpr, PAGE: tl.constexpr):
    """The page or the two pages of a tile; what lies behind `last_page` is not read."""
    COUNT: tl.constexpr = TILE // PAGE
    first = tl.load(table + tl.minimum(tile * COUNT, last_page))
    if COUNT == 1:
        return first, first
    else:
        tl.static_assert(COUNT == 2)
        return first, tl.load(table + tl.minimum(tile * COUNT + 1, last_page))


@triton.jit
def _tile(
    q, keys, values, page, other, tile, rules, m, sums, part,
    D: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, KV_HEADS: tl.constexpr,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """TILE keys and values into the running maximum m [M], sum [M] and weighted values [M, WIDTH] of a split."""
    position, factor, cap, low, high, window = rules
    i, d = tl.arange(0, TILE), tl.arange(0, WIDTH)
    pages = page if TILE == PAGE else tl.where(i < PAGE, page, other)
    at = (pages.to(tl.int64) * (KV_HEADS * PAGE * D) + (i % PAGE) * D)[:, None] + d[None, :]
    key = tile * TILE + i
    inside = (d < D)[None, :]
    if MASKED:  # what lies outside is read as 0: it is multiplied by a weight of 0, and may hold anything
        inside = ((key >= low) & (key < high))[:, None] & inside
    if MASKED or D != WIDTH:
        k = tl.load(keys + at, mask=inside, other=0.0)
        v = tl.load(values + at, mask=inside, other=0.0)
    else:
        k = tl.load(keys + at)
        v = tl.load(values + at)
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
        e = tl.exp2(score - top[:, None])
    else:
        top = tl.maximum(m, tl.max(score, 1) * factor)
        e = tl.exp2(tl.fma(score, factor[:, None], -top[:, None]))
    keep = tl.exp2(m - top)
    sums = sums * keep + tl.sum(e, 1)
    if not INTERPRET:
        e = e.to(tl.bfloat16)
    return top, sums, tl.dot(e, v, part * keep[:, None])


@triton.jit
def _group(
    first, count, kv_head, block, queries, positions, table_of, tables, temperature, keys, values, pages, window, scale, cap,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr,
    M: tl.constexpr, HEADS: tl.constexpr, WINDOWED: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """What a group is computed on: queries [M, WIDTH] as `rope.rope_write` left them, (keys, values, block table), rules of masking, (place of a line, is it used).

    Line i of M is query head `block * HEADS + i % HEADS` of the KV head, of row `first + i // HEADS`.
    """
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
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
    source = (row * ((Q_HEADS + 2 * KV_HEADS) * 2 * D) + head * (2 * D))[:, None] + d[None, :]
    q = tl.load(queries + source, mask=used[:, None] & (d < D)[None, :], other=0.0)
    if INTERPRET:
        q = q.to(tl.float32)
    table = tables + tl.load(table_of + first).to(tl.int64) * pages
    paged = (keys + kv_head * (PAGE * D), values + kv_head * (PAGE * D), table)
    return q, paged, (position, factor, cap, low, high, window), (row * Q_HEADS + head, used)


@triton.jit
def _nothing(M: tl.constexpr, WIDTH: tl.constexpr):
    """The result of no keys."""
    return tl.full((M,), LOWEST, tl.float32), tl.zeros((M,), tl.float32), tl.zeros((M, WIDTH), tl.float32)


# --- rows that a program takes from their first key to their last ------------------------------------------------------------------------


@triton.jit
def _sweep(
    q, paged, first, last, rules, m, sums, part, peak, total, acc,
    D: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
    KV_HEADS: tl.constexpr, MASKED: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Tiles first..last - 1: where one opens a split, the split before it is folded in."""
    keys, values, table = paged
    last_page = (rules[4] - 1) // PAGE
    next_page, next_other = _pages(table, first, last_page, TILE, PAGE)
    for tile in tl.range(first, last):
        page, other = next_page, next_other
        next_page, next_other = _pages(table, tile + 1, last_page, TILE, PAGE)  # early: nothing waits for it
        if tile % TILES == 0:
            peak, total, acc = _fold(peak, total, acc, m, sums, part)
            m = tl.full((M,), LOWEST, tl.float32)  # which weighs what is in sums and part by 0 from here on
        m, sums, part = _tile(
            q, keys, values, page, other, tile, rules, m, sums, part,
            D, WIDTH, PAGE, TILE, KV_HEADS, MASKED, WINDOWED, CAPPED, INTERPRET,
        )  # fmt: skip
    return m, sums, part, peak, total, acc


@triton.jit(do_not_specialize=["rows", "pages", "window"])
def attend_many(
    queries, positions, table_of, tables, temperature, keys, values, out, groups, rows, pages, window, scale, cap,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr,
    TILE: tl.constexpr, TILES: tl.constexpr, M: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, HEAD_BLOCKS: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, INTERPRET: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Listed groups of rows, HEADS query heads of one KV head: grid (KV heads * HEAD_BLOCKS, programs that share the list)."""
    chain.begin(PDL)
    chain.wait(PDL)
    line, d = tl.arange(0, M), tl.arange(0, WIDTH)
    begin, step, end = tl.program_id(1), tl.num_programs(1), tl.load(groups)
    for item in tl.range(begin, end, step, num_stages=1):
        first = tl.load(groups + end - item)  # the last rows of a prompt have the most keys: they begin first
        ends = (first + line >= rows) | _opens(tl.minimum(first + line, rows - 1), positions, table_of, ROWS)
        count = tl.min(tl.where(ends & (line > 0), line, ROWS), 0)
        q, paged, rules, to = _group(
            first, count, tl.program_id(0) // HEAD_BLOCKS, tl.program_id(0) % HEAD_BLOCKS,
            queries, positions, table_of, tables, temperature, keys, values, pages, window, scale, cap,
            Q_HEADS, KV_HEADS, D, WIDTH, PAGE, M, HEADS, WINDOWED, INTERPRET,
        )  # fmt: skip
        low, high = rules[3], rules[4]
        first_tile, last_tile = low // TILE, (high + TILE - 1) // TILE
        m, sums, part = _nothing(M, WIDTH)
        peak, total, acc = _nothing(M, WIDTH)
        bare = first_tile  # from here to `edge` every row sees every key: the same bits without a mask
        if WINDOWED:
            bare = tl.minimum((tl.maximum(high - window, 0) + TILE - 1) // TILE, last_tile)
            m, sums, part, peak, total, acc = _sweep(
                q, paged, first_tile, bare, rules, m, sums, part, peak, total, acc,
                D, WIDTH, M, PAGE, TILE, TILES, KV_HEADS, True, WINDOWED, CAPPED, INTERPRET,
            )  # fmt: skip
        edge = tl.maximum((high - count + 1) // TILE, bare)
        m, sums, part, peak, total, acc = _sweep(
            q, paged, bare, edge, rules, m, sums, part, peak, total, acc,
            D, WIDTH, M, PAGE, TILE, TILES, KV_HEADS, False, WINDOWED, CAPPED, INTERPRET,
        )  # fmt: skip
        m, sums, part, peak, total, acc = _sweep(
            q, paged, edge, last_tile, rules, m, sums, part, peak, total, acc,
            D, WIDTH, M, PAGE, TILE, TILES, KV_HEADS, True, WINDOWED, CAPPED, INTERPRET,
        )  # fmt: skip
        peak, total, acc = _fold(peak, total, acc, m, sums, part)
        at, used = to
        tl.store(out + at[:, None] * D + d[None, :], _finish(total, acc), mask=used[:, None] & (d < D)[None, :])


# --- rows whose splits are shared out ----------------------------------------------------------------------------------------------------


@triton.jit
def _leave(to, parts, stats, splits, split, m, sums, part, WIDTH: tl.constexpr):
    """A split's result into scratch."""
    at, used = to
    at = at * splits + split
    d = tl.arange(0, WIDTH)
    tl.store(stats + 2 * at, m, mask=used)
    tl.store(stats + 2 * at + 1, sums, mask=used)
    tl.store(parts + at[:, None] * WIDTH + d[None, :], part, mask=used[:, None])


@triton.jit
def _gather(
    at, used, parts, stats, out, splits, first, last,
    D: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Fold splits first..last - 1 of PAIRS pairs of a row and a query head, and write their results. at: row * query heads + head."""
    d = tl.arange(0, WIDTH)
    peak, total, acc = _nothing(PAIRS, WIDTH)
    for split in tl.range(first, last, AHEAD, num_stages=1):
        for i in tl.static_range(AHEAD):  # read together, folded in order
            here = at * splits + split + i
            there = used & (split + i < last)
            m = tl.load(stats + 2 * here, mask=there, other=LOWEST, cache_modifier=".cg")
            sums = tl.load(stats + 2 * here + 1, mask=there, other=0.0, cache_modifier=".cg")
            place = parts + here[:, None] * WIDTH + d[None, :]
            part = tl.load(place, mask=there[:, None], other=0.0, cache_modifier=".cg")
            peak, total, acc = _fold(peak, total, acc, m, sums, part)
    result = _finish(tl.where(used, total, 1.0), acc)
    tl.store(out + at[:, None] * D + d[None, :], result, mask=used[:, None] & (d < D)[None, :])


@triton.jit
def _shares(
    positions, table_of, rows, window,
    ROWS: tl.constexpr, LISTED: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Of every row: its number, 1 past the end of its group, and the group's tiles, laid end to end: where they begin, and how many.

    Tiles are counted from the start of the group's first split. Rows that open no group have none.
    """
    row = tl.arange(0, LISTED)
    safe = tl.minimum(row, rows - 1)
    opens = _opens(safe, positions, table_of, ROWS) & (row < rows)
    later = opens[None, :] & (row[None, :] > row[:, None])
    end = tl.min(tl.where(later, row[None, :], rows), 1)
    start = tl.load(positions + safe)
    low = tl.maximum(start + 1 - window, 0) if WINDOWED else start * 0
    size = (start + end - row + TILE - 1) // TILE - low // (TILE * TILES) * TILES
    size = tl.where(opens, size, 0)
    return row, end, tl.cumsum(size, 0) - size, size


@triton.jit(do_not_specialize=["rows", "pages", "splits", "window"])
def attend_few(
    queries, positions, table_of, tables, temperature, keys, values, out, counters, parts, stats,
    rows, pages, splits, window, scale, cap,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr,
    TILE: tl.constexpr, TILES: tl.constexpr, M: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, HEAD_BLOCKS: tl.constexpr,
    LISTED: tl.constexpr, PAIRS: tl.constexpr, AHEAD: tl.constexpr, APART: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, INTERPRET: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """All groups, their splits shared out evenly among the programs: each takes the splits that begin in its part of all tiles.

    Who adds the last splits of a group to its counter folds them, unless APART: then `combine` does.
    """
    chain.begin(PDL)
    chain.wait(PDL)
    row, ends, begins, sizes = _shares(positions, table_of, rows, window, ROWS, LISTED, TILE, TILES, WINDOWED)
    tiles = tl.sum(sizes, 0)
    work = tiles.to(tl.int64) * (KV_HEADS * HEAD_BLOCKS)
    at = (work * tl.program_id(0) // tl.num_programs(0)).to(tl.int32)
    stop = (work * (tl.program_id(0) + 1) // tl.num_programs(0)).to(tl.int32)
    while at < stop:
        unit = at // tiles  # a KV head and a block of its query heads
        offset = at - unit * tiles
        mine = (begins <= offset) & (offset < begins + sizes)
        first, end = tl.sum(tl.where(mine, row, 0), 0), tl.sum(tl.where(mine, ends, 0), 0)
        begin, size = tl.sum(tl.where(mine, begins, 0), 0), tl.sum(tl.where(mine, sizes, 0), 0)
        from_split = (offset - begin + TILES - 1) // TILES
        to_split = (tl.minimum(stop - unit * tiles - begin, size) + TILES - 1) // TILES
        if from_split < to_split:
            kv_head, block = unit // HEAD_BLOCKS, unit % HEAD_BLOCKS
            q, paged, rules, to = _group(
                first, end - first, kv_head, block, queries, positions, table_of, tables, temperature, keys, values,
                pages, window, scale, cap, Q_HEADS, KV_HEADS, D, WIDTH, PAGE, M, HEADS, WINDOWED, INTERPRET,
            )  # fmt: skip
            low, high = rules[3], rules[4]
            first_split, count = low // (TILE * TILES), (size + TILES - 1) // TILES
            from_tile = tl.maximum(low // TILE, (first_split + from_split) * TILES)
            to_tile = tl.minimum((high + TILE - 1) // TILE, (first_split + to_split) * TILES)
            last_page = (high - 1) // PAGE
            next_page, next_other = _pages(paged[2], from_tile, last_page, TILE, PAGE)
            m, sums, part = _nothing(M, WIDTH)
            for tile in tl.range(from_tile, to_tile):
                page, other = next_page, next_other
                next_page, next_other = _pages(paged[2], tile + 1, last_page, TILE, PAGE)
                if (tile % TILES == 0) & (tile > from_tile):
                    _leave(to, parts, stats, splits, tile // TILES - 1, m, sums, part, WIDTH)
                    m = tl.full((M,), LOWEST, tl.float32)  # which weighs what is in sums and part by 0 from here on
                m, sums, part = _tile(
                    q, paged[0], paged[1], page, other, tile, rules, m, sums, part,
                    D, WIDTH, PAGE, TILE, KV_HEADS, True, WINDOWED, CAPPED, INTERPRET,
                )  # fmt: skip
            if (count == 1) & (not APART):
                place, used = to
                d = tl.arange(0, WIDTH)
                result = _finish(sums, part)
                tl.store(out + place[:, None] * D + d[None, :], result, mask=used[:, None] & (d < D)[None, :])
            else:
                _leave(to, parts, stats, splits, first_split + to_split - 1, m, sums, part, WIDTH)
                if not APART:
                    tl.debug_barrier()  # every thread's results are written before one of them says so
                    counter = counters + first * (KV_HEADS * HEAD_BLOCKS) + unit
                    before = tl.atomic_add(counter, to_split - from_split, sem="acq_rel")
                    if before + to_split - from_split == count:
                        tl.store(counter, 0)
                        GROUP: tl.constexpr = Q_HEADS // KV_HEADS
                        for each in tl.range(first, end, num_stages=1):
                            for some in tl.static_range(0, HEADS, PAIRS):
                                within = block * HEADS + some + tl.arange(0, PAIRS)
                                used = (within < GROUP) & (some + tl.arange(0, PAIRS) < HEADS)
                                place = (each * Q_HEADS + kv_head * GROUP + within).to(tl.int64)
                                _gather(
                                    place, used, parts, stats, out, splits, first_split, first_split + count,
                                    D, WIDTH, PAIRS, AHEAD,
                                )  # fmt: skip
        at = unit * tiles + begin + size


@triton.jit(do_not_specialize=["splits", "window"])
def combine(
    positions, parts, stats, out, splits, window,
    Q_HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, SPLIT: tl.constexpr,
    WINDOWED: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Fold the splits that a row sees: one row and query head a program."""
    chain.begin(PDL)
    chain.wait(PDL)
    position = tl.load(positions + tl.program_id(0))
    first, last = 0, position // SPLIT + 1
    if WINDOWED:
        first = tl.maximum(position + 1 - window, 0) // SPLIT
    at = tl.program_id(0).to(tl.int64) * Q_HEADS + tl.program_id(1) + tl.arange(0, 1)
    _gather(at, at >= 0, parts, stats, out, splits, first, last, D, WIDTH, 1, AHEAD)
