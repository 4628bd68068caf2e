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
def _weigh(peak, m):
    """The larger of two maxima, and what results under either of them count under it: 1 for one of them."""
    gap = peak - m
    smaller = tl.exp2(-tl.abs(gap))
    return tl.maximum(peak, m), tl.where(gap >= 0, 1.0, smaller), tl.where(gap <= 0, 1.0, smaller)


@triton.jit
def _fold(peak, total, acc, m, sums, part):
    """Two partial softmax results as one: both rescaled to the larger maximum, and added."""
    top, old, new = _weigh(peak, m)
    return top, tl.fma(total, old, sums * new), tl.fma(acc, old[:, None], part * new[:, None])


@triton.jit
def _finish(total, acc):
    """The softmax-weighted mean. Adding 0 makes -0 into 0: whether empty splits were folded in must not show."""
    return acc / total + 0.0


@triton.jit
def _tile(
    q, paged, page, tile, rules, m, sums, part,
    D: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, PAGE: tl.constexpr, KV_HEADS: tl.constexpr,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """A page of keys and values into the running maximum m [M], sum [M] and weighted values [M, VALUES] of a split."""
    keys, values, _, column = paged
    position, factor, cap, low, high, window = rules
    i, d, e = tl.arange(0, PAGE), tl.arange(0, WIDTH), column + tl.arange(0, VALUES)
    keys += page.to(tl.int64) * (KV_HEADS * PAGE * D)
    values += page.to(tl.int64) * (KV_HEADS * PAGE * D)
    keys += i[:, None] * D + d[None, :]
    values += i[:, None] * D + e[None, :]
    key = tile * PAGE + i
    k_inside, v_inside = (d < D)[None, :], (e < D)[None, :]
    if MASKED:  # what lies outside is read as 0: it is multiplied by a weight of 0, and may hold anything
        there = ((key >= low) & (key < high))[:, None]
        k_inside, v_inside = there & k_inside, there & v_inside
    if MASKED or D != WIDTH:
        k = tl.load(keys, mask=k_inside, other=0.0)
        v = tl.load(values, mask=v_inside, other=0.0)
    else:
        k = tl.load(keys)
        v = tl.load(values)
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
def _unit(unit, HEAD_BLOCKS: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr):
    """A KV head, which block of its query heads, and the first of VALUES columns of its values."""
    PARTS: tl.constexpr = WIDTH // VALUES
    return unit // (HEAD_BLOCKS * PARTS), unit // PARTS % HEAD_BLOCKS, unit % PARTS * VALUES


@triton.jit
def _group(
    unit, first, count, queries, positions, table_of, tables, temperature, keys, values, pages, window, scale, cap,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, PAGE: tl.constexpr,
    M: tl.constexpr, HEADS: tl.constexpr, HEAD_BLOCKS: tl.constexpr, WINDOWED: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """What a group is computed on: queries [M, WIDTH] as `rope.rope_write` left them, (keys, values, block table, first
    of the values' columns), rules of masking, (place of a line, is it used).

    Line i of M is query head `block * HEADS + i % HEADS` of the KV head, of row `first + i // HEADS`.
    """
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
    kv_head, block, column = _unit(unit, HEAD_BLOCKS, WIDTH, VALUES)
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
    paged = (keys + kv_head * (PAGE * D), values + kv_head * (PAGE * D), table, column)
    return q, paged, (position, factor, cap, low, high, window), (row * Q_HEADS + head, used)


@triton.jit
def _put(out, to, column, result, D: tl.constexpr, VALUES: tl.constexpr):
    """VALUES columns of the lines' results."""
    at, used = to
    d = column + tl.arange(0, VALUES)
    tl.store(out + at[:, None] * D + d[None, :], result, mask=used[:, None] & (d < D)[None, :])


@triton.jit
def _nothing(M: tl.constexpr, VALUES: tl.constexpr):
    """The result of no keys."""
    return tl.full((M,), LOWEST, tl.float32), tl.zeros((M,), tl.float32), tl.zeros((M, VALUES), tl.float32)


@triton.jit
def _afresh(sums, part, M: tl.constexpr, VALUES: tl.constexpr, TILES: tl.constexpr):
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
    table = paged[2]
    following = tl.load(table + first, mask=first < last, other=0)
    for tile in tl.range(first, last):
        page, following = following, tl.load(table + tl.minimum(tile + 1, last - 1))  # early: nothing waits for it
        m, sums, part = _tile(
            q, paged, page, tile, rules, m, sums, part, D, WIDTH, VALUES, PAGE, KV_HEADS, MASKED, WINDOWED, CAPPED, INTERPRET
        )
        if (tile + 1) % TILES == 0:
            peak, total, acc = _fold(peak, total, acc, m, sums, part)
            m, sums, part = _afresh(sums, part, M, VALUES, TILES)
    return m, sums, part, peak, total, acc


@triton.jit(do_not_specialize=["rows", "pages", "window"])
def attend_many(
    queries, positions, table_of, tables, temperature, keys, values, out, groups, rows, pages, window, scale, cap,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, PAGE: tl.constexpr,
    TILES: tl.constexpr, M: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, HEAD_BLOCKS: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, INTERPRET: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Listed groups of rows, HEADS query heads of one KV head: grid (units, programs that share the list)."""
    chain.begin(PDL)
    chain.wait(PDL)
    line = tl.arange(0, M)
    begin, step, end = tl.program_id(1), tl.num_programs(1), tl.load(groups)
    for item in tl.range(begin, end, step, num_stages=1):
        first = tl.load(groups + end - item)  # the last rows of a prompt have the most keys: they begin first
        ends = (first + line >= rows) | _opens(tl.minimum(first + line, rows - 1), positions, table_of, ROWS)
        count = tl.min(tl.where(ends & (line > 0), line, ROWS), 0)
        q, paged, rules, to = _group(
            tl.program_id(0), first, count, queries, positions, table_of, tables, temperature, keys, values, pages, window, scale, cap,
            Q_HEADS, KV_HEADS, D, WIDTH, VALUES, PAGE, M, HEADS, HEAD_BLOCKS, WINDOWED, INTERPRET,
        )  # fmt: skip
        low, high = rules[3], rules[4]
        first_tile, last_tile = low // PAGE, (high + PAGE - 1) // PAGE
        m, sums, part = _nothing(M, VALUES)
        peak, total, acc = _nothing(M, VALUES)
        bare = first_tile  # from here to `edge` every row sees every key: the same bits without a mask
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
        _put(out, to, paged[3], _finish(total[:, None], acc), D, VALUES)


# --- rows whose splits are shared out ----------------------------------------------------------------------------------------------------


@triton.jit
def _leave(to, column, parts, stats, splits, split, m, sums, part, WIDTH: tl.constexpr, VALUES: tl.constexpr):
    """A split's result into scratch."""
    at, used = to
    at = at * splits + split
    d = column + tl.arange(0, VALUES)
    tl.store(stats + 2 * at, m, mask=used)
    tl.store(stats + 2 * at + 1, sums, mask=used)
    tl.store(parts + at[:, None] * WIDTH + d[None, :], part, mask=used[:, None])


@triton.jit
def _stretch(
    q, paged, first, last, end, rules, to, parts, stats, splits, m, sums, part,
    D: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, M: tl.constexpr, PAGE: tl.constexpr, TILES: tl.constexpr,
    KV_HEADS: tl.constexpr, MASKED: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Tiles first..last - 1: where one ends a split, it is left in scratch, but for the last before `end`."""
    table = paged[2]
    following = tl.load(table + first, mask=first < last, other=0)
    for tile in tl.range(first, last):
        page, following = following, tl.load(table + tl.minimum(tile + 1, last - 1))  # early: nothing waits for it
        m, sums, part = _tile(
            q, paged, page, tile, rules, m, sums, part, D, WIDTH, VALUES, PAGE, KV_HEADS, MASKED, WINDOWED, CAPPED, INTERPRET
        )
        if ((tile + 1) % TILES == 0) & (tile + 1 < end):
            _leave(to, paged[3], parts, stats, splits, tile // TILES, m, sums, part, WIDTH, VALUES)
            m, sums, part = _afresh(sums, part, M, VALUES, TILES)
    return m, sums, part


@triton.jit
def _ahead(at, d, used, parts, stats, splits, split, last, peak, total, acc, WIDTH: tl.constexpr, COUNT: tl.constexpr):
    """Fold COUNT splits from `split` on, as far as there are some: read together, folded in order."""
    for i in tl.static_range(COUNT):
        here = at * splits + split + i
        there = used & (split + i < last)
        m = tl.load(stats + 2 * here, mask=there, other=LOWEST, cache_modifier=".cg")
        sums = tl.load(stats + 2 * here + 1, mask=there, other=0.0, cache_modifier=".cg")
        part = tl.load(parts + here * WIDTH + d, mask=there, other=0.0, cache_modifier=".cg")
        peak, old, new = _weigh(peak, m)
        total, acc = tl.fma(total, old, sums * new), tl.fma(acc, old, part * new)
    return peak, total, acc


@triton.jit
def _gather(
    first_pair, within, heads, column, parts, stats, out, splits, first, last,
    D: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, PAIRS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Fold splits first..last - 1 of PAIRS pairs of a row and a query head, and write their results.

    first_pair: row * query heads + head of the first, the `within`th of `heads` that there are. Pairs lie end to end, so that no value
    has to change threads.
    """
    i = tl.arange(0, PAIRS * VALUES)
    pair, d = i // VALUES, column + i % VALUES
    used, at = within + pair < heads, first_pair + pair
    peak = tl.full((PAIRS * VALUES,), LOWEST, tl.float32)
    total, acc = tl.zeros((PAIRS * VALUES,), tl.float32), tl.zeros((PAIRS * VALUES,), tl.float32)
    split = first
    while split + AHEAD <= last:
        peak, total, acc = _ahead(at, d, used, parts, stats, splits, split, last, peak, total, acc, WIDTH, AHEAD)
        split += AHEAD
    while split < last:
        peak, total, acc = _ahead(at, d, used, parts, stats, splits, split, last, peak, total, acc, WIDTH, 4)
        split += 4
    tl.store(out + at * D + d, _finish(tl.where(used, total, 1.0), acc), mask=used & (d < D))


@triton.jit
def _shares(
    positions, table_of, rows, window,
    ROWS: tl.constexpr, LISTED: tl.constexpr, PAGE: tl.constexpr, TILES: tl.constexpr, WINDOWED: tl.constexpr,
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
    size = (start + end - row + PAGE - 1) // PAGE - low // (PAGE * TILES) * TILES
    size = tl.where(opens, size, 0)
    return row, end, tl.cumsum(size, 0) - size, size


@triton.jit(do_not_specialize=["rows", "pages", "splits", "window"])
def attend_few(
    queries, positions, table_of, tables, temperature, keys, values, out, counters, parts, stats,
    rows, pages, splits, window, scale, cap,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, PAGE: tl.constexpr,
    TILES: tl.constexpr, M: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, HEAD_BLOCKS: tl.constexpr,
    LISTED: tl.constexpr, PAIRS: tl.constexpr, AHEAD: tl.constexpr, APART: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, INTERPRET: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """All groups and units, their splits shared out evenly among the programs: each takes the splits that begin in its part of all tiles.

    Who adds the last splits of a group to its counter folds them, unless APART: then `combine` does.
    """
    chain.begin(PDL)
    chain.wait(PDL)
    row, ends, begins, sizes = _shares(positions, table_of, rows, window, ROWS, LISTED, PAGE, TILES, WINDOWED)
    tiles = tl.sum(sizes, 0)
    UNITS: tl.constexpr = KV_HEADS * HEAD_BLOCKS * (WIDTH // VALUES)
    work = tiles.to(tl.int64) * UNITS
    at = (work * tl.program_id(0) // tl.num_programs(0)).to(tl.int32)
    stop = (work * (tl.program_id(0) + 1) // tl.num_programs(0)).to(tl.int32)
    while at < stop:
        unit = at // tiles
        offset = at - unit * tiles
        mine = (begins <= offset) & (offset < begins + sizes)
        first, end = tl.sum(tl.where(mine, row, 0), 0), tl.sum(tl.where(mine, ends, 0), 0)
        begin, size = tl.sum(tl.where(mine, begins, 0), 0), tl.sum(tl.where(mine, sizes, 0), 0)
        from_split = (offset - begin + TILES - 1) // TILES
        to_split = (tl.minimum(stop - unit * tiles - begin, size) + TILES - 1) // TILES
        if from_split < to_split:
            q, paged, rules, to = _group(
                unit, first, end - first, queries, positions, table_of, tables, temperature, keys, values, pages, window, scale, cap,
                Q_HEADS, KV_HEADS, D, WIDTH, VALUES, PAGE, M, HEADS, HEAD_BLOCKS, WINDOWED, INTERPRET,
            )  # fmt: skip
            low, high = rules[3], rules[4]
            first_split, count = low // (PAGE * TILES), (size + TILES - 1) // TILES
            from_tile = tl.maximum(low // PAGE, (first_split + from_split) * TILES)
            to_tile = tl.minimum((high + PAGE - 1) // PAGE, (first_split + to_split) * TILES)
            edge = from_tile
            m, sums, part = _nothing(M, VALUES)
            if not WINDOWED:  # every row sees every key below: the same bits without a mask
                edge = tl.minimum(tl.maximum((high - (end - first) + 1) // PAGE, from_tile), to_tile)
                m, sums, part = _stretch(
                    q, paged, from_tile, edge, to_tile, rules, to, parts, stats, splits, m, sums, part,
                    D, WIDTH, VALUES, M, PAGE, TILES, KV_HEADS, False, WINDOWED, CAPPED, INTERPRET,
                )  # fmt: skip
            m, sums, part = _stretch(
                q, paged, edge, to_tile, to_tile, rules, to, parts, stats, splits, m, sums, part,
                D, WIDTH, VALUES, M, PAGE, TILES, KV_HEADS, True, WINDOWED, CAPPED, INTERPRET,
            )  # fmt: skip
            if (count == 1) & (not APART):
                _put(out, to, paged[3], _finish(sums[:, None], part), D, VALUES)
            else:
                _leave(to, paged[3], parts, stats, splits, first_split + to_split - 1, m, sums, part, WIDTH, VALUES)
                if not APART:
                    tl.debug_barrier()  # every thread's results are written before one of them says so
                    counter = counters + first * UNITS + unit
                    before = tl.atomic_add(counter, to_split - from_split, sem="acq_rel")
                    if before + to_split - from_split == count:
                        tl.store(counter, 0)
                        GROUP: tl.constexpr = Q_HEADS // KV_HEADS
                        kv_head, block, column = _unit(unit, HEAD_BLOCKS, WIDTH, VALUES)
                        for each in tl.range(first, end, num_stages=1):
                            for some in tl.static_range(0, HEADS, PAIRS):
                                within = block * HEADS + some
                                pair = (each * Q_HEADS + kv_head * GROUP + within).to(tl.int64)
                                _gather(
                                    pair, some, tl.minimum(GROUP - block * HEADS, HEADS), column, parts, stats, out, splits,
                                    first_split, first_split + count, D, WIDTH, VALUES, PAIRS, AHEAD,
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
    pair = tl.program_id(0).to(tl.int64) * Q_HEADS + tl.program_id(1)
    _gather(pair, 0, 1, 0, parts, stats, out, splits, first, last, D, WIDTH, WIDTH, 1, AHEAD)
